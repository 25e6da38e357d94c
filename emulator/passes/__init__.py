"""Passes of the front end: the list of graph rewrites, and the checker that runs before and after each."""

from collections.abc import Callable, Iterable, Sequence

from nxpipe.emulator.errors import GraphInvalid
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import require_sound_repeats
from nxpipe.emulator.ops.base import result_type
from nxpipe.emulator.passes.fuse import fuse, recognise_causal
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.precision import autocast, legalise
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.passes.shard import shard
from nxpipe.emulator.passes.simplify import (
    advance_parameter_arithmetic,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
)


def check(graph: Graph, after: str) -> None:
    """Raise GraphInvalid unless every value is defined once, before use, with the type that its shape rule gives."""
    defined: set[Value] = set()
    ids: set[int] = set()
    for value in _definitions(graph):
        if value.id in ids:
            raise GraphInvalid(f"after {after}, value {value.id} is defined twice")
        ids.add(value.id)
    for value in (*graph.inputs.values(), *graph.parameters.values(), *graph.constants):
        defined.add(value)
    ends = {repeat.stop: repeat for repeat in graph.repeats}
    for position, node in enumerate(graph.nodes, 1):
        _check_node(node, defined, after)
        defined.add(node.result)
        if position in ends:
            defined.update(value for results in ends[position].given.values() for value in results)
    require_sound_repeats(graph)
    for name, value in graph.outputs.items():
        if value not in defined:
            raise GraphInvalid(f"after {after}, output {name!r} is not defined by the graph")
    for value, data in graph.constants.items():
        if data.shape != value.type.shape or data.dtype != value.type.dtype.held:
            raise GraphInvalid(f"after {after}, a constant of type {value.type} holds {data.dtype}{list(data.shape)}")


def check_interface(before: Graph, graph: Graph, after: str) -> None:
    """Raise GraphInvalid if a pass changed the interface of a graph: inputs, outputs, or types of parameters."""
    if _signature(before) != _signature(graph):
        raise GraphInvalid(f"{after} changed the graph's inputs or outputs")
    for name, value in graph.parameters.items():
        if name not in before.parameters or before.parameters[name].type != value.type:
            raise GraphInvalid(f"{after} added parameter {name!r} of type {value.type}")


def _definitions(graph: Graph) -> Iterable[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)
    yield from (value for repeat in graph.repeats for results in repeat.given.values() for value in results)


def _check_node(node: Node, defined: set[Value], after: str) -> None:
    for operand in node.operands:
        if operand not in defined:
            raise GraphInvalid(f"after {after}, {node.op.label} of {node.origin} uses a value before it is defined")
    inferred = result_type(node.op, tuple(operand.type for operand in node.operands))
    if inferred != node.result.type:
        raise GraphInvalid(f"after {after}, {node.op.label} of {node.origin} yields {inferred}, not {node.result.type}")


def _signature(graph: Graph) -> tuple[object, ...]:
    # A state stays on its device, so sharding may change its type.
    sides, states = (graph.inputs, graph.outputs), graph.inputs.keys() & graph.outputs.keys()
    return tuple([(name, name in states or value.type) for name, value in side.items()] for side in sides)


Pass = Callable[[Graph, PassOptions], Graph]

# Constants are folded before autocast, so that the positions in rotary tables are exact, and after it, for its casts.
# Fusion precedes autocast, because its patterns are in float32. Sharding follows all simplifications.
PASSES: tuple[Pass, ...] = (
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fuse,
    recognise_causal,
    autocast,
    legalise,
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    shard,
    advance_parameter_arithmetic,
    roll,
)

__all__ = ["PASSES", "Pass", "PassOptions", "check", "run_passes"]


def run_passes(graph: Graph, options: PassOptions, passes: Sequence[Pass] | None = None) -> Graph:
    """The graph after all passes, or after `passes`. GraphInvalid names the pass after which the graph is invalid."""
    check(graph, after="capture")
    for rewrite in PASSES if passes is None else passes:
        before, graph = graph, rewrite(graph, options)
        check(graph, after=rewrite.__name__)
        check_interface(before, graph, after=rewrite.__name__)
    return graph
