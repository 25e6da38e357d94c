"""Indexes over many small objects; each can be rebuilt at any time. Section 9 of docs/reference/store-format.md."""
