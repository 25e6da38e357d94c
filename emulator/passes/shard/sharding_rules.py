"""Sharding rules, one for each kind of operator: how it divides, given the layouts of its operands.

Elementwise operators keep the layout that they find. Operators that move elements keep a division where the axis stays
intact. Products are divided by the outputs of a weight, then by its inputs with a sum over ranks. Without a rule, or
where a rule does not apply, every rank computes the whole.
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
from nxpipe.emulator.passes.shard.propagation import Verdict, Walk, lined_up, shifted

Rule = Callable[[Walk, Node], Verdict]


def everything_whole(walk: Walk, node: Node) -> Verdict:
    """Every rank computes all of it."""
    for operand in node.operands:
        walk.whole(operand)
    return Verdict((None,) * len(node.operands), None)


def elementwise(walk: Walk, node: Node) -> Verdict:
    """Operands are divided alike; where one is broadcast, every rank has it."""
    layout = lined_up(walk, node.operands, node.result.type.rank)
    if layout is None or node.result.type.shape[layout.axis] != layout.outer * sum(layout.sizes):
        return everything_whole(walk, node)
    return Verdict(tuple(aligned(walk, node.result.type.rank, layout, operand) for operand in node.operands), layout)


def aligned(walk: Walk, rank: int, layout: Split, operand: Value) -> Layout:
    """The layout of an operand that broadcasts against a divided one."""
    mine = shifted(layout, operand.type.rank - rank)
    if mine.axis < 0 or operand.type.shape[mine.axis] == 1:
        walk.whole(operand)
        return None
    return walk.bring(operand, mine)


def one_operand(walk: Walk, node: Node, result: Layout) -> Verdict:
    """The first operand keeps its layout and all others are whole; or, without a result layout, it is gathered."""
    if result is None:
        return everything_whole(walk, node)
    for operand in node.operands[1:]:
        walk.whole(operand)
    return Verdict((walk.layout(node.operands[0]), *[None] * (len(node.operands) - 1)), result)


def apart_from(axes: Callable[[Node], tuple[int, ...]]) -> Rule:
    """Operators that work along some axes, and treat the others as so many separate tensors."""

    def rule(walk: Walk, node: Node) -> Verdict:
        layout = walk.layout(node.operands[0])
        free = layout is not None and layout.axis not in axes(node)
        return one_operand(walk, node, layout if free else None)

    return rule


def summed(operands: tuple[Layout, ...], layout: Split) -> Verdict:
    """Each rank has a part of each sum, and no unit may be counted by two of them."""
    for cut in layout.cuts:
        cut.require_even()
        cut.add_up()
    return Verdict(operands, None, reduced=True)


def transpose(walk: Walk, node: Node) -> Verdict:
    assert isinstance(node.op, Transpose)
    layout = walk.layout(node.operands[0])
    return one_operand(walk, node, layout and layout.at(node.op.order.index(layout.axis)))


def reshape(walk: Walk, node: Node) -> Verdict:
    layout = walk.layout(node.operands[0])
    before, after = node.operands[0].type.shape, node.result.type.shape
    return one_operand(walk, node, layout and layout.reshaped(before, after))


def broadcast(walk: Walk, node: Node) -> Verdict:
    """Repeating each of a few key heads for the query heads that it serves divides those heads too."""
    layout, x = walk.layout(node.operands[0]), node.operands[0].type
    if layout is not None and _repeats_heads(layout, x.shape, node.result.type.shape):
        heads = layout.sizes[0] * node.result.type.shape[layout.axis + 1]
        queries = AxisSplit(heads, layout.cuts[0].name)
        layout.cuts[0].serves(queries, layout.sizes[0])
        repeated = Repeated(layout.axis, 1, layout.sizes, layout.cuts, queries)
        return one_operand(walk, node, repeated)
    return one_operand(walk, node, layout and shifted(layout, node.result.type.rank - x.rank))


def _repeats_heads(layout: Split, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    axis = layout.axis + 1
    alone = layout.outer == len(layout.cuts) == 1 and axis < len(before) == len(after)
    return alone and before[axis] == 1 < after[axis] and before[:axis] == after[:axis]


def window(walk: Walk, node: Node) -> Verdict:
    """Free on whole axes. On the divided one, whole blocks can be taken, once the weights know where blocks end."""
    assert isinstance(node.op, Slice)
    layout = walk.layout(node.operands[0])
    if layout is None:
        return everything_whole(walk, node)
    axis = layout.axis
    start, stop, step = node.op.starts[axis], node.op.stops[axis], node.op.steps[axis]
    if (start, stop, step) == (0, node.operands[0].type.shape[axis], 1):
        return one_operand(walk, node, layout)
    taken = layout.window(start, stop) if step == 1 else None
    if taken is None:
        walk.want_seams(layout, start, stop)
        return Verdict((None,), None)
    return one_operand(walk, node, taken)


def concat(walk: Walk, node: Node) -> Verdict:
    assert isinstance(node.op, Concat)
    layout = lined_up(walk, node.operands, node.result.type.rank)
    if layout is None or layout.axis == node.op.axis:
        return everything_whole(walk, node)
    return Verdict(tuple(walk.bring(operand, layout) for operand in node.operands), layout)


def slice_update(walk: Walk, node: Node) -> Verdict:
    """The divided axis must be replaced in full, as when a cache is written at some positions for all its heads."""
    assert isinstance(node.op, SliceUpdate)
    layout = lined_up(walk, node.operands[::-1], node.result.type.rank)
    shapes = {operand.type.shape[layout.axis] for operand in node.operands} if layout else set()
    if layout is None or len(shapes) > 1:
        return everything_whole(walk, node)
    return Verdict(tuple(walk.bring(operand, layout) for operand in node.operands), layout)


def index(walk: Walk, node: Node) -> Verdict:
    assert isinstance(node.op, Index)
    layout = walk.layout(node.operands[0])
    if layout is None or layout.axis in node.op.axes:
        return everything_whole(walk, node)
    places = _places_in_hole(node.op.axes, node.operands[0], node.operands[1:])
    return one_operand(walk, node, layout.at(places[layout.axis]))


def index_update(walk: Walk, node: Node) -> Verdict:
    """Axes that are not addressed may be divided, in the tensor and in its update."""
    assert isinstance(node.op, IndexUpdate)
    x, update, *indices = node.operands
    places = _places_in_hole(node.op.axes, x, indices)
    layout = _layout_of_target(walk, x, update, places)
    if layout is None or layout.axis in node.op.axes:
        return everything_whole(walk, node)
    missing = x.type.rank - len(node.op.axes) + max(i.type.rank for i in indices) - update.type.rank
    place = places[layout.axis] - missing
    if place < 0 or update.type.shape[place] == 1:
        return everything_whole(walk, node)
    for other in indices:
        walk.whole(other)
    wanted = (walk.bring(x, layout), walk.bring(update, layout.at(place)), *[None] * len(indices))
    return Verdict(wanted, layout)


def _layout_of_target(walk: Walk, x: Value, update: Value, places: dict[int, int]) -> Layout:
    """The layout of a tensor, or else of the update written into it, in the axes of the tensor."""
    layout, written = walk.layout(x), walk.layout(update)
    if layout is not None or written is None:
        return layout
    return next((written.at(axis) for axis, place in places.items() if place == written.axis), None)


def _places_in_hole(axes: tuple[int, ...], x: Value, indices: list[Value] | tuple[Value, ...]) -> dict[int, int]:
    """The positions of the axes that are not indexed among the axes of the result."""
    common = max(index.type.rank for index in indices)
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    front = axes[0] if adjacent else 0
    rest = [axis for axis in range(x.type.rank) if axis not in axes]
    return {axis: place if place < front else place + common for place, axis in enumerate(rest)}


def gather(walk: Walk, node: Node) -> Verdict:
    """Rows of a divided vocabulary are looked up by the rank that has them, and added up."""
    assert isinstance(node.op, Gather)
    table, indices = node.operands
    layout = walk.layout(table)
    if layout is None and table == walk.vocabulary and indices in walk.varying:
        layout = walk.divide(table, 0)
    if layout is None:
        return everything_whole(walk, node)
    walk.whole(indices)
    if layout.axis == node.op.axis:
        if table == walk.vocabulary and len(layout.cuts) == 1 and indices in walk.varying:
            return Verdict((layout, None), None, reduced=True)
        return everything_whole(walk, node)
    moved = layout.axis if layout.axis < node.op.axis else layout.axis - 1 + indices.type.rank
    return Verdict((layout, None), layout.at(moved))


_CHANNELS = "ranks have whole channels of convolutions"


def reduce(walk: Walk, node: Node) -> Verdict:
    """Sums over a divided axis are added up among ranks; other reductions keep off it."""
    assert isinstance(node.op, Reduce)
    layout = walk.layout(node.operands[0])
    if layout is None or layout.axis not in node.op.axes:
        gone = 0 if layout is None or node.op.keep else sum(axis < layout.axis for axis in node.op.axes)
        return one_operand(walk, node, layout and shifted(layout, -gone))
    if node.op.function != "sum" or not node.result.type.dtype.is_float:
        return everything_whole(walk, node)
    return summed((layout,), layout)


def linear(walk: Walk, node: Node) -> Verdict:
    """A divided input meets the weight's columns and is summed; a whole one may meet a weight of divided rows."""
    x, weight, *bias = node.operands
    layout, last = walk.layout(x), x.type.rank - 1
    if layout is not None and layout.axis == last:
        for other in bias:
            walk.whole(other)
        return summed((layout, walk.bring(weight, layout.at(1)), *[None] * len(bias)), layout)
    if layout is not None:
        return one_operand(walk, node, layout)
    rows = walk.layout(weight) or walk.divide(weight, 0)
    if rows is None or rows.axis != 0:
        return everything_whole(walk, node)
    return Verdict((None, rows, *[walk.bring(other, rows) for other in bias]), rows.at(last))


def convolution(walk: Walk, node: Node) -> Verdict:
    """Channels are divided as features are. A count of channels that ranks cannot share leaves the weight whole."""
    assert isinstance(node.op, Convolution)
    x, weight, *bias = node.operands
    channels = walk.layout(x)
    if node.op.groups > 1:
        return _by_groups(walk, node, node.op.groups, channels)
    if channels is not None and channels.axis == 1:
        for other in bias:
            walk.whole(other)
        for cut in channels.cuts:
            cut.add_up()
            cut.forbid_padding(_CHANNELS)
        return Verdict((channels, walk.bring(weight, channels), *[None] * len(bias)), None, reduced=True)
    outputs = walk.layout(weight) or walk.divide(weight, 0)
    if channels is not None or outputs is None or outputs.axis != 0:
        return everything_whole(walk, node)
    for cut in outputs.cuts:
        cut.forbid_padding(_CHANNELS)
    return Verdict((None, outputs, *[walk.bring(other, outputs) for other in bias]), outputs.at(1))


def _by_groups(walk: Walk, node: Node, groups: int, channels: Layout) -> Verdict:
    """Groups do not mix, so whole groups of divided channels stay where they are."""
    _, weight, *bias = node.operands
    if channels is None or channels.axis != 1 or channels.outer != 1 or len(channels.cuts) != 1:
        return everything_whole(walk, node)
    channels.cuts[0].limit(groups)
    channels.cuts[0].forbid_padding(_CHANNELS)
    outputs = Split(0, 1, weight.type.shape[:1], channels.cuts)
    wanted = (channels, walk.bring(weight, outputs), *[walk.bring(other, outputs) for other in bias])
    return Verdict(wanted, outputs.at(1))


def matmul(walk: Walk, node: Node) -> Verdict:
    a, b = node.operands
    left, right = walk.layout(a), walk.layout(b)
    rows, columns, rank = a.type.rank - 2, a.type.rank - 1, node.result.type.rank
    if left is not None and left.axis == columns:
        return summed((left, walk.bring(b, left.at(b.type.rank - 2))), left)
    if right is not None and right.axis == b.type.rank - 2:
        return summed((walk.bring(a, right.at(columns)), right), right)
    if left is None and (right is None or right.axis == b.type.rank - 1):
        right = right or walk.divide(b, b.type.rank - 1)
        return Verdict((None, right), right and right.at(rank - 1))
    if left is not None and left.axis == rows and (right is None or b.type.rank == 2):
        walk.whole(b)
        return Verdict((left, None), left.at(rank - 2))
    return _batches(walk, node, {rank - 1, rank - 2})


def grouped_matmul(walk: Walk, node: Node) -> Verdict:
    """Every expert is divided as a linear layer is, so that ranks share the work whichever experts are chosen."""
    rows, matrices, ends = node.operands
    layout = walk.layout(rows)
    walk.whole(ends)
    if layout is not None and layout.axis == 1:
        return summed((layout, walk.bring(matrices, layout), None), layout)
    columns = walk.layout(matrices) or walk.divide(matrices, 2)
    if layout is not None or columns is None or columns.axis != 2:
        return everything_whole(walk, node)
    return Verdict((None, columns, None), columns.at(1))


def _batches(walk: Walk, node: Node, matrix: set[int]) -> Verdict:
    """Independent products are divided as elements are."""
    layout = lined_up(walk, node.operands, node.result.type.rank)
    if layout is None or layout.axis in matrix:
        return everything_whole(walk, node)
    return elementwise(walk, node)


def attention(walk: Walk, node: Node) -> Verdict:
    """Heads are divided. Where fewer key heads serve them, those go with the query heads that they serve."""
    query, key, value, *mask = node.operands
    rank = node.result.type.rank
    heads = walk.layout(query)
    if heads is None or heads.axis != query.type.rank - 3 or query.type.rank != rank or heads.outer != 1:
        return everything_whole(walk, node)
    served = [_key_heads(walk, heads, query, operand) for operand in (key, value)]
    if any(wanted is False for wanted in served):
        return everything_whole(walk, node)
    for cut in heads.cuts:
        cut.require_even()
    wanted = tuple(layout for layout in served if not isinstance(layout, bool))
    return Verdict((heads, *wanted, *[aligned(walk, rank, heads, other) for other in mask]), heads)


def _key_heads(walk: Walk, heads: Split, query: Value, key: Value) -> Layout | bool:
    """The layout of keys or values beside divided query heads; False if there is none."""
    axis = key.type.rank - 3
    size = key.type.shape[axis] if axis >= 0 else 1
    layout = walk.layout(key)
    if size == query.type.shape[-3]:
        return walk.bring(key, heads.at(axis))
    if layout is None:
        walk.whole(key)
        return None if size == 1 else False
    if size == 1 and not any(cut.even or cut.root() in {own.root() for own in heads.cuts} for cut in layout.cuts):
        for cut in layout.cuts:
            cut.limit(1)  # the one key head serves all query heads, so every rank has it
        return layout
    if layout.axis != axis or layout.outer != 1 or len(layout.cuts) != 1 or len(heads.cuts) != 1:
        return False
    layout.cuts[0].serves(heads.cuts[0], size)
    return layout


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
