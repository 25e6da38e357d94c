"""Rules of what the tensor engine does: weights divided by outputs, then by inputs, and sums over ranks."""

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ops import Convolution, Reduce
from nxpipe.emulator.passes.shard.layout import Layout, Split
from nxpipe.emulator.passes.shard.rules.general import aligned, elementwise, everything_whole, one_operand, summed
from nxpipe.emulator.passes.shard.walk import Verdict, Walk, lined_up, shifted

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
    """How keys or values lie beside divided query heads; False if they cannot."""
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
