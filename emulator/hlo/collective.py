"""Collectives, and a rank's share of a tensor, as StableHLO for one module that all ranks run.

Shares are regular in the form [ranks, before, outer, local, after]: the axis is split into repetitions and one row of
blocks, and the ranks' shares lie behind each other in front. A rank's number is an input: there is no partition id.
"""

from collections.abc import Sequence
from itertools import groupby

from nxpipe.emulator.hlo.arithmetic import as_float32, settled
from nxpipe.emulator.hlo.writer import HloWriter, Shape, Tensor, elements_of
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ops import AllGather, AllReduce, Operator, RankSlice, ReduceScatter
from nxpipe.emulator.ops.collective import Share

Divided = RankSlice | ReduceScatter | AllGather


def reads_rank(op: Operator) -> bool:
    """True if an operator reads the number of its rank, as an operand behind its own."""
    return isinstance(op, RankSlice)


def all_reduce(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The sum in float32, rounded once."""
    assert isinstance(node.op, AllReduce)
    total = w.all_reduce(as_float32(w, operands[0]), node.op.degree)
    return settled(w, total, node.result.type.dtype)


def rank_slice(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The second operand is the rank's number, of shape [1]."""
    op, (x, rank) = node.op, operands
    assert isinstance(op, RankSlice)
    number = w.reshape(rank, ())
    if _is_simple(op):
        start = w.binary("multiply", number, op.local)
        return w.dynamic_slice(x, op.axis, start, op.local)
    return w.reshape(w.dynamic_slice(_lined_up(w, op, x), 0, number, 1), node.result.type.shape)


def reduce_scatter(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, wide, type_ = node.op, as_float32(w, operands[0]), node.result.type
    assert isinstance(op, ReduceScatter)
    if _is_simple(op):
        share = w.reduce_scatter(wide, op.axis, op.degree)
    else:
        share = w.reshape(w.reduce_scatter(_lined_up(w, op, wide), 0, op.degree), type_.shape)
    return settled(w, share, type_.dtype)


def all_gather(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x,), type_ = node.op, operands, node.result.type
    assert isinstance(op, AllGather)
    stored = w.convert(x, "ui8") if x.element == "i1" else x
    if _is_simple(op):
        whole = w.all_gather(stored, op.axis, op.degree)
    else:
        before, after = _around(x.shape, op.axis)
        shares = w.all_gather(w.reshape(stored, (1, before, op.outer, op.local, after)), 0, op.degree)
        whole = w.reshape(_joined(w, op, shares), type_.shape)
    return w.compare("NE", whole, 0) if x.element == "i1" else whole


def _is_simple(op: Divided) -> bool:
    """True if the ranks' shares are consecutive parts of the axis, without copies and padding."""
    (share, *others) = op.shares
    return not others and op.outer == 1 and share.is_even(op.degree) and share.parts == op.degree


def _around(shape: Shape, axis: int) -> tuple[int, int]:
    """The numbers of elements before and after an axis."""
    return elements_of(shape[:axis]), elements_of(shape[axis + 1 :])


def _lined_up(w: HloWriter, op: RankSlice | ReduceScatter, x: Tensor) -> Tensor:
    """The shares of all ranks of a whole tensor."""
    before, after = _around(x.shape, op.axis)
    rows = w.reshape(x, (before, op.outer, sum(op.sizes), after))
    blocks, start = [], 0
    for share in op.shares:
        block = w.part(rows, 2, start, start + share.size)
        blocks.append((_divided if share.is_even(op.degree) else _dealt)(w, block, share, op.degree))
        start += share.size
    return w.concatenate(blocks, 3)


def _divided(w: HloWriter, block: Tensor, share: Share, degree: int) -> Tensor:
    """An even block: its parts, each for the same number of neighbouring ranks."""
    before, outer, _, after = block.shape
    parts = w.reshape(block, (before, outer, share.parts, share.length, after))
    first = w.transpose(parts, (2, 0, 1, 3, 4))
    shape = (share.parts, degree // share.parts, before, outer, share.length, after)
    copies = w.broadcast(first, shape, (0, 2, 3, 4, 5))
    return w.reshape(copies, (degree, *shape[2:]))


def _dealt(w: HloWriter, block: Tensor, share: Share, degree: int) -> Tensor:
    """An uneven block: the stretches of each rank, with zero padding."""
    before, outer, _, after = block.shape
    ranks = []
    for rank in range(degree):
        pieces, end = [], 0
        for stretch in share.stretches(rank, degree):
            pieces += _zeros(w, block, stretch.own - end)
            pieces.append(w.part(block, 2, stretch.whole, stretch.whole + stretch.size))
            end = stretch.own + stretch.size
        pieces += _zeros(w, block, share.local - end)
        own = w.concatenate(pieces, 2) if pieces else w.part(block, 2, 0, 0)
        ranks.append(w.reshape(own, (1, before, outer, share.local, after)))
    return w.concatenate(ranks, 0)


def _zeros(w: HloWriter, block: Tensor, count: int) -> list[Tensor]:
    before, outer, _, after = block.shape
    return [w.filled(0, (before, outer, count, after), block.element)] if count else []


def _joined(w: HloWriter, op: AllGather, shares: Tensor) -> Tensor:
    """The whole tensor [before, outer, sizes, after] from the shares of all ranks."""
    blocks, start = [], 0
    for share in op.shares:
        block = w.part(shares, 3, start, start + share.local)
        blocks.append((_assembled if share.is_even(op.degree) else _collected)(w, block, share, op.degree))
        start += share.local
    return w.concatenate(blocks, 2)


def _assembled(w: HloWriter, block: Tensor, share: Share, degree: int) -> Tensor:
    """An even block, from the first of the ranks that have the same part."""
    _, before, outer, length, after = block.shape
    copies = degree // share.parts
    firsts = w.part(block, 0, 0, (share.parts - 1) * copies + 1, copies)
    return w.reshape(w.transpose(firsts, (1, 2, 0, 3, 4)), (before, outer, share.parts * length, after))


def _collected(w: HloWriter, block: Tensor, share: Share, degree: int) -> Tensor:
    """An uneven block, stretch by stretch, each from the first rank that has it."""
    _, before, outer, _, after = block.shape
    stretches = [(s.whole, rank, s) for rank in range(degree) for s in share.stretches(rank, degree)]
    pieces = [w.reshape(w.part(block, 3, 0, 0), (degree * before, outer, 0, after))] if not stretches else []
    for _, group in groupby(sorted(stretches, key=lambda entry: entry[:2]), key=lambda entry: entry[0]):
        _, rank, stretch = next(group)
        own = w.part(w.part(block, 0, rank, rank + 1), 3, stretch.own, stretch.own + stretch.size)
        pieces.append(w.reshape(own, (before, outer, stretch.size, after)))
    return w.concatenate(pieces, 2)
