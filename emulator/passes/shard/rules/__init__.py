"""The rules of division, one for each kind of operator."""

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Cast,
    Concat,
    Convolution,
    Cumulate,
    Flip,
    Gather,
    GroupedMatMul,
    Index,
    IndexUpdate,
    LayerNorm,
    Linear,
    MatMul,
    Operator,
    Pad,
    Pool,
    Reduce,
    Resample,
    Reshape,
    RmsNorm,
    Slice,
    SliceUpdate,
    Softmax,
    Transpose,
    Unary,
    Where,
)
from nxpipe.emulator.passes.shard.layout import Repeated
from nxpipe.emulator.passes.shard.rules.general import Rule, apart_from, elementwise, everything_whole
from nxpipe.emulator.passes.shard.rules.movement import (
    broadcast,
    concat,
    gather,
    index,
    index_update,
    reshape,
    slice_update,
    transpose,
    window,
)
from nxpipe.emulator.passes.shard.rules.products import attention, convolution, grouped_matmul, linear, matmul, reduce
from nxpipe.emulator.passes.shard.walk import Walk


def rule_of(walk: Walk, node: Node) -> Rule:
    if any(isinstance(walk.layout(operand), Repeated) for operand in node.operands) and node.op.name != "reshape":
        return everything_whole
    return RULES.get(type(node.op), everything_whole)


def _trailing(node: Node) -> tuple[int, ...]:
    rank = node.result.type.rank
    assert isinstance(node.op, LayerNorm | RmsNorm)
    return tuple(range(rank - node.op.axes, rank))


def _padded(node: Node) -> tuple[int, ...]:
    assert isinstance(node.op, Pad)
    return tuple(axis for axis, added in enumerate(zip(node.op.before, node.op.after, strict=True)) if any(added))


def _places(node: Node) -> tuple[int, ...]:
    return tuple(range(2, node.result.type.rank))


def _stretched(node: Node) -> tuple[int, ...]:
    assert isinstance(node.op, Resample)
    return tuple(range(node.result.type.rank - len(node.op.sizes), node.result.type.rank))


def _named_axis(node: Node) -> tuple[int, ...]:
    assert isinstance(node.op, Softmax | Cumulate)
    return (node.op.axis,)


def _named_axes(node: Node) -> tuple[int, ...]:
    assert isinstance(node.op, Flip)
    return node.op.axes


RULES: dict[type[Operator], Rule] = {
    Attention: attention,
    Binary: elementwise,
    Broadcast: broadcast,
    Cast: elementwise,
    Concat: concat,
    Convolution: convolution,
    Cumulate: apart_from(_named_axis),
    Flip: apart_from(_named_axes),
    Gather: gather,
    GroupedMatMul: grouped_matmul,
    Index: index,
    IndexUpdate: index_update,
    LayerNorm: apart_from(_trailing),
    Linear: linear,
    MatMul: matmul,
    Pad: apart_from(_padded),
    Pool: apart_from(_places),
    Reduce: reduce,
    Resample: apart_from(_stretched),
    Reshape: reshape,
    RmsNorm: apart_from(_trailing),
    Slice: window,
    SliceUpdate: slice_update,
    Softmax: apart_from(_named_axis),
    Transpose: transpose,
    Unary: elementwise,
    Where: elementwise,
}
