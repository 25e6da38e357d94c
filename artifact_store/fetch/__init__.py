"""Fetching artifacts: mirrors, a read-through cache on this machine, parallel range reads, files laid out in a folder."""
