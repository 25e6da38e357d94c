"""Windows that slide over places: what of a tensor is in SBUF, where a window's elements are in there, and in which
pieces the results are made. Nothing is unfolded: a window's place is a shift of a strided pattern."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Tile
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower.filling import fill
from nxpipe.emulator.lower.kernel import Block, Kernel, Span
from nxpipe.emulator.lower.lanes import held
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.view import View, packed

Starts = tuple[Affine, ...]
WIDEST: Final = 2048  # places of a piece of the result


@dataclass(frozen=True)
class Windows:
    """On each axis of places; `margin` are the places before the first that are filled."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]  # of the result
    sizes: tuple[int, ...]  # of what the windows slide over, margins excluded
    margin: tuple[int, ...]

    def reach(self, rows: int) -> tuple[int, ...]:
        """The places that so many rows of the first axis of results need."""
        wanted = (rows, *self.places[1:])
        steps = zip(wanted, self.stride, self.window, self.dilation, strict=True)
        return tuple((number - 1) * step + (length - 1) * apart + 1 for number, step, length, apart in steps)

    def fills(self) -> bool:
        ends = zip(self.margin, self.sizes, self.reach(self.places[0]), strict=True)
        return any(margin or margin + size < reach for margin, size, reach in ends)


def windows(
    x: View,
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    before: tuple[int, ...],
    places: tuple[int, ...],
) -> tuple[View, Windows]:
    """Over the trailing axes of a view; where padding is negative, the view is cut."""
    leading = x.rank - len(window)
    cuts = [max(-margin, 0) for margin in before]
    cut = x.cut(*((0, size) for size in x.shape[:leading]))
    found = Windows(window, stride, dilation, places, (0,) * len(window), tuple(max(margin, 0) for margin in before))
    reach = found.reach(places[0])
    left = [size - start for size, start in zip(x.shape[leading:], cuts, strict=True)]
    sizes = tuple(
        max(min(size, most - margin), 0) for size, most, margin in zip(left, reach, found.margin, strict=True)
    )
    spans = [(0, size) for size in x.shape[:leading]] + list(zip(cuts, sizes, strict=True))
    return cut.cut(*spans), replace(found, sizes=sizes)


def padded(low: Lowering, view: View, over: Windows, filling: float) -> tuple[View, Windows]:
    """In HBM with its margins, where they cannot be filled in SBUF because that holds a part of the places only."""
    if not over.fills():
        return view, over
    leading = view.rank - len(over.window)
    reach = over.reach(over.places[0])
    made = low.scratch(view.dtype, (*view.shape[:leading], *reach))
    fill(low.k, made, filling)
    spans = [(0, size) for size in view.shape[:leading]] + list(zip(over.margin, over.sizes, strict=True))
    low.copy(made.cut(*spans), view)
    return made, replace(over, sizes=reach, margin=(0,) * len(reach))


@dataclass(frozen=True)
class Slab:
    """Rows [128, chunks, place ...] in SBUF, of all places or of those that some rows of results need."""

    over: Windows
    block: Block

    def shifted(self, lanes: int, chunk: Affine | int, starts: Starts, sizes: Sequence[int], at: Starts) -> Tile:
        """What the windows that begin at results from `starts` on have at one of their own places."""
        over, (_, *reach) = self.over, self.block.shape
        offset, axes = affine(chunk) * prod(reach), []
        for axis, stride in enumerate(packed(tuple(reach))):
            offset += starts[axis] * (over.stride[axis] * stride) + at[axis] * (over.dilation[axis] * stride)
            axes.append(Axis(sizes[axis], over.stride[axis] * stride))
        tile = self.block.whole
        return replace(
            tile, partitions=lanes, offset=tile.offset + offset * tile.dtype.itemsize, axes=_merged(tuple(axes))
        )


def load_slab(k: Kernel, over: Windows, view: View, rows: Span, dtype: DType, filling: float) -> Slab:
    """Of a view [lanes, place ...], for these rows of results."""
    size, lanes = rows[1], view.shape[0]
    chunks = -(-lanes // 128)
    reach = over.reach(size)
    block = k.tile(dtype, min(lanes, 128), chunks, *reach, turns=2)
    if over.fills():
        k.emit(Memset(engine=Engine.GPSIMD, dst=flat(block), value=held(filling, dtype)))
    wanted = tuple(min(size, most) for size, most in zip(over.sizes, reach, strict=True))
    spans = [(margin, number) for margin, number in zip(over.margin, wanted, strict=True)]
    first = affine(rows[0]) * over.stride[0]
    if prod(wanted):
        for chunk in range(chunks):
            count = min(lanes - chunk * 128, 128)
            source = view.cut((chunk * 128, count), (first, wanted[0]), *((0, number) for number in wanted[1:]))
            dst = block.cut(count, (chunk, 1), *spans)
            k.copy(replace(dst, axes=dst.axes[1:]), source.far())
    return Slab(over, block)


def folded(over: Windows) -> Windows:
    """With each row of the window on partitions of its own: what is left of a window is one row."""
    return replace(
        over,
        window=(1, *over.window[1:]),
        stride=(1, *over.stride[1:]),
        dilation=(1, *over.dilation[1:]),
        sizes=(over.places[0], *over.sizes[1:]),
        margin=(0, *over.margin[1:]),
    )


def load_folded(k: Kernel, over: Windows, view: View, rows: Span, dtype: DType) -> Slab:
    """Of a view [lanes, place ...], as many lanes again for each row of the window. Margins are filled with zeros; they
    are there only where all rows of results are."""
    lanes, number = view.shape[0], over.window[0]
    alone = folded(over)
    block = k.tile(dtype, lanes * number, 1, *alone.reach(rows[1]), turns=2)
    if over.fills():
        k.emit(Memset(engine=Engine.GPSIMD, dst=flat(block), value=0.0))
    reach = zip(alone.margin, alone.sizes, block.shape[1:], strict=True)
    others = [(margin, min(size, most)) for margin, size, most in reach][1:]
    for row in range(number):
        behind = row * over.dilation[0] - over.margin[0]  # the place that this row of the first window takes
        low, high = 0, rows[1]
        if over.fills():
            low = max(-(behind // over.stride[0]), 0)
            high = min((over.sizes[0] - 1 - behind) // over.stride[0] + 1, high)
        if high > low:
            first = (affine(rows[0]) + low) * over.stride[0] + behind
            source = view.cut((0, lanes), (first, high - low), *((0, size) for _, size in others))
            apart = (source.strides[0], source.strides[1] * over.stride[0], *source.strides[2:])
            dst = block.cut((row * lanes, lanes), (0, 1), (low, high - low), *others)
            k.copy(replace(dst, axes=dst.axes[1:]), replace(source, strides=apart).far())
    return Slab(alone, block)


def flat(block: Block) -> Tile:
    return replace(block, shape=(prod(block.shape),)).whole


def blocks(k: Kernel, shape: Sequence[int], most: int) -> Iterator[tuple[Starts, tuple[int, ...]]]:
    """Pieces of so many places that lie one behind the other."""
    if len(shape) == 1:
        for start, size in k.spans(shape[0], most):
            yield (start,), (size,)
        return
    inner = prod(shape[1:])
    if inner > most:
        with k.loop(shape[0]) as turn:
            for starts, sizes in blocks(k, shape[1:], most):
                yield (turn, *starts), (1, *sizes)
        return
    for start, size in k.spans(shape[0], max(most // max(inner, 1), 1)):
        yield (start, *(Affine() for _ in shape[1:])), (size, *shape[1:])


def each_place(k: Kernel, window: Sequence[int]) -> Iterator[tuple[Affine, Starts]]:
    """The number of each place of a window, and where it is."""
    if not window:
        yield Affine(), ()
        return
    with k.loop(window[0]) as turn:
        for number, inner in each_place(k, window[1:]):
            yield turn * prod(window[1:]) + number, (turn, *inner)


def linear(starts: Starts, shape: Sequence[int]) -> Affine:
    """The number of a place among those of a shape."""
    found = Affine()
    for start, stride in zip(starts, packed(tuple(shape)), strict=True):
        found += start * stride
    return found


def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    kept = tuple(axis for axis in axes if axis.size != 1)
    return kept or axes[-1:]
