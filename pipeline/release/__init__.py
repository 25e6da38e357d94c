"""Releases: the gates from a model's description to a channel and its fleets; docs/release.md."""
