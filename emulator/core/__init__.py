"""The emulated NeuronCore: executes a program instruction by instruction, under the least favourable legal conditions.

`machine.Machine` is the entry point. `memory` holds the poisoned memories and `access` the places of instructions in
them, `engines` has the semantics of each instruction, `scheduler` chooses the next engine, and `races` proves that the
choice did not matter.
"""
