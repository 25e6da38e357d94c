"""The parts of an executable file. docs/nxe.md is its specification."""
