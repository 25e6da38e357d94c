"""Legalization of element types: autocast of floats by the options, and 64-bit integers computed in 32 bits.

Graph inputs and outputs keep their types. Narrowing integers is the compiler's default on every generation; a constant
that does not fit is an error and is not truncated. Without a target, all types are legal.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Node, Origin, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Cast, Operator, attributes
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import declare, keep, rewrite


def autocast(graph: Graph, options: PassOptions) -> Graph:
    """Narrow the operands of the tensor engine (`matmult`), or every float32 value (`all`)."""
    if options.autocast == "matmult":
        return _narrow_matrix_operands(graph, options.narrow)
    if options.autocast == "all":
        return _narrow_everything(graph, options.narrow)
    return graph


def _cast(builder: GraphBuilder, value: Value, dtype: DType, origin: Origin) -> Value:
    return value if value.type.dtype is dtype else builder.add(Cast(dtype), value, origin=origin)


def _narrow_matrix_operands(graph: Graph, narrow: DType) -> Graph:
    """Cast the operands of matrix products; their results stay float32."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        matrices = operands[: node.op.matrix_operands]
        if not any(operand.type.dtype is DType.FLOAT32 for operand in matrices):
            return keep(builder, node, operands)
        casts = [_cast(builder, operand, narrow, node.origin) for operand in matrices]
        others = operands[node.op.matrix_operands :]
        return builder.add(_internally_narrow(node.op, narrow), *casts, *others, origin=node.origin)

    return rewrite(graph, rebuild)


def _internally_narrow(op: Operator, narrow: DType) -> Operator:
    """The operator with narrow attention probabilities, which are an operand of attention's second product."""
    if attributes(op).get("probabilities") is DType.FLOAT32:
        return replace(op, probabilities=narrow)  # type: ignore[call-arg]
    return op


def _narrow_everything(graph: Graph, narrow: DType) -> Graph:
    """Narrow every float32 tensor, and attributes that name float32. Each tensor is cast at its first read, so that a
    layer's weights and caches are cast in that layer and all layers have the same nodes.

    Scalars stay float32: they are immediates of instructions, which the engines apply in float32 anyway.
    """
    builder = GraphBuilder()
    new = declare(builder, graph)
    wide = {old for old in new if old.type.dtype is DType.FLOAT32 and old.type.rank}

    def narrowed(old: Value, origin: Origin) -> Value:
        if old in wide:
            wide.remove(old)
            new[old] = _cast(builder, new[old], narrow, origin)
        return new[old]

    for node in graph.nodes:
        operands = [narrowed(operand, node.origin) for operand in node.operands]
        result = builder.add(_with_narrow_floats(node.op, narrow), *operands, origin=node.origin)
        # An operator on scalars only still gives a float32 tensor, for example `where(mask, 0.0, -inf)`.
        widened = result.type.dtype is DType.FLOAT32 and result.type.rank
        new[node.result] = _cast(builder, result, narrow, node.origin) if widened else result
    for name, value in graph.outputs.items():
        builder.output(name, _cast(builder, narrowed(value, NOWHERE), value.type.dtype, NOWHERE))
    return builder.build()


def _with_narrow_floats(op: Operator, narrow: DType) -> Operator:
    changes = {name: narrow for name, attribute in attributes(op).items() if attribute is DType.FLOAT32}
    return replace(op, **changes) if changes else op


_NARROW = {DType.INT64: DType.INT32, DType.UINT64: DType.UINT32}


class ConstantTooLarge(CompileError):
    """A constant that does not fit the target's integers."""

    def __init__(self, low: int, high: int, place: Origin, type_: DType = DType.INT32) -> None:
        location, limits = f" at {place}" if str(place) else "", np.iinfo(type_.value)
        super().__init__(
            f"an integer constant{location} ranges from {low} to {high}, but integers are computed in 32 bits "
            f"({limits.min} to {limits.max}); use a smaller number, or a float"
        )


def legalise(graph: Graph, options: PassOptions) -> Graph:
    """Compute 64-bit integers in 32 bits if there is a target."""
    return graph if options.target is None else _narrow_integers(unroll(graph))


def _narrow_integers(graph: Graph) -> Graph:
    builder = GraphBuilder()
    new: dict[Value, Value] = {}
    for side, add in ((graph.inputs, builder.input), (graph.parameters, builder.parameter)):
        for name, value in side.items():
            new[value] = _narrowed(builder, add(name, value.type), Origin(name))
    readers = {operand: node.origin for node in reversed(graph.nodes) for operand in node.operands}
    for value, table in graph.constants.items():
        new[value] = _constant(builder, value, table, readers.get(value, NOWHERE))
    for node in graph.nodes:
        result = builder.add(
            _with_narrow_integers(node.op), *(new[operand] for operand in node.operands), origin=node.origin
        )
        # Some operators always give 64-bit counts or positions.
        new[node.result] = _narrowed(builder, result, node.origin)
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


def _with_narrow_integers(op: Operator) -> Operator:
    named = {name: attribute for name, attribute in attributes(op).items() if isinstance(attribute, DType)}
    changes: dict[str, Any] = {name: _NARROW[dtype] for name, dtype in named.items() if dtype in _NARROW}
    return replace(op, **changes) if changes else op
