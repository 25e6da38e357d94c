"""Tensor parallelism: one program for all ranks, with weights divided among them and collectives in between."""

from emulator.graph import Graph
from emulator.passes.options import PassOptions
from emulator.passes.shard.apply import apply
from emulator.passes.shard.plan import DegreeImpossible, Division, Piece, Plan, divide, plan
from emulator.passes.shard.surplus import NO_PADDING, Padding, padding, worst
from emulator.repeat import unroll

__all__ = [
    "NO_PADDING",
    "DegreeImpossible",
    "Division",
    "Padding",
    "Piece",
    "Plan",
    "apply",
    "divide",
    "padding",
    "plan",
    "shard",
    "worst",
]


def shard(graph: Graph, options: PassOptions) -> Graph:
    """One rank's program at the degree that the options ask for; DegreeImpossible says which can be had instead."""
    if options.tensor_parallel == 1:
        return graph
    graph = unroll(graph)
    return apply(graph, plan(graph, options.tensor_parallel, dict(options.published_plan)))
