"""Execution of compiled programs: `fast` runs a graph, `isa` instructions; `runtime` is a host.

docs/reference/runtime.md is the specification of `runtime` and `model`. Ranks of a graph are in `ranks`, refusals in
`status`.
"""
