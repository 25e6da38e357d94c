"""Execution of compiled programs: `fast` runs a graph on all ranks, `isa` instructions; `runtime` is a host.

docs/reference/runtime.md is the specification of `runtime` and `model`; `status` has their refusals, `inputs`
validates inputs.
"""
