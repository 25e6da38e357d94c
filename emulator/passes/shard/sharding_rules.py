"""Sharding rules, one for each kind of operator: the sharding of a node, from the layouts of its operands.

Elementwise operators keep the layout of their operands. Data movement operators keep it if the divided axis stays
intact. Linear layers are divided by the outputs of a weight (column-parallel), then by its inputs with a sum over ranks
(row-parallel). Without an applicable rule, every rank computes the whole node.
"""

from collections.abc import Callable

from nxpipe.emulator.ir.nodes import Node, Value
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
from nxpipe.emulator.passes.shard.layout import AxisSplit, Layout, Repeated, Split
from nxpipe.emulator.passes.shard.propagation import NodeSharding, Propagation, common_layout, shifted

Rule = Callable[[Propagation, Node], NodeSharding]


def replicated(propagation: Propagation, node: Node) -> NodeSharding:
    """Every rank computes the whole node."""
    for operand in node.operands:
        propagation.replicate(operand)
    return NodeSharding((None,) * len(node.operands), None)


def elementwise(propagation: Propagation, node: Node) -> NodeSharding:
    """All operands have the same layout; an operand that is broadcast along the divided axis is replicated."""
    layout = common_layout(propagation, node.operands, node.result.type.rank)
    if layout is None or node.result.type.shape[layout.axis] != layout.outer * sum(layout.sizes):
        return replicated(propagation, node)
    return NodeSharding(
        tuple(broadcast_layout(propagation, node.result.type.rank, layout, operand) for operand in node.operands),
        layout,
    )


def broadcast_layout(propagation: Propagation, rank: int, layout: Split, operand: Value) -> Layout:
    """The layout of an operand that broadcasts against a divided operand."""
    own = shifted(layout, operand.type.rank - rank)
    if own.axis < 0 or operand.type.shape[own.axis] == 1:
        propagation.replicate(operand)
        return None
    return propagation.align(operand, own)


def first_operand(propagation: Propagation, node: Node, result: Layout) -> NodeSharding:
    """The first operand keeps its layout and all others are whole; without a result layout, it is gathered."""
    if result is None:
        return replicated(propagation, node)
    for operand in node.operands[1:]:
        propagation.replicate(operand)
    return NodeSharding((propagation.layout(node.operands[0]), *[None] * (len(node.operands) - 1)), result)


def independent_along(axes: Callable[[Node], tuple[int, ...]]) -> Rule:
    """The rule of operators that work along some axes and are independent along the others."""

    def rule(propagation: Propagation, node: Node) -> NodeSharding:
        layout = propagation.layout(node.operands[0])
        free = layout is not None and layout.axis not in axes(node)
        return first_operand(propagation, node, layout if free else None)

    return rule


def partial_sums(operands: tuple[Layout, ...], layout: Split) -> NodeSharding:
    """Each rank computes a partial sum; no two ranks may have the same unit."""
    for split in layout.splits:
        split.require_division()
        split.mark_summed()
    return NodeSharding(operands, None, reduced=True)


def transpose(propagation: Propagation, node: Node) -> NodeSharding:
    assert isinstance(node.op, Transpose)
    layout = propagation.layout(node.operands[0])
    return first_operand(propagation, node, layout and layout.at(node.op.order.index(layout.axis)))


def reshape(propagation: Propagation, node: Node) -> NodeSharding:
    layout = propagation.layout(node.operands[0])
    before, after = node.operands[0].type.shape, node.result.type.shape
    return first_operand(propagation, node, layout and layout.reshaped(before, after))


def broadcast(propagation: Propagation, node: Node) -> NodeSharding:
    """The repetition of key heads for the query heads that they serve divides the query heads too."""
    layout, x = propagation.layout(node.operands[0]), node.operands[0].type
    if layout is not None and _repeats_heads(layout, x.shape, node.result.type.shape):
        heads = layout.sizes[0] * node.result.type.shape[layout.axis + 1]
        queries = AxisSplit(heads, layout.splits[0].name)
        layout.splits[0].serves(queries, layout.sizes[0])
        repeated = Repeated(layout.axis, 1, layout.sizes, layout.splits, queries)
        return first_operand(propagation, node, repeated)
    return first_operand(propagation, node, layout and shifted(layout, node.result.type.rank - x.rank))


def _repeats_heads(layout: Split, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    axis = layout.axis + 1
    alone = layout.outer == len(layout.splits) == 1 and axis < len(before) == len(after)
    return alone and before[axis] == 1 < after[axis] and before[:axis] == after[:axis]


def window(propagation: Propagation, node: Node) -> NodeSharding:
    """Any slice of other axes; of the divided axis, only whole blocks. Otherwise it requires block boundaries."""
    assert isinstance(node.op, Slice)
    layout = propagation.layout(node.operands[0])
    if layout is None:
        return replicated(propagation, node)
    axis = layout.axis
    start, stop, step = node.op.starts[axis], node.op.stops[axis], node.op.steps[axis]
    if (start, stop, step) == (0, node.operands[0].type.shape[axis], 1):
        return first_operand(propagation, node, layout)
    taken = layout.window(start, stop) if step == 1 else None
    if taken is None:
        propagation.require_boundaries(layout, start, stop)
        return NodeSharding((None,), None)
    return first_operand(propagation, node, taken)


def concat(propagation: Propagation, node: Node) -> NodeSharding:
    assert isinstance(node.op, Concat)
    layout = common_layout(propagation, node.operands, node.result.type.rank)
    if layout is None or layout.axis == node.op.axis:
        return replicated(propagation, node)
    return NodeSharding(tuple(propagation.align(operand, layout) for operand in node.operands), layout)


def slice_update(propagation: Propagation, node: Node) -> NodeSharding:
    """The divided axis must be replaced in full, as in a KV cache update at some positions for all heads."""
    assert isinstance(node.op, SliceUpdate)
    layout = common_layout(propagation, node.operands[::-1], node.result.type.rank)
    shapes = {operand.type.shape[layout.axis] for operand in node.operands} if layout else set()
    if layout is None or len(shapes) > 1:
        return replicated(propagation, node)
    return NodeSharding(tuple(propagation.align(operand, layout) for operand in node.operands), layout)


def index(propagation: Propagation, node: Node) -> NodeSharding:
    assert isinstance(node.op, Index)
    layout = propagation.layout(node.operands[0])
    if layout is None or layout.axis in node.op.axes:
        return replicated(propagation, node)
    result_axes = _result_axes(node.op.axes, node.operands[0], node.operands[1:])
    return first_operand(propagation, node, layout.at(result_axes[layout.axis]))


def index_update(propagation: Propagation, node: Node) -> NodeSharding:
    """Axes that are not indexed may be divided, in the tensor and in its update."""
    assert isinstance(node.op, IndexUpdate)
    x, update, *indices = node.operands
    result_axes = _result_axes(node.op.axes, x, indices)
    layout = _layout_of_target(propagation, x, update, result_axes)
    if layout is None or layout.axis in node.op.axes:
        return replicated(propagation, node)
    missing = x.type.rank - len(node.op.axes) + max(i.type.rank for i in indices) - update.type.rank
    place = result_axes[layout.axis] - missing
    if place < 0 or update.type.shape[place] == 1:
        return replicated(propagation, node)
    for other in indices:
        propagation.replicate(other)
    layouts = (
        propagation.align(x, layout),
        propagation.align(update, layout.at(place)),
        *[None] * len(indices),
    )
    return NodeSharding(layouts, layout)


def _layout_of_target(propagation: Propagation, x: Value, update: Value, result_axes: dict[int, int]) -> Layout:
    """The layout of the tensor, otherwise of its update, in terms of the tensor's axes."""
    layout, written = propagation.layout(x), propagation.layout(update)
    if layout is not None or written is None:
        return layout
    return next((written.at(axis) for axis, place in result_axes.items() if place == written.axis), None)


def _result_axes(axes: tuple[int, ...], x: Value, indices: list[Value] | tuple[Value, ...]) -> dict[int, int]:
    """The axis of the result for each axis that is not indexed."""
    common = max(index.type.rank for index in indices)
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    front = axes[0] if adjacent else 0
    kept = [axis for axis in range(x.type.rank) if axis not in axes]
    return {axis: position if position < front else position + common for position, axis in enumerate(kept)}


def gather(propagation: Propagation, node: Node) -> NodeSharding:
    """Each rank looks up the rows of its shard of the vocabulary; an all-reduce adds the results."""
    assert isinstance(node.op, Gather)
    table, indices = node.operands
    layout = propagation.layout(table)
    if layout is None and table == propagation.vocabulary and indices in propagation.varying:
        layout = propagation.divide(table, 0)
    if layout is None:
        return replicated(propagation, node)
    propagation.replicate(indices)
    if layout.axis == node.op.axis:
        if table == propagation.vocabulary and len(layout.splits) == 1 and indices in propagation.varying:
            return NodeSharding((layout, None), None, reduced=True)
        return replicated(propagation, node)
    moved = layout.axis if layout.axis < node.op.axis else layout.axis - 1 + indices.type.rank
    return NodeSharding((layout, None), layout.at(moved))


_CHANNELS = "channels of convolutions are not padded"


def reduce(propagation: Propagation, node: Node) -> NodeSharding:
    """A sum over a divided axis is a partial sum; other reductions over it gather the operand."""
    assert isinstance(node.op, Reduce)
    layout = propagation.layout(node.operands[0])
    if layout is None or layout.axis not in node.op.axes:
        removed = 0 if layout is None or node.op.keep else sum(axis < layout.axis for axis in node.op.axes)
        return first_operand(propagation, node, layout and shifted(layout, -removed))
    if node.op.function != "sum" or not node.result.type.dtype.is_float:
        return replicated(propagation, node)
    return partial_sums((layout,), layout)


def linear(propagation: Propagation, node: Node) -> NodeSharding:
    """Row-parallel if the input features are divided; column-parallel if the input is whole."""
    x, weight, *bias = node.operands
    layout, last = propagation.layout(x), x.type.rank - 1
    if layout is not None and layout.axis == last:
        for other in bias:
            propagation.replicate(other)
        return partial_sums((layout, propagation.align(weight, layout.at(1)), *[None] * len(bias)), layout)
    if layout is not None:
        return first_operand(propagation, node, layout)
    rows = propagation.layout(weight) or propagation.divide(weight, 0)
    if rows is None or rows.axis != 0:
        return replicated(propagation, node)
    return NodeSharding((None, rows, *[propagation.align(other, rows) for other in bias]), rows.at(last))


def convolution(propagation: Propagation, node: Node) -> NodeSharding:
    """Channels are divided like features; weights stay whole if the degree does not divide the channels."""
    assert isinstance(node.op, Convolution)
    x, weight, *bias = node.operands
    channels = propagation.layout(x)
    if node.op.groups > 1:
        return _by_groups(propagation, node, node.op.groups, channels)
    if channels is not None and channels.axis == 1:
        for other in bias:
            propagation.replicate(other)
        for split in channels.splits:
            split.mark_summed()
            split.forbid_padding(_CHANNELS)
        return NodeSharding((channels, propagation.align(weight, channels), *[None] * len(bias)), None, reduced=True)
    outputs = propagation.layout(weight) or propagation.divide(weight, 0)
    if channels is not None or outputs is None or outputs.axis != 0:
        return replicated(propagation, node)
    for split in outputs.splits:
        split.forbid_padding(_CHANNELS)
    return NodeSharding((None, outputs, *[propagation.align(other, outputs) for other in bias]), outputs.at(1))


def _by_groups(propagation: Propagation, node: Node, groups: int, channels: Layout) -> NodeSharding:
    """Groups are independent, so a division of channels into whole groups is kept."""
    _, weight, *bias = node.operands
    if channels is None or channels.axis != 1 or channels.outer != 1 or len(channels.splits) != 1:
        return replicated(propagation, node)
    channels.splits[0].limit(groups)
    channels.splits[0].forbid_padding(_CHANNELS)
    outputs = Split(0, 1, weight.type.shape[:1], channels.splits)
    layouts = (
        channels,
        propagation.align(weight, outputs),
        *[propagation.align(other, outputs) for other in bias],
    )
    return NodeSharding(layouts, outputs.at(1))


def matmul(propagation: Propagation, node: Node) -> NodeSharding:
    a, b = node.operands
    left, right = propagation.layout(a), propagation.layout(b)
    rows, columns, rank = a.type.rank - 2, a.type.rank - 1, node.result.type.rank
    if left is not None and left.axis == columns:
        return partial_sums((left, propagation.align(b, left.at(b.type.rank - 2))), left)
    if right is not None and right.axis == b.type.rank - 2:
        return partial_sums((propagation.align(a, right.at(columns)), right), right)
    if left is None and (right is None or right.axis == b.type.rank - 1):
        right = right or propagation.divide(b, b.type.rank - 1)
        return NodeSharding((None, right), right and right.at(rank - 1))
    if left is not None and left.axis == rows and (right is None or b.type.rank == 2):
        propagation.replicate(b)
        return NodeSharding((left, None), left.at(rank - 2))
    return _batches(propagation, node, {rank - 1, rank - 2})


def grouped_matmul(propagation: Propagation, node: Node) -> NodeSharding:
    """Every expert is divided like a linear layer, so that ranks share the work of any selection of experts."""
    rows, matrices, ends = node.operands
    layout = propagation.layout(rows)
    propagation.replicate(ends)
    if layout is not None and layout.axis == 1:
        return partial_sums((layout, propagation.align(matrices, layout), None), layout)
    columns = propagation.layout(matrices) or propagation.divide(matrices, 2)
    if layout is not None or columns is None or columns.axis != 2:
        return replicated(propagation, node)
    return NodeSharding((None, columns, None), columns.at(1))


def _batches(propagation: Propagation, node: Node, matrix: set[int]) -> NodeSharding:
    """Batched products are divided along the batch axes, like elementwise operators."""
    layout = common_layout(propagation, node.operands, node.result.type.rank)
    if layout is None or layout.axis in matrix:
        return replicated(propagation, node)
    return elementwise(propagation, node)


def attention(propagation: Propagation, node: Node) -> NodeSharding:
    """Heads are divided. With GQA, key heads are on the ranks of the query heads that they serve."""
    query, key, value, *mask = node.operands
    rank = node.result.type.rank
    heads = propagation.layout(query)
    if heads is None or heads.axis != query.type.rank - 3 or query.type.rank != rank or heads.outer != 1:
        return replicated(propagation, node)
    key_layouts = [_key_heads(propagation, heads, query, operand) for operand in (key, value)]
    if any(required is False for required in key_layouts):
        return replicated(propagation, node)
    for split in heads.splits:
        split.require_division()
    required = tuple(layout for layout in key_layouts if not isinstance(layout, bool))
    return NodeSharding(
        (heads, *required, *[broadcast_layout(propagation, rank, heads, other) for other in mask]), heads
    )


def _key_heads(propagation: Propagation, heads: Split, query: Value, key: Value) -> Layout | bool:
    """The layout of keys or values for divided query heads; False if there is none."""
    axis = key.type.rank - 3
    size = key.type.shape[axis] if axis >= 0 else 1
    layout = propagation.layout(key)
    if size == query.type.shape[-3]:
        return propagation.align(key, heads.at(axis))
    if layout is None:
        propagation.replicate(key)
        return None if size == 1 else False
    if size == 1 and not any(
        split.required or split.root() in {own.root() for own in heads.splits} for split in layout.splits
    ):
        for split in layout.splits:
            split.limit(1)  # a single key head serves all query heads, so every rank has it
        return layout
    if layout.axis != axis or layout.outer != 1 or len(layout.splits) != 1 or len(heads.splits) != 1:
        return False
    layout.splits[0].serves(heads.splits[0], size)
    return layout


def rule_of(propagation: Propagation, node: Node) -> Rule:
    if (
        any(isinstance(propagation.layout(operand), Repeated) for operand in node.operands)
        and node.op.name != "reshape"
    ):
        return replicated
    return RULES.get(type(node.op), replicated)


def _normalized_axes(node: Node) -> tuple[int, ...]:
    rank = node.result.type.rank
    assert isinstance(node.op, LayerNorm | RmsNorm)
    return tuple(range(rank - node.op.axes, rank))


def _padded_axes(node: Node) -> tuple[int, ...]:
    assert isinstance(node.op, Pad)
    return tuple(axis for axis, added in enumerate(zip(node.op.before, node.op.after, strict=True)) if any(added))


def _spatial_axes(node: Node) -> tuple[int, ...]:
    return tuple(range(2, node.result.type.rank))


def _resampled_axes(node: Node) -> tuple[int, ...]:
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
    Cumulate: independent_along(_named_axis),
    Flip: independent_along(_named_axes),
    Gather: gather,
    GroupedMatMul: grouped_matmul,
    Index: index,
    IndexUpdate: index_update,
    LayerNorm: independent_along(_normalized_axes),
    Linear: linear,
    MatMul: matmul,
    Pad: independent_along(_padded_axes),
    Pool: independent_along(_spatial_axes),
    Reduce: reduce,
    Resample: independent_along(_resampled_axes),
    Reshape: reshape,
    RmsNorm: independent_along(_normalized_axes),
    Slice: window,
    SliceUpdate: slice_update,
    Softmax: independent_along(_named_axis),
    Transpose: transpose,
    Unary: elementwise,
    Where: elementwise,
}
