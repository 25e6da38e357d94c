"""What a target does not have becomes what it has. An ideal machine, which is no target, has everything.

Integers of 64 bits are computed in 32, the compiler's default on every generation. Inputs and outputs keep their
types; a constant that does not fit is refused instead of being cut short.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Origin, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Cast, Operator, attributes
from nxpipe.emulator.passes.options import PassOptions

_NARROW = {DType.INT64: DType.INT32, DType.UINT64: DType.UINT32}


class ConstantTooLarge(CompileError):
    """A constant needs more bits than the target's integers have."""

    def __init__(self, low: int, high: int, place: Origin, type_: DType = DType.INT32) -> None:
        at, limits = f" at {place}" if str(place) else "", np.iinfo(type_.value)
        super().__init__(
            f"an integer constant{at} ranges from {low} to {high}, but integers are computed in 32 bits "
            f"({limits.min} to {limits.max}); use a smaller number, or a float"
        )


def legalise(graph: Graph, options: PassOptions) -> Graph:
    """The graph in the target's own types."""
    return graph if options.target is None else _narrow_integers(unroll(graph))


def _narrow_integers(graph: Graph) -> Graph:
    builder = GraphBuilder()
    new: dict[Value, Value] = {}
    for side, declare in ((graph.inputs, builder.input), (graph.parameters, builder.parameter)):
        for name, value in side.items():
            new[value] = _narrowed(builder, declare(name, value.type), Origin(name))
    readers = {operand: node.origin for node in reversed(graph.nodes) for operand in node.operands}
    for value, table in graph.constants.items():
        new[value] = _constant(builder, value, table, readers.get(value, NOWHERE))
    for node in graph.nodes:
        result = builder.add(_renamed(node.op), *(new[operand] for operand in node.operands), origin=node.origin)
        new[node.result] = _narrowed(builder, result, node.origin)  # counts and positions are born wide
    for name, value in graph.outputs.items():
        widened = value.type.dtype is not new[value].type.dtype
        builder.output(name, builder.add(Cast(value.type.dtype), new[value]) if widened else new[value])
    return builder.build()


def _narrowed(builder: GraphBuilder, value: Value, origin: Origin) -> Value:
    narrow = _NARROW.get(value.type.dtype)
    return builder.add(Cast(narrow), value, origin=origin) if narrow else value


def _constant(builder: GraphBuilder, value: Value, table: Array, reader: Origin) -> Value:
    narrow = _NARROW.get(value.type.dtype)
    if narrow is None:
        return builder.constant(table, value.type.dtype)
    low, high = (int(table.min()), int(table.max())) if table.size else (0, 0)
    limits = np.iinfo(narrow.value)
    if low < limits.min or high > limits.max:
        raise ConstantTooLarge(low, high, reader, narrow)
    return builder.constant(table, narrow)


def _renamed(op: Operator) -> Operator:
    named = {name: attribute for name, attribute in attributes(op).items() if isinstance(attribute, DType)}
    changes: dict[str, Any] = {name: _NARROW[dtype] for name, dtype in named.items() if dtype in _NARROW}
    return replace(op, **changes) if changes else op
