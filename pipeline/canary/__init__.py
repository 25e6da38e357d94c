"""The judge of a rollout, in the standard library only: Lambda function, simulator and replay run these files."""
