"""What two artifacts do not have in common, beyond the digests of their parts: programs, graphs, tensors."""
