"""Sliding windows, with channels on the partition dimension: the input in SBUF, blocks of outputs, and the outputs for
which a window position is no padding.

Nothing is padded: where a window position reaches into the padding, its instruction covers only the outputs for which
it does not. Such blocks have constant starts, all others are in loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.operands import Axis, Memory, Tile, contiguous
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.tiles import over_lanes
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import View, packed

Starts = tuple[Affine, ...]
WIDEST: Final = 8192  # output positions in one tile
PIECE: Final = 16384  # bytes of a lane in one slab: long runs, in pieces enough to load one and compute another


@dataclass(frozen=True)
class Windows:
    """Sliding windows, with one entry per spatial axis; `margin` is the padding before the first position."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]  # output positions
    sizes: tuple[int, ...]  # input positions, without padding
    margin: tuple[int, ...]

    def reach(self, rows: int) -> tuple[int, ...]:
        """The input positions that `rows` output rows (of the first spatial axis) need."""
        outputs = (rows, *self.places[1:])
        steps = zip(outputs, self.stride, self.window, self.dilation, strict=True)
        return tuple((count - 1) * step + (length - 1) * dilation + 1 for count, step, length, dilation in steps)

    def loaded(self, rows: int) -> int:
        """Input positions in a slab of `rows` output rows, without padding."""
        return self._rows_of(rows) * prod(self.sizes[1:])

    def fills(self) -> bool:
        """True if a window reaches into padding."""
        return any(self.interior(axis) != (0, count) for axis, count in enumerate(self.places))

    def interior(self, axis: int) -> tuple[int, int]:
        """The first output position on an axis whose window reaches into no padding, and the end of all such."""
        count, last = self.places[axis], (self.window[axis] - 1) * self.dilation[axis]
        first = min(self._first(axis, 0), count)
        return first, max(min(self._stop(axis, last), count), first)

    def inside(self, axis: int, at: int, span: Span) -> tuple[int, int]:
        """The outputs of a span whose input at window position `at` is no padding: the first, from the span's start on,
        and the number. A span that changes with a loop is within the interior."""
        start, count = affine(span[0]), span[1]
        if start.terms:
            return 0, count
        offset = at * self.dilation[axis]
        first = max(self._first(axis, offset) - start.base, 0)
        return first, max(min(self._stop(axis, offset) - start.base, count) - first, 0)

    def runs(self, axis: int) -> list[tuple[int, int, int, int]]:
        """Runs of outputs on an axis whose windows reach into padding alike: the first, the number, and the window
        positions that are no padding: the first, and the end."""
        found: list[tuple[int, int, int, int]] = []
        for place in range(self.places[axis]):
            inside = [at for at in range(self.window[axis]) if self.inside(axis, at, (place, 1))[1]]
            low, high = (inside[0], inside[-1] + 1) if inside else (0, 0)
            if found and found[-1][2:] == (low, high):
                found[-1] = (found[-1][0], found[-1][1] + 1, low, high)
            else:
                found.append((place, 1, low, high))
        return found

    def unpadded(self) -> tuple[int, ...] | None:
        """The window position that reaches into padding for no output; None if there is none."""
        found = []
        for axis, count in enumerate(self.places):
            inside = [at for at in range(self.window[axis]) if self.inside(axis, at, (0, count)) == (0, count)]
            if not inside:
                return None
            found.append(inside[0])
        return tuple(found)

    def of_rows(self, rows: Span) -> tuple["Windows", Affine]:
        """The windows of some output rows, and the first input row that they need."""
        start = affine(rows[0])
        first = start * self.stride[0] + -self.margin[0]
        size, margin = self._rows_of(rows[1]), 0
        if not first.terms:
            margin = max(-first.base, 0)
            first = Affine(first.base + margin)
            size = min(size if rows[1] == self.places[0] else size - margin, self.sizes[0] - first.base)
        geometry = replace(
            self,
            places=(rows[1], *self.places[1:]),
            sizes=(max(size, 0), *self.sizes[1:]),
            margin=(margin, *self.margin[1:]),
        )
        return geometry, first

    def _rows_of(self, rows: int) -> int:
        """Input rows of a slab; all of them if it has all outputs, which makes the slab one run of elements."""
        return self.sizes[0] if rows == self.places[0] else min(self.reach(rows)[0], self.sizes[0])

    def _first(self, axis: int, offset: int) -> int:
        """The first output position whose input at an offset in the window is not before the first input."""
        return max(-((offset - self.margin[axis]) // self.stride[axis]), 0)

    def _stop(self, axis: int, offset: int) -> int:
        """The first output position whose input at an offset in the window is behind the last input."""
        return max((self.sizes[axis] - 1 - offset + self.margin[axis]) // self.stride[axis] + 1, 0)


def windows(
    x: View,
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    before: tuple[int, ...],
    places: tuple[int, ...],
) -> tuple[View, Windows]:
    """Windows over the trailing axes of a view; negative padding crops the view. An axis is cut to what the windows
    read if that is less than half of it; otherwise it stays whole, so that the view keeps its long runs of elements."""
    leading = x.rank - len(window)
    cuts = [max(-margin, 0) for margin in before]
    geometry = Windows(window, stride, dilation, places, (0,) * len(window), tuple(max(margin, 0) for margin in before))
    reach = geometry.reach(places[0])
    remaining = [size - start for size, start in zip(x.shape[leading:], cuts, strict=True)]
    read = [max(needed - margin, 0) for needed, margin in zip(reach, geometry.margin, strict=True)]
    sizes = tuple(needed if 2 * needed < size else max(size, 0) for size, needed in zip(remaining, read, strict=True))
    spans = [(0, size) for size in x.shape[:leading]] + list(zip(cuts, sizes, strict=True))
    return x.cut(*spans), replace(geometry, sizes=sizes)


@dataclass(frozen=True)
class Slab:
    """An input tile [128, chunks, images, position ...] in SBUF: the inputs of some images and output rows."""

    geometry: Windows  # of the slab: its places are the slab's outputs, its sizes the inputs that it holds
    block: Block

    def shifted(self, lanes: int, chunk: Affine | int, starts: Starts, sizes: Sequence[int], at: Starts) -> Tile:
        """The input elements at window position `at`, for `sizes` images and output positions from `starts` on."""
        geometry, (_, *shape) = self.geometry, self.block.shape
        image, *positions = packed(tuple(shape))
        offset = affine(chunk) * prod(shape) + starts[0] * image
        axes = [Axis(sizes[0], image)]
        for axis, stride in enumerate(positions):
            start, step = starts[1 + axis], geometry.stride[axis]
            offset += (start * step + at[axis] * geometry.dilation[axis] + -geometry.margin[axis]) * stride
            axes.append(Axis(sizes[1 + axis], step * stride))
        tile = self.block.whole
        return replace(
            tile, partitions=lanes, offset=tile.offset + offset * tile.dtype.itemsize, axes=merged_axes(axes)
        )


def load_slab(k: Kernel, geometry: Windows, view: View, rows: Span, dtype: DType) -> Slab:
    """Load the inputs of output rows from a view [lanes, images, position ...]."""
    own, first = geometry.of_rows(rows)
    source = view.cut((0, view.shape[0]), (0, view.shape[1]), (first, own.sizes[0]))
    chunks = max(chunks_of(view.shape[0]), 1)
    block = k.tile(dtype, min(view.shape[0], PARTITIONS), chunks, view.shape[1], *own.sizes, buffers=2)
    load_lanes(k, block, source)
    return Slab(own, block)


def load_lanes(k: Kernel, block: Block, view: View) -> None:
    """Load a view [lanes, ...] into a block [128, chunks, ...], in as few copies as access patterns allow."""
    if not view.elements:
        return
    (inner,) = replace(view, offset=Affine(), shape=view.shape[1:], strides=view.strides[1:]).merged()
    lanes, size, stride = view.shape[0], prod(view.shape[1:]), view.strides[0]
    full, rest = divmod(lanes, PARTITIONS)
    loops = max(inner.rank - (MOST_AXES - 1), 0)  # axes that no access pattern has space for
    together = full if inner.rank + 2 <= MOST_AXES else min(full, 1)
    spans = [(first, together, PARTITIONS) for first in range(0, full, max(together, 1))]
    for first, chunks, count in [*spans, *([(full, 1, rest)] if rest else [])]:
        axes = (Axis(count, stride), *([Axis(chunks, stride * PARTITIONS)] if chunks > 1 else []))
        far = replace(view, offset=view.offset + first * PARTITIONS * stride).far()
        for number, offset in _offsets(k, inner, loops):
            part = tuple(map(Axis, inner.shape[loops:], inner.strides[loops:]))
            width = prod(inner.shape[loops:])
            tile = replace(block.whole, partitions=count, axes=contiguous(chunks * width))
            moved = replace(tile, offset=tile.offset + (number * width + first * size) * block.dtype.itemsize)
            k.copy(moved, replace(far, offset=far.offset + offset, axes=(*axes, *part)))


def _offsets(k: Kernel, view: View, loops: int) -> Iterator[tuple[Affine, Affine]]:
    """Loops over the first axes of a view: the linear index and the offset of each element."""
    if not loops:
        yield Affine(), Affine()
        return
    with k.loop(view.shape[0]) as index:
        for number, offset in _offsets(k, view.pick(0, 0), loops - 1):
            yield index * prod(view.shape[1:loops]) + number, index * view.strides[0] + offset


def flat(block: Block) -> Tile:
    return replace(block, shape=(prod(block.shape),)).whole


def edge_spans(k: Kernel, size: int, step: int, interior: tuple[int, int]) -> Iterator[tuple[Affine, int]]:
    """Like `Kernel.spans`, but only spans within the interior are in a loop: all others have constant starts."""
    step = -(-size // -(-size // step)) if size else 1  # spans of equal lengths
    before = min(-(-interior[0] // step), -(-size // step))
    behind = max(interior[1] // step, before)
    for number in [*range(before), None, *range(behind, -(-size // step))]:
        if number is not None:
            yield Affine(number * step), min(step, size - number * step)
        elif behind > before:
            with k.loop(behind - before) as index:
                yield (index + before) * step, step


def blocks(
    k: Kernel, shape: Sequence[int], most: int, interiors: Sequence[tuple[int, int]]
) -> Iterator[tuple[Starts, tuple[int, ...]]]:
    """Blocks of at most `most` consecutive positions of a shape: their starts and sizes. Only blocks within the
    interiors are in loops."""
    inner = prod(shape[1:])
    if inner > most:
        for start, _ in edge_spans(k, shape[0], 1, interiors[0]):
            for starts, sizes in blocks(k, shape[1:], most, interiors[1:]):
                yield (start, *starts), (1, *sizes)
        return
    for start, size in edge_spans(k, shape[0], max(most // max(inner, 1), 1), interiors[0]):
        yield (start, *(Affine() for _ in shape[1:])), (size, *shape[1:])


def interiors(geometry: Windows, starts: Starts, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The interiors on each axis of a block of images and outputs, relative to its start."""
    found = [(0, sizes[0])]
    for axis, (start, size) in enumerate(zip(starts[1:], sizes[1:], strict=True)):
        first, stop = (0, size) if start.terms else geometry.interior(axis)
        first = min(max(first - start.base, 0), size) if not start.terms else 0
        stop = min(max(stop - start.base, first), size) if not start.terms else size
        found.append((first, stop))
    return found


def each_place(k: Kernel, window: Sequence[int]) -> Iterator[tuple[Affine, Starts]]:
    """Loops over a window's positions; yields the linear index and the offset on each axis."""
    if not window:
        yield Affine(), ()
        return
    with k.loop(window[0]) as index:
        for number, inner in each_place(k, window[1:]):
            yield index * prod(window[1:]) + number, (index, *inner)


@dataclass(frozen=True)
class Tap:
    """A window position of a block: its number, its place in the window, and the outputs whose input is not padding."""

    number: Affine
    at: Starts
    spans: tuple[Span, ...]  # of images and outputs, relative to the block


def taps(k: Kernel, geometry: Windows, starts: Starts, sizes: tuple[int, ...], first: tuple[int, ...]) -> Iterator[Tap]:
    """The window positions of a block, in loops if the block is within the interior; else `first`, which covers the
    whole block, precedes the others."""
    whole: tuple[Span, ...] = tuple((Affine(), size) for size in sizes)
    inner = interiors(geometry, starts, sizes)
    if all(span == (0, size) for span, size in zip(inner, sizes, strict=True)):
        for number, at in each_place(k, geometry.window):
            yield Tap(number, at, whole)
        return
    steps = packed(geometry.window)
    for place in sorted(_positions(geometry.window), key=lambda place: place != first):
        spans = [
            geometry.inside(axis, position, (starts[1 + axis], sizes[1 + axis])) for axis, position in enumerate(place)
        ]
        if all(count > 0 for _, count in spans):
            index = sum(position * stride for position, stride in zip(place, steps, strict=True))
            yield Tap(Affine(index), tuple(map(Affine, place)), (whole[0], *spans))


def _positions(window: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not window:
        return [()]
    return [(first, *rest) for first in range(window[0]) for rest in _positions(window[1:])]


def part(block: Block, sizes: Sequence[int], spans: Sequence[Span]) -> Tile:
    """A part of a tile that holds a block of images and outputs."""
    tile = replace(block, shape=tuple(sizes)).cut(block.partitions, *spans)
    return replace(tile, axes=merged_axes(tile.axes))


def moved(starts: Starts, spans: Sequence[Span]) -> Starts:
    return tuple(start + affine(first) for start, (first, _) in zip(starts, spans, strict=True))


def linear(starts: Starts, shape: Sequence[int]) -> Affine:
    """The linear index of a position in a shape."""
    index = Affine()
    for start, stride in zip(starts, packed(tuple(shape)), strict=True):
        index += start * stride
    return index


def merged_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The same elements with as few axes as possible."""
    kept: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if kept and kept[-1].stride == axis.size * axis.stride:
            kept[-1] = Axis(kept[-1].size * axis.size, axis.stride)
        else:
            kept.append(axis)
    return tuple(kept) or (Axis(1, 1),)


def by_channel(view: View) -> View:
    """A view [batch, channels, ...] with the channels first."""
    return view.transposed((1, 0, *range(2, view.rank)))


@dataclass(frozen=True)
class ChannelTiles:
    """The results of a kernel with channels on lanes, [channels, images, positions], tile by tile: the epilogue that
    stores them."""

    epilogue: Epilogue
    places: tuple[int, ...]  # of the whole result

    def widest(self, k: Kernel, itemsize: int) -> int:
        """Elements of a lane in one tile: the longest run for which the epilogue fits SBUF."""
        by_place = 2 * itemsize + epilogue_bytes(self.epilogue)
        return max(min(k.free_bytes(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def store(self, tile: Tile, value: Value, rows: Span, starts: Starts, sizes: tuple[int, ...]) -> None:
        """Apply the epilogue to a tile [lanes, chunks, images, consecutive positions], and store it."""
        spans = ((starts[0], sizes[0]), (linear(starts[1:], self.places), prod(sizes[1:])))
        views = [view.cut((0, view.shape[0]), *spans) for view in self.epilogue.chain.views]
        pieces = [over_lanes(view, rows) for view in views]
        self.epilogue.chain.apply_to(self.epilogue.k, pieces, {value: tile})


def slab_sizes(budget: int, geometry: Windows, images: int, by_place: int) -> tuple[int, int]:
    """The images, and the output rows of each, whose inputs fit the budget; at least one. Several images only with all
    their rows."""
    rows = geometry.places[0]
    by_image = max(geometry.loaded(rows) * by_place, 1)
    if by_image <= budget:
        return max(min(images, budget // by_image), 1), rows
    while rows > 1 and geometry.loaded(rows) * by_place > budget:
        rows = rows // 2
    return 1, rows
