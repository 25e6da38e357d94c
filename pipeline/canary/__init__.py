"""The judge of a rollout, in the standard library alone: these files are the Lambda, the simulator and the replay."""
