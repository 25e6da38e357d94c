"""A shortcut through many small objects, which can be made anew at any time. Section 9 of docs/store-format.md."""
