"""Trust: keys, signatures, signing policies. Section 12 of docs/reference/store-format.md."""
