"""Data movement: views if strides can express the result, else copies in HBM; and collectives between ranks."""

from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllGather, CollectiveAllReduce, CollectiveReduceScatter
from nxpipe.emulator.isa.cost import START_NS, cost
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Far
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.lowering import Lowering, NotLowered, lowers, operand_views
from nxpipe.emulator.lower.matmul.linear import output_groups, row_matrix, write_gathered_matmuls
from nxpipe.emulator.lower.tiles import fill
from nxpipe.emulator.lower.view import View, line
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    AllGather,
    AllReduce,
    Bitcast,
    Broadcast,
    Concat,
    Flip,
    Pad,
    RankSlice,
    ReduceScatter,
    Reshape,
    Slice,
    SliceUpdate,
    Transpose,
)
from nxpipe.emulator.ops.collective import Stretch


@lowers(Reshape)
def _reshape(low: Lowering, node: Node, op: Reshape) -> None:
    source = low.stored_view(node.operands[0])
    low.alias(node.result, source.reshaped(op.shape) or low.packed(source).packed_as(op.shape))


@lowers(Transpose)
def _transpose(low: Lowering, node: Node, op: Transpose) -> None:
    low.alias(node.result, low.stored_view(node.operands[0]).transposed(op.order))


@lowers(Broadcast)
def _broadcast(low: Lowering, node: Node, op: Broadcast) -> None:
    low.alias(node.result, low.stored_view(node.operands[0]).broadcast(op.shape))


@lowers(Slice)
def _slice(low: Lowering, node: Node, op: Slice) -> None:
    view = low.stored_view(node.operands[0])
    low.alias(node.result, _window(view, op.starts, node.result.type.shape, op.steps))


def _window(view: View, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]) -> View:
    strides = tuple(stride * step for stride, step in zip(view.strides, steps, strict=True))
    return replace(view.cut(*zip(starts, sizes, strict=True)), strides=strides)


@lowers(Flip)
def _flip(low: Lowering, node: Node, op: Flip) -> None:
    view = low.stored_view(node.operands[0])
    for axis in op.axes:
        last = max(view.shape[axis] - 1, 0) * view.strides[axis]
        strides = (*view.strides[:axis], -view.strides[axis], *view.strides[axis + 1 :])
        view = replace(view, offset=view.offset + last, strides=strides)
    low.alias(node.result, view)


@lowers(Concat)
def _concat(low: Lowering, node: Node, op: Concat) -> None:
    home = low.home(node.result)
    for operand, place in zip(node.operands, operand_views(home, node), strict=True):
        part = low.stored_view(operand)
        if part != place:
            low.copy(place, part)


@lowers(SliceUpdate)
def _slice_update(low: Lowering, node: Node, op: SliceUpdate) -> None:
    update = low.stored_view(node.operands[1])
    home = low.updated(node)
    low.copy(_window(home, op.starts, update.shape, op.steps), update)


@lowers(Pad)
def _pad(low: Lowering, node: Node, op: Pad) -> None:
    """Pad axis by axis with a slab before and a slab after the operand, each within the slabs of the previous axes."""
    source, filling = low.stored_view(node.operands[0]), node.operands[1]
    inner = low.home(node.result)
    number = low.number(filling)
    for axis, (before, size) in enumerate(zip(op.before, source.shape, strict=True)):
        after = inner.shape[axis] - before - size
        whole_axes = [(0, extent) for extent in inner.shape]
        for start, thickness in ((0, before), (before + size, after)):
            slab = inner.cut(*whole_axes[:axis], (start, thickness))
            if number is None:
                low.copy(slab, low.view(filling).broadcast(slab.shape))
            else:
                fill(low.k, slab, number)
        inner = inner.cut(*whole_axes[:axis], (before, size))
    low.copy(inner, source)


@lowers(Bitcast)
def _bitcast(low: Lowering, node: Node, op: Bitcast) -> None:
    """Reinterpret bytes: a view for types of equal size; otherwise the bytes must be contiguous from a buffer's
    start."""
    if any(dtype.on_device.itemsize != dtype.itemsize for dtype in (op.source, op.dtype)):
        raise NotLowered(f"cannot reinterpret {op.source} as {op.dtype}: a NeuronCore has no 64-bit integers")
    source, dtype = low.view(node.operands[0]), op.dtype.on_device
    before, after = source.dtype.itemsize, dtype.itemsize
    if before == after:
        low.alias(node.result, replace(source, dtype=dtype))
        return
    flat = low.packed(source)
    if flat.offset.terms or flat.offset.rotations or flat.offset.base:
        flat = low.copied(flat)
    low.alias(node.result, replace(flat, dtype=dtype).packed_as(node.result.type.shape))


@lowers(AllReduce)
def _all_reduce(low: Lowering, node: Node, op: AllReduce) -> None:
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if home.elements:
        low.k.emit(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=line(home), src=line(source)))


@lowers(AllGather)
def _all_gather(low: Lowering, node: Node, op: AllGather) -> None:
    """Gather directly if the ranks' shares are consecutive in the result; otherwise gather to scratch and reorder."""
    _require_degree(low, node, op.degree)
    readers, sharing = low.groups.gathered_matmuls(node, node.result), low.groups.row_sharding(node)
    if readers and sharing:
        x = node.operands[0]
        write_gathered_matmuls(low, row_matrix(low, x), x.type.dtype.on_device, output_groups(low, readers), sharing)
        return
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if not home.elements:
        return
    outer, inner = prod(source.shape[: op.axis]) * op.outer, prod(source.shape[op.axis + 1 :])
    if _exchanges_in_place(low, op, outer, home):
        with low.k.loop(outer) as index:
            dst, src = (_row(view, outer, index) for view in (home, source))
            low.k.emit(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=line(dst), src=line(src)))
        return
    gathered = low.scratch(source.dtype, (op.degree, *source.shape))
    low.k.emit(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=line(gathered), src=line(source)))
    shares = gathered.packed_as((op.degree, outer, op.local, inner))
    whole = home.packed_as((outer, sum(op.sizes), inner))
    for run in _runs(op):
        first, count = run[0], len(run)
        block = shares.cut((first.rank, 1), (0, outer), (first.own, first.size))
        rank_stride = (run[-1].rank - first.rank) // max(count - 1, 1) * shares.strides[0]
        owners = replace(block, shape=(count, *block.shape[1:]), strides=(rank_stride, *block.strides[1:]))
        target = whole.cut((0, outer), (first.whole, count * first.size)).reshaped((outer, count, first.size, inner))
        assert target is not None  # splitting an axis is always possible
        low.copy(target, owners.transposed((1, 0, 2, 3)))


@lowers(ReduceScatter)
def _reduce_scatter(low: Lowering, node: Node, op: ReduceScatter) -> None:
    """Scatter directly if the ranks' shares are consecutive in the operand; otherwise reorder them in scratch first."""
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if not home.elements:
        return
    outer, inner = prod(source.shape[: op.axis]) * op.outer, prod(source.shape[op.axis + 1 :])
    if _exchanges_in_place(low, op, outer, source):
        with low.k.loop(outer) as index:
            dst, src = (_row(view, outer, index) for view in (home, source))
            low.k.emit(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=line(dst), src=line(src)))
        return
    whole = source.packed_as((outer, sum(op.sizes), inner))
    parts = low.scratch(source.dtype, (op.degree, outer, op.local, inner))
    if any(share.local * op.degree > share.size for share in op.shares):
        fill(low.k, parts, 0)
    for rank in range(op.degree):
        for stretch in op.stretches(rank):
            target = parts.pick(0, rank).cut((0, outer), (stretch.own, stretch.size))
            low.copy(target, whole.cut((0, outer), (stretch.whole, stretch.size)))
    low.k.emit(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=line(home), src=line(parts)))


def _exchanges_in_place(low: Lowering, op: AllGather | ReduceScatter, outer: int, whole: View) -> bool:
    """True if shares are consecutive within each row of blocks, and one collective per row is cheaper than a single
    collective with a copy. Each collective has a start-up time."""
    if op.parts != (op.degree,) or op.slots:
        return False
    flat = Far(whole.buffer, whole.dtype, Affine(), (Axis(whole.elements, 1),))
    copy_ns = cost(DmaCopy(engine=Engine.DMA0, dst=flat, src=flat), low.k.core).ns
    return outer == 1 or outer * START_NS <= START_NS + copy_ns


def _row(view: View, outer: int, index: Affine) -> View:
    return view.packed_as((outer, view.elements // outer)).pick(0, index)


@dataclass(frozen=True)
class _OwnedStretch(Stretch):
    """A stretch of a tensor with the first rank that holds it."""

    rank: int


def _runs(op: AllGather) -> list[list[_OwnedStretch]]:
    """A row of blocks as runs of consecutive stretches. The stretches of a run have equal lengths, and ranks at equal
    distances, so that a single strided copy moves the run."""
    owned: dict[int, _OwnedStretch] = {}
    for rank in range(op.degree):
        for stretch in op.stretches(rank):
            owned.setdefault(stretch.whole, _OwnedStretch(stretch.own, stretch.whole, stretch.size, rank))
    runs: list[list[_OwnedStretch]] = []
    for _, stretch in sorted(owned.items()):
        run = runs[-1] if runs else []
        same_shape = bool(run) and (run[-1].own, run[-1].size) == (stretch.own, stretch.size)
        if same_shape and (len(run) == 1 or stretch.rank - run[-1].rank == run[-1].rank - run[-2].rank):
            run.append(stretch)
        else:
            runs.append([stretch])
    return runs


@lowers(RankSlice)
def _rank_slice(low: Lowering, node: Node, op: RankSlice) -> None:
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if not home.elements:
        return
    k, inner = low.k, prod(source.shape[op.axis + 1 :])
    outer = prod(source.shape[: op.axis]) * op.outer
    table, unit = _run_table(op, outer)
    source = _followed_by_zeros(low, source, unit * inner) if (table == outer * sum(op.sizes) // unit).any() else source
    count, width = table.shape[1], unit * inner
    run_table = low.constant(table, DType.UINT32)
    rows = home.packed_as((count, width))
    with k.scope():
        rank = k.tile(DType.UINT32, 1, 1).whole
        k.copy(rank, low.rank().far())
        for top, rows_in_tile in k.spans(count, PARTITIONS):
            with k.scope():
                numbers = k.tile(DType.UINT32, rows_in_tile, 1, buffers=2).whole
                rank_row = Far(
                    run_table.buffer,
                    DType.UINT32,
                    run_table.offset + top,
                    (Axis(1, count), Axis(rows_in_tile, 1)),
                    rank,
                )
                k.copy(numbers, rank_row)
                axes = (Axis(rows_in_tile, width), Axis(width, 1))
                runs = Far(source.buffer, source.dtype, source.offset, axes, numbers)
                k.copy(rows.cut((top, rows_in_tile)).far(), runs)


def _followed_by_zeros(low: Lowering, source: View, count: int) -> View:
    """A contiguous copy of a tensor, followed by `count` zeros."""
    extended = low.scratch(source.dtype, (source.elements + count,))
    low.copy(extended.cut((0, source.elements)), source.packed_as((source.elements,)))
    fill(low.k, extended.cut((source.elements, count)), 0)
    return extended


def _run_table(op: RankSlice, outer: int) -> tuple[Array, int]:
    """A table [rank, run] of the runs that each rank takes, over all outer repetitions, and the length of a run. The
    number after the last run denotes padding."""
    length = sum(op.sizes)
    rank_stretches = [op.stretches(rank) for rank in range(op.degree)]
    unit = gcd(
        length,
        op.local,
        *(number for row in rank_stretches for stretch in row for number in (stretch.own, stretch.whole, stretch.size)),
    )
    row = length // unit
    table = np.full((op.degree, outer, op.local // unit), outer * row)
    for rank, stretches in enumerate(rank_stretches):
        for stretch in stretches:
            start, first_run, size = stretch.own // unit, stretch.whole // unit, stretch.size // unit
            table[rank, :, start : start + size] = np.add.outer(np.arange(outer) * row, np.arange(size) + first_run)
    return table.reshape(op.degree, -1), unit


def _require_degree(low: Lowering, node: Node, degree: int) -> None:
    if degree != low.ranks:
        raise NotLowered(f"cannot lower {node.op.label} for {degree} ranks: the program is for {low.ranks}")
