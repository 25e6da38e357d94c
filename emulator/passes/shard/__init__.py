"""Tensor parallelism: one program for all ranks, with sharded weights and collectives (SPMD)."""

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.shard.apply import apply
from nxpipe.emulator.passes.shard.padding import NO_PADDING, Padding, padding, worst
from nxpipe.emulator.passes.shard.plan import DegreeImpossible, Division, Sharding, ShardPlan, divide, plan

__all__ = [
    "NO_PADDING",
    "DegreeImpossible",
    "Division",
    "Padding",
    "ShardPlan",
    "Sharding",
    "apply",
    "divide",
    "padding",
    "plan",
    "shard",
    "worst",
]


def shard(graph: Graph, options: PassOptions) -> Graph:
    """The program of every rank at the degree of the options; DegreeImpossible lists the possible degrees."""
    if options.tensor_parallel == 1:
        return graph
    graph = unroll(graph)
    return apply(graph, plan(graph, options.tensor_parallel, dict(options.published_plan)))
