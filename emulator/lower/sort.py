"""Lowering of argsort, by a bitonic sorting network, and of elementwise operators with their epilogues.

A sort orders pairs of key and position, so that equal keys keep their order (a stable sort). Keys are 32-bit integers
in the order of the elements. A merge step compares a run's first half with its reversed second half; the following
steps compare elements at distances of a half, a quarter, and so on. All comparisons of a step are independent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.lower.elementwise import is_exact
from nxpipe.emulator.lower.epilogue import load_tile
from nxpipe.emulator.lower.integers import WordArithmetic
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lanes import Lanes, bitcast_tile, bits
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.reduce import matrix
from nxpipe.emulator.lower.tiles import WIDEST, channel_tiles, each_box, each_tile, fill
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import ArgSort, Binary, Cast, Unary, Where
from nxpipe.emulator.ops.base import Operator

_STEP: Final = 64  # elements: tile widths are multiples of it


@lowers(Binary, Cast, Unary, Where)
def _elementwise(low: Lowering, node: Node, op: Operator) -> None:
    if is_exact(node) or low.groups.is_cast_by_matmuls(node):
        low.alias(node.result, low.stored_view(node.operands[0]))
        return
    chain = low.chain(node)
    widest = low.k.free_bytes(Memory.SBUF) // chain.width // _STEP * _STEP
    if chain.by_channel:
        for pieces in channel_tiles(low.k, chain.views, max(min(widest, 2 * WIDEST), _STEP)):
            with low.k.scope():
                chain.apply_to(low.k, pieces, {})
        return
    for pieces in each_box(low.k, chain.views, max(min(widest, WIDEST), _STEP), low.row_axes(chain)):
        with low.k.scope():
            chain.apply_to(low.k, pieces, {})


_BLOCK: Final = 2048  # elements of a row on one partition
_LAST: Final = 2**31 - 1  # the largest key, for padding
_SIGN: Final = 2**31


@lowers(ArgSort)
def _arg_sort(low: Lowering, node: Node, op: ArgSort) -> None:
    x, home = low.view(node.operands[0]), low.home(node.result)
    if not x.elements:
        return
    order = (*(axis for axis in range(x.rank) if axis != op.axis), op.axis)
    lines = matrix(low, x.transposed(order), x.rank - 1)
    target = home.transposed(order).reshaped(lines.shape)
    positions = target or low.scratch(DType.INT32, lines.shape)
    sort = _Sort(low, node.operands[0].type.dtype, op.descending)
    length = max(1 << (lines.shape[1] - 1).bit_length(), 2)
    if length <= _BLOCK:
        sort.short(lines, positions, length)
    else:
        sort.long(lines, positions, length)
    if target is None:
        low.copy(home.transposed(order), positions.packed_as(tuple(home.shape[axis] for axis in order)))


@dataclass(frozen=True)
class _Pairs:
    """Keys and positions of elements, in tiles or in access patterns of tiles."""

    keys: Tile
    positions: Tile

    def pattern(self, offset: int, *axes: Axis) -> "_Pairs":
        """The elements of an access pattern from an offset on."""
        return _Pairs(*(_patterned(tile, offset, axes) for tile in (self.keys, self.positions)))


def _patterned(tile: Tile, offset: int, axes: tuple[Axis, ...]) -> Tile:
    return replace(tile, offset=tile.offset + offset * tile.dtype.itemsize, axes=axes)


def _exchange(k: Kernel, lower: _Pairs, upper: _Pairs) -> None:
    """Compare and exchange elements, so that `lower` gets the lesser of each pair."""
    with k.scope():
        lanes = Lanes(k, lower.keys.partitions, lower.keys.elements)
        words = WordArithmetic(lanes, DType.INT32)
        swap = words.two(Alu.GREATER, lower.keys, upper.keys)
        equal = words.two(Alu.EQUAL, lower.keys, upper.keys)
        is_later = words.two(Alu.GREATER, lower.positions, upper.positions)
        words.two(Alu.MULTIPLY, equal, is_later, equal)
        words.two(Alu.ADD, swap, equal, swap)
        for lower_tile, upper_tile in ((lower.keys, upper.keys), (lower.positions, upper.positions)):
            saved = lanes.copy(lower_tile, is_later)
            lanes.choose(lower_tile, bits(swap), upper_tile)
            lanes.choose(upper_tile, bits(swap), saved)


def _first_merge_step(k: Kernel, pairs: _Pairs, length: int, size: int) -> None:
    """The first step of a bitonic merge: compare element i of a run with element i from its end."""
    runs, half = Axis(length // size, size), size // 2
    _exchange(k, pairs.pattern(0, runs, Axis(half, 1)), pairs.pattern(size - 1, runs, Axis(half, -1)))


def _merge_steps(k: Kernel, pairs: _Pairs, length: int, size: int) -> None:
    """The other steps of a merge in runs of `size` elements: compare at distances of a half, a quarter, and so on."""
    while size > 1:
        runs, half = Axis(length // size, size), size // 2
        _exchange(k, pairs.pattern(0, runs, Axis(half, 1)), pairs.pattern(half, runs, Axis(half, 1)))
        size = half


def _sizes(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


@dataclass(frozen=True)
class _Sort:
    low: Lowering
    dtype: DType
    descending: bool

    def short(self, lines: View, target: View, length: int) -> None:
        """Sort rows that fit one partition each."""
        k, count = self.low.k, lines.shape[1]
        for top, height in k.spans(lines.shape[0], PARTITIONS):
            with k.scope():
                keys, positions = (k.tile(DType.INT32, height, length, buffers=2) for _ in range(2))
                if count < length:
                    Lanes(k, height, length).memset(keys.whole, _LAST)
                with k.scope():
                    self._write_keys(load_tile(k, lines.cut((top, height))), keys.cut(height, (0, count)))
                numbers = IotaPattern(
                    engine=Engine.GPSIMD, dst=positions.whole, start=Affine(), by_partition=0, steps=(1,)
                )
                k.emit(numbers)
                pairs = _Pairs(keys.whole, positions.whole)
                for size in _sizes(2, length):
                    _first_merge_step(k, pairs, length, size)
                    _merge_steps(k, pairs, length, size // 2)
                k.copy(target.cut((top, height)).far(), positions.cut(height, (0, count)))

    def long(self, lines: View, target: View, length: int) -> None:
        """Sort longer rows, in blocks that fit one partition; keys and positions are in HBM between the steps."""
        low, (rows, count) = self.low, lines.shape
        keys, positions = (low.scratch(DType.INT32, (rows, length)) for _ in range(2))
        self._prepare(lines, keys, positions)
        blocks = (rows * length // _BLOCK, _BLOCK)
        inside = keys.packed_as(blocks), positions.packed_as(blocks)
        self._within_blocks(*inside, first=True)
        for size in _sizes(2 * _BLOCK, length):
            self._across_blocks_reversed(keys, positions, size)
            step = size // 2
            while step > _BLOCK:
                self._across_blocks(keys, positions, step)
                step //= 2
            self._within_blocks(*inside, first=False)
        low.copy(target, positions.cut((0, rows), (0, count)))

    def _prepare(self, lines: View, keys: View, positions: View) -> None:
        k, (rows, count) = self.low.k, lines.shape
        length = keys.shape[1]
        fill(k, keys.cut((0, rows), (count, length - count)), _LAST)
        for height, width, (target, source) in each_tile(k, [keys.cut((0, rows), (0, count)), lines]):
            with k.scope():
                key_tile = k.tile(DType.INT32, height, width).whole
                self._write_keys(load_tile(k, source), key_tile)
                k.copy(target.far(), key_tile)
        table = positions.packed_as((rows, length // _BLOCK, _BLOCK)).transposed((1, 0, 2))
        for top, height in k.spans(length // _BLOCK, PARTITIONS):
            with k.scope():
                numbers = k.tile(DType.INT32, height, _BLOCK).whole
                start = top * _BLOCK
                k.emit(IotaPattern(engine=Engine.GPSIMD, dst=numbers, start=start, by_partition=_BLOCK, steps=(1,)))
                with k.loop(rows) as index:
                    k.copy(table.cut((top, height)).pick(1, index).far(), numbers)

    def _within_blocks(self, keys: View, positions: View, *, first: bool) -> None:
        """Steps within blocks: at first a complete sort of each block, later the last steps of a merge."""
        k = self.low.k
        for top, height in k.spans(keys.shape[0], PARTITIONS):
            with k.scope():
                key, position = (view.cut((top, height)) for view in (keys, positions))
                pairs = _Pairs(load_tile(k, key), load_tile(k, position))
                for size in _sizes(2, _BLOCK) if first else ():
                    _first_merge_step(k, pairs, _BLOCK, size)
                    _merge_steps(k, pairs, _BLOCK, size // 2)
                if not first:
                    _merge_steps(k, pairs, _BLOCK, _BLOCK)
                k.copy(key.far(), pairs.keys)
                k.copy(position.far(), pairs.positions)

    def _across_blocks(self, keys: View, positions: View, size: int) -> None:
        """Compare blocks at a distance of half a run."""
        halves = [half for view in (keys, positions) for half in _halves(view, size)]
        self._exchange_blocks(halves, backwards=False)

    def _across_blocks_reversed(self, keys: View, positions: View, size: int) -> None:
        """Compare the blocks of the first half of a run with the reversed second half."""
        halves = []
        for view in (keys, positions):
            lower, upper = _halves(view, size)
            last = (upper.shape[2] - 1) * upper.strides[2]
            strides = (*upper.strides[:2], -upper.strides[2], upper.strides[3])
            halves += [lower, replace(upper, offset=upper.offset + last, strides=strides)]
        self._exchange_blocks(halves, backwards=True)

    def _exchange_blocks(self, halves: list[View], *, backwards: bool) -> None:
        """Compare and exchange blocks. The longest of the three axes of blocks becomes the partition dimension."""
        k, order = self.low.k, sorted(range(3), key=lambda axis: halves[0].shape[axis])
        ordered = [half.transposed((*order, 3)) for half in halves]
        with k.loop(ordered[0].shape[0]) as outer, k.loop(ordered[0].shape[1]) as inner:
            for top, height in k.spans(ordered[0].shape[2], PARTITIONS):
                with k.scope():
                    pieces = [half.pick(0, outer).pick(0, inner).cut((top, height)) for half in ordered]
                    tiles = [load_tile(k, piece) for piece in pieces]
                    lower, upper = _Pairs(tiles[0], tiles[2]), _Pairs(tiles[1], tiles[3])
                    _exchange(k, lower, upper.pattern(_BLOCK - 1, Axis(_BLOCK, -1)) if backwards else upper)
                    for piece, tile in zip(pieces, tiles, strict=True):
                        k.copy(piece.far(), tile)

    def _write_keys(self, tile: Tile, dst: Tile) -> None:
        lanes = Lanes(self.low.k, tile.partitions, tile.elements)
        words = WordArithmetic(lanes, DType.INT32)
        if self.dtype.is_float:
            keys = _float_keys(lanes, tile)
        elif self.dtype in (DType.UINT32, DType.UINT64):
            keys = words.bit(Alu.BITWISE_XOR, words.load(tile), _SIGN)
        else:
            keys = words.load(tile)
        if self.descending:
            keys = words.bit(Alu.BITWISE_XOR, keys, 2**32 - 1)
        lanes.copy(keys, dst)


def _float_keys(lanes: Lanes, tile: Tile) -> Tile:
    """Integers in the order of floats: the magnitude bits of negative numbers are inverted. Zeros become +0, and all
    NaNs one NaN, so that they compare equal."""
    values = lanes.two(Alu.ADD, tile, 0.0)
    lanes.choose(values, lanes.compared(Alu.NOT_EQUAL, values, values), nan)
    words = WordArithmetic(lanes, DType.INT32)
    word = bitcast_tile(values, DType.INT32)
    inversion = words.with_number(Alu.MULTIPLY, words.bit(Alu.RIGHT_SHIFT, word, 31), _LAST)
    ordered = lanes.two(Alu.BITWISE_XOR, bits(word), bits(inversion), lanes.tile(DType.UINT32))
    return bitcast_tile(ordered, DType.INT32)


def _halves(view: View, size: int) -> tuple[View, View]:
    """The first and second halves of all runs, each as [rows, runs, blocks of half a run, block]."""
    rows, length = view.shape
    shape = (rows, length // size, size // 2 // _BLOCK, _BLOCK)
    lower = replace(view, shape=shape, strides=(length, size, _BLOCK, 1))
    return lower, replace(lower, offset=lower.offset + size // 2)
