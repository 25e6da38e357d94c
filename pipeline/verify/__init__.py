"""Whether a program is right: carried out, held against PyTorch on the same weights, and tried again later."""
