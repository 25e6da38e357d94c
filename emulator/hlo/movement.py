"""Operators that move elements, to places known in advance or addressed by computed indices, and between ranks.

An index outside of its axis is an error of the device (status 1006); XLA clamps it, or drops the update.

Ranks run one module. Shares are regular in the form [ranks, before, outer, local, after]: the axis is split into
repetitions and one row of blocks, and the ranks' shares lie behind each other in front. A rank's number is an input:
there is no partition id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from nxpipe.emulator.errors import HloUnsupported
from nxpipe.emulator.hlo.arithmetic import as_float32, settled, truth
from nxpipe.emulator.hlo.writer import ELEMENTS, HloWriter, Shape, Tensor, elements_of
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import AllGather, AllReduce, Operator, RankSlice, ReduceScatter, Resample
from nxpipe.emulator.ops.collective import Share
from nxpipe.emulator.ops.movement import (
    Bitcast,
    Broadcast,
    Concat,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    Iota,
    Pad,
    Reshape,
    ScatterAlong,
    Slice,
    SliceUpdate,
    TakeAlong,
    Transpose,
)

_OF_TRUTH: Final = {"add": "maximum", "maximum": "maximum", "multiply": "minimum", "minimum": "minimum"}
_EXACT: Final = 24  # bits of an integer that float32 holds


def reshape(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Reshape)
    return w.reshape(operands[0], node.op.shape)


def transpose(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Transpose)
    return w.transpose(operands[0], node.op.order)


def broadcast(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Broadcast)
    return w.expanded(operands[0], node.op.shape)


def slice_(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op = node.op
    assert isinstance(op, Slice)
    return w.slice(operands[0], op.starts, op.stops, op.steps)


def slice_update(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """An update in place; where the window has gaps, a choice between the operand and the spread update."""
    op, (x, update) = node.op, operands
    assert isinstance(op, SliceUpdate)
    if 0 in update.shape:
        return x
    if all(step == 1 or size == 1 for step, size in zip(op.steps, update.shape, strict=True)):
        return w.update_slice(x, update, op.starts)
    spans = tuple((size - 1) * step + 1 for size, step in zip(update.shape, op.steps, strict=True))
    after = tuple(size - start - span for size, start, span in zip(x.shape, op.starts, spans, strict=True))
    between = tuple(step - 1 for step in op.steps)
    inside = w.pad(w.filled(True, update.shape, "i1"), False, op.starts, after, between)
    return w.select(inside, w.pad(update, 0, op.starts, after, between), x)


def concat(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Concat)
    return w.concatenate(operands, node.op.axis)


def pad(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, filling) = node.op, operands
    assert isinstance(op, Pad)
    return w.pad(x, filling, op.before, op.after)


def bitcast(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The same bytes; truth values are stored as bytes."""
    op, (x,) = node.op, operands
    assert isinstance(op, Bitcast)
    if op.source is op.dtype:
        return x
    if any(dtype.on_device.itemsize != dtype.itemsize for dtype in (op.source, op.dtype)):
        raise HloUnsupported(f"{op.label} from {op.source} to {op.dtype}", "a device has no 64-bit integers")
    stored = w.convert(x, "ui8") if op.source is DType.BOOL else x
    target = "ui8" if op.dtype is DType.BOOL else ELEMENTS[op.dtype]
    before, after = op.source.itemsize, op.dtype.itemsize
    if before > after:
        stored = w.bitcast(stored, (*x.shape, before // after), target)
    elif before < after:
        split = (*x.shape[:-1], x.shape[-1] * before // after, after // before)
        stored = w.bitcast(w.reshape(stored, split), split[:-1], target)
    elif stored.element != target:
        stored = w.bitcast(stored, x.shape, target)
    result = w.reshape(stored, node.result.type.shape)
    return truth(w, result) if op.dtype is DType.BOOL else result


def flip(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Flip)
    return w.reverse(operands[0], node.op.axes)


def iota(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op = node.op
    assert isinstance(op, Iota)
    counted = w.iota((op.length,), 0, "i32")
    if op.step != 1:
        counted = w.binary("multiply", counted, _word(op.step))
    if op.start:
        counted = w.binary("add", counted, _word(op.start))
    return w.convert(counted, ELEMENTS[op.dtype])


def _word(number: int) -> int:
    """A number modulo 2^32, as an i32 holds it."""
    return int(np.asarray(number & 0xFFFFFFFF, np.uint32).astype(np.int32))


# Computed indices


def rows(w: HloWriter, table: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Rows of a table along an axis; the axes of the indices replace that axis."""
    places = w.convert(indices, "i32")
    return w.gather(table, w.reshape(places, (*places.shape, 1)), (axis,), axis)


def gather(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Gather)
    table, indices = operands
    return rows(w, table, indices, node.op.axis)


def _flat_places(w: HloWriter, shape: Shape, indices: Tensor, axis: int) -> Tensor:
    """The places, in row-major order of a tensor of `shape`, of elements whose coordinate on one axis is an index."""
    places = None
    for at in range(len(shape)):
        stride = elements_of(shape[at + 1 :])
        number = w.convert(indices, "i32") if at == axis else w.iota(indices.shape, at, "i32")
        step = w.binary("multiply", number, stride) if stride != 1 else number
        places = step if places is None else w.binary("add", places, step)
    assert places is not None
    return w.reshape(places, (*indices.shape, 1))


def take_along(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, indices) = node.op, operands
    assert isinstance(op, TakeAlong)
    flat = w.reshape(x, (elements_of(x.shape),))
    return w.gather(flat, _flat_places(w, x.shape, indices, op.axis), (0,), 0)


def scatter_along(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, update, indices) = node.op, operands
    assert isinstance(op, ScatterAlong)
    places = _flat_places(w, x.shape, indices, op.axis)
    flat = w.reshape(x, (elements_of(x.shape),))
    return w.reshape(_updated(node, _Target(w, places, (0,), 0), flat, update, op.combine), x.shape)


@dataclass(frozen=True)
class _Target:
    """The elements that indices name, and what reads or changes them there."""

    w: HloWriter
    indices: Tensor
    axes: Sequence[int]
    position: int

    @property
    def most_updates(self) -> int:
        """Of one element."""
        return elements_of(self.indices.shape[:-1])

    def gathered(self, x: Tensor) -> Tensor:
        return self.w.gather(x, self.indices, self.axes, self.position)

    def scattered(self, x: Tensor, update: Tensor, opcode: str = "") -> Tensor:
        return self.w.scatter(x, self.indices, update, self.axes, self.position, opcode)


def _updated(node: Node, target: _Target, x: Tensor, update: Tensor, combine: str) -> Tensor:
    """A scatter. Combined floats are summed in float32 and rounded once. The compiler combines neither integers nor
    truth values (NCC_EVRF016): parts of them that float32 holds exactly are combined instead. A product of integers has
    no such parts."""
    w = target.w
    if not combine:
        return target.scattered(x, update)
    if x.is_float or x.element == "i1":
        opcode = combine if x.is_float else _OF_TRUTH[combine]
        wide = target.scattered(as_float32(w, x), as_float32(w, update), opcode)
        return settled(w, wide, node.result.type.dtype) if x.is_float else truth(w, wide)
    if combine == "multiply":
        return target.scattered(x, update, combine)
    combined = _sum_of_digits if combine == "add" else _extreme_of_halves
    return _from_bits(w, combined(target, _bits(w, x, combine), _bits(w, update, combine)), x.element, combine)


def _bits(w: HloWriter, x: Tensor, combine: str) -> Tensor:
    """Integers as ui32. For an extreme, their order is that of unsigned numbers, and the extreme is the largest."""
    wide = x if x.element == "ui32" else w.bitcast(w.convert(x, "i32"), x.shape, "ui32")
    mask = _order_mask(x.element, combine)
    return w.binary("xor", wide, mask) if mask else wide


def _from_bits(w: HloWriter, bits: Tensor, element: str, combine: str) -> Tensor:
    mask = _order_mask(element, combine)
    wide = w.binary("xor", bits, mask) if mask else bits
    return wide if element == "ui32" else w.convert(w.bitcast(wide, wide.shape, "i32"), element)


def _order_mask(element: str, combine: str) -> int:
    sign = 0x80000000 if element != "ui32" and combine != "add" else 0
    return sign ^ (0xFFFFFFFF if combine == "minimum" else 0)


def _part(w: HloWriter, bits: Tensor, start: int, length: int) -> Tensor:
    """Some bits of ui32 as float32."""
    shifted = w.binary("shift_right_logical", bits, start) if start else bits
    return as_float32(w, w.binary("and", shifted, (1 << length) - 1))


def _shifted(w: HloWriter, part: Tensor, start: int) -> Tensor:
    """Whole numbers of float32 at the place of such bits."""
    number = w.convert(part, "i32")
    placed = w.binary("multiply", number, _word(1 << start)) if start else number
    return w.bitcast(placed, part.shape, "ui32")


def _sum_of_digits(target: _Target, x: Tensor, update: Tensor) -> Tensor:
    """The digits are so short that no sum of them exceeds what float32 holds."""
    w = target.w
    length = _EXACT - target.most_updates.bit_length()
    if length < 1:
        return target.scattered(x, update, "add")
    zero = w.filled(0, x.shape, "f32")
    for start in range(0, 32, length):
        total = target.scattered(zero, _part(w, update, start, min(length, 32 - start)), "add")
        x = w.binary("add", x, _shifted(w, total, start))
    return x


def _extreme_of_halves(target: _Target, x: Tensor, update: Tensor) -> Tensor:
    """The upper halves decide, and the lower ones among those with the largest upper half; the others count as 0."""
    w = target.w
    upper, upper_update = (_part(w, each, 16, 16) for each in (x, update))
    largest = target.scattered(upper, upper_update, "maximum")
    lower = w.select(w.compare("EQ", upper, largest), _part(w, x, 0, 16), 0.0)
    is_largest = w.compare("EQ", upper_update, target.gathered(largest))
    rest = target.scattered(lower, w.select(is_largest, _part(w, update, 0, 16), 0.0), "maximum")
    return w.binary("or", _shifted(w, largest, 16), _shifted(w, rest, 0))


def _places(w: HloWriter, x: Tensor, axes: Sequence[int], indices: Sequence[Tensor]) -> Tensor:
    """Indices of several axes, beside each other in the last axis; negative ones count from the end."""
    common = np.broadcast_shapes(*(index.shape for index in indices))
    columns = []
    for axis, index in zip(axes, indices, strict=True):
        number = w.convert(index, "i32")
        if index.element[0] != "u":
            number = w.select(w.compare("LT", number, 0), w.binary("add", number, x.shape[axis]), number)
        columns.append(w.reshape(w.expanded(number, common), (*common, 1)))
    return w.concatenate(columns, len(common))


def _position(axes: Sequence[int]) -> int:
    """The place of the indices' common shape: that of the axes if they are adjacent, else in front."""
    return axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0


def index(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, *indices) = node.op, operands
    assert isinstance(op, Index)
    return w.gather(x, _places(w, x, op.axes, indices), op.axes, _position(op.axes))


def index_update(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, update, *indices) = node.op, operands
    assert isinstance(op, IndexUpdate)
    first, _, *index_values = node.operands
    hole = op.addressed_shape(op, first.type, tuple(value.type for value in index_values))
    target = _Target(w, _places(w, x, op.axes, indices), op.axes, _position(op.axes))
    return _updated(node, target, x, w.expanded(update, hole), op.combine)


def resample(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """Sums of neighbours with weights, axis by axis; neighbours and weights are constants."""
    op, result = node.op, as_float32(w, operands[0])
    assert isinstance(op, Resample)
    first = result.rank - len(op.sizes)
    for axis, (size, scale) in enumerate(zip(op.sizes, op.scales, strict=True), start=first):
        taps = op.taps(result.shape[axis], size, np.float32(scale))
        parts = []
        for neighbours, weights in taps:
            part = rows(w, result, w.table(neighbours.astype(np.int32), "i32"), axis)
            if weights is not None:
                factor = w.broadcast(w.table(weights, "f32"), part.shape, (axis,))
                part = w.binary("multiply", part, factor)
            parts.append(part)
        result = parts[0]
        for part in parts[1:]:
            result = w.binary("add", result, part)
    return settled(w, result, node.result.type.dtype)


# Collectives, and a rank's share of a tensor

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
