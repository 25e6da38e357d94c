"""Indexes over many small objects; each can be rebuilt at any time. Section 9 of docs/store-format.md."""
