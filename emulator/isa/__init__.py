"""The instruction set of the emulated machine, as data. docs/reference/isa.md is its specification."""
