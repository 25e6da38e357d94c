"""Channels: what runs somewhere, as an append-only log that is never wrong about the present."""
