"""Rules of operators that move elements, or pick some of them: what is divided stays divided where it can."""

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ops import Concat, Gather, Index, IndexUpdate, Slice, SliceUpdate, Transpose
from nxpipe.emulator.passes.shard.cuts import AxisSplit
from nxpipe.emulator.passes.shard.layout import Layout, Repeated, Split
from nxpipe.emulator.passes.shard.rules.general import everything_whole, one_operand
from nxpipe.emulator.passes.shard.walk import Verdict, Walk, lined_up, shifted


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
    """Of a tensor, or else of what is written into it, in the axes of the tensor."""
    layout, written = walk.layout(x), walk.layout(update)
    if layout is not None or written is None:
        return layout
    return next((written.at(axis) for axis, place in places.items() if place == written.axis), None)


def _places_in_hole(axes: tuple[int, ...], x: Value, indices: list[Value] | tuple[Value, ...]) -> dict[int, int]:
    """Where the axes that are not addressed stand among those of the elements addressed."""
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
