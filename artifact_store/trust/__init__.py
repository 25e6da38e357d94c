"""Trust: keys, signatures, signing policies. Section 12 of docs/store-format.md."""
