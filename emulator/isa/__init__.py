"""The instruction set of the emulated machine, as data. docs/isa.md is its specification."""
