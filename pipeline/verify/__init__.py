"""Verification: programs run on the emulator and compared with PyTorch on the same weights, when built and later."""
