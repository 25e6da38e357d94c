"""Channels: append-only logs of generations; the newest generation is what the channel serves."""
