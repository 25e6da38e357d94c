"""Single elements at computed places along an axis: GpSimd picks them inside of partitions, and they are laid down by
comparing their number with that of each place, one update after the other, for several may meet."""

from dataclasses import dataclass, replace
from math import prod

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import GatherFree
from nxpipe.emulator.isa.gpsimd import IotaPattern as Counting
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.lower.byrow import Rows, move, upwards
from nxpipe.emulator.lower.ending import load
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel
from nxpipe.emulator.lower.lanes import Lanes, bits, repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.numbers import Address, counted, row_numbers
from nxpipe.emulator.lower.reduce import matrix
from nxpipe.emulator.lower.sheets import WIDEST
from nxpipe.emulator.lower.sums import COMBINED, Sum
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import ScatterAlong, TakeAlong


def fits(k: Kernel, size: int, dtype: DType) -> bool:
    """Whether a whole line lies in SBUF twice, and leaves room."""
    return size < 2**16 and 4 * size * dtype.itemsize <= k.left(Memory.SBUF)


def pick(low: Lowering, lines: View, numbers: View, home: View) -> None:
    """From each line, the last axis of `lines`, the elements that the same line of `numbers` says."""
    k, size = low.k, lines.shape[-1]
    count = prod(numbers.shape) // max(prod(lines.shape[:-1]), 1)
    source = matrix(low, lines, lines.rank - 1)
    shape = (source.shape[0], count)
    places = numbers.reshaped(shape) or low.packed(numbers).packed_as(shape)
    target = home.reshaped(shape)
    made = target or low.scratch(home.dtype, shape)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.room():
            line = k.tile(source.dtype, height, size, turns=2).whole
            k.copy(line, source.cut((top, height)).far())
            for left, width in k.spans(count, WIDEST):
                with k.room():
                    lanes = Lanes(k, height, width)
                    index = bits(Words(lanes, DType.INT32).load(load(k, places.cut((top, height), (left, width)))))
                    found = k.tile(home.dtype, height, width, turns=2).whole
                    k.emit(GatherFree(engine=Engine.GPSIMD, dst=found, src=line, indices=index))
                    k.copy(made.cut((top, height), (left, width)).far(), found)
    if target is None:
        low.copy(home, made.packed_as(home.shape))


@lowers(TakeAlong)
def _take_along(low: Lowering, node: Node, op: TakeAlong) -> None:
    x, indices = map(low.view, node.operands)
    home = low.home(node.result)
    if not home.elements:
        return
    order = (*(axis for axis in range(x.rank) if axis != op.axis), op.axis)
    corner = x.cut(*((0, x.shape[axis] if axis == op.axis else indices.shape[axis]) for axis in range(x.rank)))
    if fits(low.k, x.shape[op.axis], x.dtype):
        pick(low, corner.transposed(order), indices.transposed(order), home.transposed(order))
        return
    corner = upwards(low, corner, tuple(range(x.rank)))
    shape = indices.shape
    addresses = [
        Address(indices, x.shape[axis], corner.strides[axis])
        if axis == op.axis
        else counted(low, shape[axis], corner.strides[axis], axis, shape)
        for axis in range(x.rank)
    ]
    numbers, step = row_numbers(low, addresses, shape)
    first = replace(corner, shape=(), strides=())
    move(low, Rows(first, numbers.packed_as((prod(shape),)), step), home.packed_as((prod(shape),)), gather=True)


@lowers(ScatterAlong)
def _scatter_along(low: Lowering, node: Node, op: ScatterAlong) -> None:
    """Lines lie across partitions. Update after update is laid down where its number is that of the place."""
    k, home = low.k, low.updated(node)
    update, indices = map(low.view, node.operands[1:])
    if not indices.elements:
        return
    order = (*(axis for axis in range(home.rank) if axis != op.axis), op.axis)
    size = home.shape[op.axis]
    corner = home.cut(*((0, size if axis == op.axis else indices.shape[axis]) for axis in range(home.rank)))
    lines = corner.transposed(order)
    shape = (prod(lines.shape[:-1]), size)
    work = lines.reshaped(shape)
    made = work or low.copied(lines).packed_as(shape)
    news, places = (matrix(low, view.transposed(order), home.rank - 1) for view in (update, indices))
    scatter = _Scatter(k, Sum.of(node.result.type.dtype), op.combine, node.result.type.dtype)
    for top, height in k.spans(shape[0], PARTITIONS):
        with k.room():
            news_here, places_here = (view.cut((top, height)) for view in (news, places))
            scatter.write(made.cut((top, height)), news_here, places_here, size)
    if work is None:
        low.copy(lines, made.packed_as(lines.shape))


@dataclass(frozen=True)
class _Scatter:
    k: Kernel
    exact: Sum
    combine: str
    dtype: DType

    def write(self, lines: View, update: View, indices: View, size: int) -> None:
        k, rows = self.k, lines.shape[0]
        for left, width in k.spans(size, WIDEST):
            with k.room():
                lanes = Lanes(k, rows, width)
                piece = lines.cut((0, rows), (left, width))
                old = load(k, piece)
                sums = self.exact.store(lanes, self.exact.load(lanes, old), lanes.tile(self.exact.dtype), DType.INT32)
                number = lanes.tile(DType.INT32)
                k.emit(Counting(engine=Engine.GPSIMD, dst=number, start=left, by_partition=0, steps=(1,)))
                for begin, count in k.spans(indices.shape[1], WIDEST // 4):
                    with k.room():
                        self._lay_down(lanes, sums, number, update, indices, (begin, count), size)
                k.copy(piece.far(), self.exact.store(lanes, sums, lanes.tile(lines.dtype), self.dtype))

    def _lay_down(
        self, lanes: Lanes, sums: Tile, number: Tile, update: View, indices: View, span: tuple[Affine, int], size: int
    ) -> None:
        k, rows, count = self.k, lanes.partitions, span[1]
        own = Lanes(k, rows, count)
        words = Words(own, DType.INT32).load(load(k, indices.cut((0, rows), span)))
        _require_inside(k, words, size)
        where, news = k.tile(DType.FLOAT32, rows, count), k.tile(self.exact.dtype, rows, count)
        own.copy(words, where.whole)
        own.copy(self.exact.load(own, load(k, update.cut((0, rows), span))), news.whole)
        meets, together = lanes.tile(DType.UINT8), lanes.tile(self.exact.dtype)
        with k.loop(count) as turn:
            lanes.two(Alu.EQUAL, number, repeated(where.cut(rows, (turn, 1)), lanes.width), meets)
            new = repeated(news.cut(rows, (turn, 1)), lanes.width)
            if self.combine:
                new = self.exact.two(lanes, COMBINED[self.combine], sums, new, together)
            lanes.choose(sums, meets, new)


def _require_inside(k: Kernel, words: Tile, size: int) -> None:
    """A gather from as many equal elements as the axis has: nothing comes of it but that indices are looked at."""
    block: Block = k.tile(DType.UINT32, words.partitions, words.elements)
    one = Lanes(k, words.partitions, size).filled(0, DType.UINT32)
    k.emit(GatherFree(engine=Engine.GPSIMD, dst=block.whole, src=one, indices=bits(words)))
