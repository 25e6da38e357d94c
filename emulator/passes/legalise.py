"""What a target does not have becomes what it has. An ideal machine, which is no target, has everything.

Integers of 64 bits are computed in 32, the compiler's default on every generation. Inputs and outputs keep their
types; a constant that does not fit is refused instead of being cut short.
"""

from dataclasses import replace

import numpy as np

from emulator.builder import GraphBuilder
from emulator.errors import CompileError
from emulator.graph import NOWHERE, Graph, Origin, Value
from emulator.numerics import Array
from emulator.ops import Cast, Operator, attributes
from emulator.passes.options import PassOptions
from emulator.repeat import unroll
from emulator.types import DType

_WIDE, _NARROW = DType.INT64, DType.INT32
_LIMITS = np.iinfo(np.int32)


class ConstantTooLarge(CompileError):
    """A constant needs more bits than the target's integers have."""

    def __init__(self, low: int, high: int, place: Origin) -> None:
        at = f" at {place}" if str(place) else ""
        super().__init__(
            f"an integer constant{at} ranges from {low} to {high}, but integers are computed in 32 bits "
            f"({_LIMITS.min} to {_LIMITS.max}); use a smaller number, or a float"
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
    return builder.add(Cast(_NARROW), value, origin=origin) if value.type.dtype is _WIDE else value


def _constant(builder: GraphBuilder, value: Value, table: Array, reader: Origin) -> Value:
    if value.type.dtype is not _WIDE:
        return builder.constant(table, value.type.dtype)
    low, high = (int(table.min()), int(table.max())) if table.size else (0, 0)
    if low < _LIMITS.min or high > _LIMITS.max:
        raise ConstantTooLarge(low, high, reader)
    return builder.constant(table, _NARROW)


def _renamed(op: Operator) -> Operator:
    changes = {name: _NARROW for name, attribute in attributes(op).items() if attribute is _WIDE}
    return replace(op, **changes) if changes else op
