"""Lower precision where the compiler's options ask for it. Graph inputs and outputs keep their types."""

from dataclasses import replace

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Node, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Cast, Operator, attributes
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import declare, keep, rewrite


def autocast(graph: Graph, options: PassOptions) -> Graph:
    """`matmult` narrows what streams through the tensor engine; `all` narrows every float32 value."""
    if options.autocast == "matmult":
        return _narrow_matrix_operands(graph, options.narrow)
    if options.autocast == "all":
        return _narrow_everything(graph, options.narrow)
    return graph


def _cast(builder: GraphBuilder, value: Value, dtype: DType, origin: Origin) -> Value:
    return value if value.type.dtype is dtype else builder.add(Cast(dtype), value, origin=origin)


def _narrow_matrix_operands(graph: Graph, narrow: DType) -> Graph:
    """Operands are cast on their way in; sums leave the tensor engine in float32, as before."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        streamed = operands[: node.op.matrix_operands]
        if not any(operand.type.dtype is DType.FLOAT32 for operand in streamed):
            return keep(builder, node, operands)
        casts = [_cast(builder, operand, narrow, node.origin) for operand in streamed]
        rest = operands[node.op.matrix_operands :]
        return builder.add(_internally_narrow(node.op, narrow), *casts, *rest, origin=node.origin)

    return rewrite(graph, rebuild)


def _internally_narrow(op: Operator, narrow: DType) -> Operator:
    """Attention's softmax is an operand of its second product, so it is narrowed with the others."""
    if attributes(op).get("probabilities") is DType.FLOAT32:
        return replace(op, probabilities=narrow)  # type: ignore[call-arg]
    return op


def _narrow_everything(graph: Graph, narrow: DType) -> Graph:
    """Every float32 tensor becomes narrow where it is read first, so that a layer's weights and caches are cast in that
    layer, and layers stay alike; operators that name float32 name it no more.

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
        result = builder.add(_renamed(node.op, narrow), *operands, origin=node.origin)
        # Scalars alone make a float32 tensor still, as `where(mask, 0.0, -inf)` does.
        widened = result.type.dtype is DType.FLOAT32 and result.type.rank
        new[node.result] = _cast(builder, result, narrow, node.origin) if widened else result
    for name, value in graph.outputs.items():
        builder.output(name, _cast(builder, narrowed(value, NOWHERE), value.type.dtype, NOWHERE))
    return builder.build()


def _renamed(op: Operator, narrow: DType) -> Operator:
    changes = {name: narrow for name, attribute in attributes(op).items() if attribute is DType.FLOAT32}
    return replace(op, **changes) if changes else op
