"""The parts of an executable file. docs/reference/nxe.md is its specification."""
