"""Fetching artifacts: mirrors, a read-through cache, parallel range reads, files laid out in a folder."""
