"""Convolutions: one matmul over channels for each window position, accumulated in PSUM (implicit GEMM).

The input is not unfolded (no im2col). Channels are on the partition dimension, and a window position is a shifted,
strided access pattern of the input tile in SBUF. Nothing is padded either: where a window position reaches into the
padding, its matmul covers only the outputs for which it does not. For few channels, the window's rows are placed on
further partitions, which fills the tensor engine's rows. Depthwise convolutions, whose channels do not mix, run on the
vector engine.

Feature maps are stored channel by channel, [channels, batch, position ...]: each lane's elements are one contiguous run
of all images, and a matmul covers several small images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine, divided
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile, contiguous
from nxpipe.emulator.isa.scalar import Activation
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import Memset, ScalarTensorTensor
from nxpipe.emulator.lower.epilogue import FUNCTION, SCALE, Epilogue, RowAffine, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import chunk_spans, fill, over_lanes
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk
from nxpipe.emulator.lower.view import View, packed
from nxpipe.emulator.ops import Convolution

Starts = tuple[Affine, ...]
WIDEST: Final = 8192  # output positions in one tile
PIECE: Final = 16384  # bytes of a lane in one slab: long runs, in pieces enough to load one and compute another
_BANK: Final = 512  # sums in a bank of PSUM
_TRANSPOSED: Final = 32  # rows and columns of one transpose on the vector engine


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


def padded(low: Lowering, view: View, geometry: Windows, filling: float) -> tuple[View, Windows]:
    """A padded copy in HBM, for windows of which each position reaches into padding for some output."""
    leading = view.rank - len(geometry.window)
    reach = geometry.reach(geometry.places[0])
    copy = low.scratch(view.dtype, (*view.shape[:leading], *reach))
    fill(low.k, copy, filling)
    every = [(0, size) for size in view.shape[:leading]]
    sizes = [
        min(size, needed - margin) for size, needed, margin in zip(geometry.sizes, reach, geometry.margin, strict=True)
    ]
    read = view.cut(*every, *((0, size) for size in sizes))
    low.copy(copy.cut(*every, *zip(geometry.margin, sizes, strict=True)), read)
    return copy, replace(geometry, sizes=reach, margin=(0,) * len(reach))


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
        return replace(tile, partitions=lanes, offset=tile.offset + offset * tile.dtype.itemsize, axes=_merged(axes))


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
            tile = Tile(block.memory, block.dtype, 0, count, block.offset, contiguous(chunks * width))
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


def folded(geometry: Windows) -> Windows:
    """The windows after their rows have moved to partitions of their own: a window with a single row remains."""
    return replace(
        geometry,
        window=(1, *geometry.window[1:]),
        stride=(1, *geometry.stride[1:]),
        dilation=(1, *geometry.dilation[1:]),
        sizes=(geometry.places[0], *geometry.sizes[1:]),
        margin=(0, *geometry.margin[1:]),
    )


def load_folded(k: Kernel, geometry: Windows, view: View, rows: Span, dtype: DType) -> Slab:
    """Load a view [lanes, images, position ...] once per window row, each copy to partitions of its own. Output rows
    for which a window row is padding are filled with zeros."""
    (lanes, images), window_rows = view.shape[:2], geometry.window[0]
    own = replace(folded(geometry), places=(rows[1], *geometry.places[1:]), sizes=(rows[1], *geometry.sizes[1:]))
    block = k.tile(dtype, lanes * window_rows, 1, images, *own.sizes, buffers=2)
    inside = [geometry.inside(0, row, rows) for row in range(window_rows)]
    low, high = max(first for first, _ in inside), min(first + count for first, count in inside)
    for start, stop in ((0, min(low, rows[1])), (max(high, low), rows[1])):
        if stop > start:
            border = block.cut(block.partitions, (0, 1), (0, images), (start, stop - start))
            k.emit(Memset(engine=Engine.VECTOR, dst=replace(border, axes=_merged(border.axes)), value=0.0))
    for row, (first, count) in enumerate(inside):
        if count <= 0 or not prod(own.sizes[1:]):
            continue
        top = (affine(rows[0]) + first) * geometry.stride[0] + row * geometry.dilation[0] + -geometry.margin[0]
        source = view.cut((0, lanes), (0, images), (top, count))
        source = replace(
            source, strides=(*source.strides[:2], source.strides[2] * geometry.stride[0], *source.strides[3:])
        )
        dst = block.cut((row * lanes, lanes), (0, 1), (0, images), (first, count))
        for image, piece in _by_axes(k, source):
            moved = dst.offset + image * (prod(own.sizes) * dtype.itemsize)
            k.copy(replace(dst, offset=moved, axes=dst.axes[1 + source.rank - piece.rank :]), piece.far())
    return Slab(own, block)


def _by_axes(k: Kernel, view: View) -> Iterator[tuple[Affine, View]]:
    """A view [lanes, images, ...] as one access pattern, or image by image if it has too many axes."""
    if view.rank <= MOST_AXES:
        yield Affine(), view
        return
    with k.loop(view.shape[1]) as image:
        yield image, view.pick(1, image)


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
    whole = tuple((Affine(), size) for size in sizes)
    if all(span == (0, size) for span, size in zip(interiors(geometry, starts, sizes), sizes, strict=True)):
        for number, at in each_place(k, geometry.window):
            yield Tap(number, at, whole)
        return
    window = packed(geometry.window)
    for at in sorted(_positions(geometry.window), key=lambda at: at != first):
        spans = [geometry.inside(axis, at[axis], (starts[1 + axis], sizes[1 + axis])) for axis in range(len(at))]
        if all(count > 0 for _, count in spans):
            number = sum(step * stride for step, stride in zip(at, window, strict=True))
            yield Tap(Affine(number), tuple(map(Affine, at)), ((Affine(), sizes[0]), *spans))


def _positions(window: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not window:
        return [()]
    return [(first, *rest) for first in range(window[0]) for rest in _positions(window[1:])]


def part(block: Block, sizes: Sequence[int], spans: Sequence[Span]) -> Tile:
    """A part of a tile that holds a block of images and outputs."""
    tile = replace(block, shape=tuple(sizes)).cut(block.partitions, *spans)
    return replace(tile, axes=_merged(tile.axes))


def moved(starts: Starts, spans: Sequence[Span]) -> Starts:
    return tuple(start + affine(first) for start, (first, _) in zip(starts, spans, strict=True))


def linear(starts: Starts, shape: Sequence[int]) -> Affine:
    """The linear index of a position in a shape."""
    index = Affine()
    for start, stride in zip(starts, packed(tuple(shape)), strict=True):
        index += start * stride
    return index


def _merged(axes: Sequence[Axis]) -> tuple[Axis, ...]:
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


@lowers(Convolution)
def _convolution(low: Lowering, node: Node, op: Convolution) -> None:
    x, weight = map(low.view, node.operands[:2])
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    places = node.result.type.shape[2:]
    if not node.result.type.elements:
        low.channel_epilogue(node.result)
        return
    depthwise = op.groups == x.shape[1] == weight.shape[0]
    view, geometry = windows(x, weight.shape[2:], op.stride, op.dilation, op.before, places)
    if geometry.unpadded() is None and not depthwise:
        view, geometry = padded(low, view, geometry, 0.0)
    lanes = x.shape[1] if depthwise else weight.shape[1]
    fold = not depthwise and 1 < geometry.window[0] * lanes <= PARTITIONS and geometry.window[0] > 1
    epilogue = low.channel_epilogue(node.result)
    fused = RowAffine.of(epilogue, FUNCTION if bias is not None else SCALE)
    work = _Convolution(
        low.k,
        by_channel(view),
        geometry,
        weight,
        bias,
        op.groups,
        fold,
        depthwise,
        fused,
        ChannelTiles(fused.epilogue, places),
    )
    if depthwise:
        work.write_depthwise()
    else:
        work.write(low)


@dataclass(frozen=True)
class _Convolution:
    """One convolution with its tile sizes."""

    k: Kernel
    x: View  # [channels, batch, position ...]
    geometry: Windows
    weight: View  # [outputs, channels of a group, window ...]
    bias: View | None
    groups: int
    fold: bool  # the window's rows are on partitions beside the channels
    depthwise: bool
    fused: RowAffine  # what is applied to the sums as they leave PSUM
    tiles: ChannelTiles

    def slabs(self, source: View, dtype: DType) -> Iterator[tuple[Slab, Affine, Span]]:
        """The input in SBUF, as many images and rows at a time as fit: the slab, its first image, its rows."""
        k, geometry = self.k, folded(self.geometry) if self.fold else self.geometry
        lanes = 1 if self.fold else chunks_of(source.shape[0])
        images, rows = slab_sizes(
            min(k.free_bytes(Memory.SBUF) // 2, 2 * PIECE),
            geometry,
            source.shape[1],
            max(lanes, 1) * dtype.itemsize * 2,
        )
        for image, count in k.spans(source.shape[1], images):
            part_of = source.cut((0, source.shape[0]), (image, count))
            for span in edge_spans(k, geometry.places[0], rows, self.geometry.interior(0)):
                with k.scope():
                    load = load_folded if self.fold else load_slab
                    yield load(k, self.geometry, part_of, span, dtype), image, span

    def write(self, low: Lowering) -> None:
        """Emit the convolution. Weights that fit SBUF are loaded once for the whole batch."""
        k, (outputs, channels, *window) = self.k, self.weight.shape
        group_outputs = outputs // self.groups
        # Weights as [channels, window rows, window columns, outputs]: the contraction axis comes first.
        ordered = self.weight.transposed((*range(1, self.weight.rank), 0))
        shape = (channels, window[0], prod(window[1:]), outputs)
        matrices = ordered.reshaped(shape) or low.packed(ordered).reshaped(shape)
        assert matrices is not None  # packed windows are two axes
        lanes, places = (channels * window[0], prod(window[1:])) if self.fold else (channels, prod(window))
        columns = self._columns()
        with k.loop(self.groups) as group, k.scope():
            start = group * group_outputs
            group_weights = matrices.cut((0, channels), (0, window[0]), (0, shape[2]), (start, group_outputs))
            budget, by_output = k.free_bytes(Memory.SBUF) // 4, chunks_of(lanes) * places * group_weights.dtype.itemsize
            resident = self._weights(group_weights, 1) if by_output * group_outputs <= budget else None
            step = max(min(budget // (2 * by_output), PARTITIONS), 1)
            for slab, image, rows in self.slabs(self.x.cut((group * channels, channels)), self.x.dtype):
                if resident is not None:
                    chunks = self._chunks(slab)
                    for output in chunk_spans(k, group_outputs, chunks):
                        with k.scope():
                            outputs_of = (output[0] + start, output[1])
                            self._write_outputs(slab, resident, output[0], outputs_of, columns, image, rows)
                    continue
                for output in k.spans(group_outputs, step):
                    with k.scope():
                        every = [(0, size) for size in matrices.shape[:3]]
                        block = self._weights(group_weights.cut(*every, output), 2)
                        outputs_of = (output[0] + start, output[1])
                        self._write_outputs(slab, block, Affine(), outputs_of, columns, image, rows)

    def _weights(self, matrices: View, buffers: int) -> Block:
        """Load weights [channels, window rows, window columns, outputs] as [128, chunks, positions, outputs]."""
        k, (channels, rows, places, outputs) = self.k, matrices.shape
        if self.fold:
            block = k.tile(matrices.dtype, channels * rows, 1, places, outputs, buffers=buffers)
            for row in range(rows):
                dst = block.cut((row * channels, channels), (0, 1))
                k.copy(replace(dst, axes=dst.axes[1:]), matrices.pick(1, row).far())
            return block
        block = k.tile(matrices.dtype, PARTITIONS, max(chunks_of(channels), 1), rows * places, outputs, buffers=buffers)
        load_lanes(k, block, matrices)
        return block

    # Columns: a number for each output, one per lane

    def _columns(self) -> dict[View, Block]:
        """The numbers by output, as columns [128, chunks], for all tiles; none if tiles begin at other lanes."""
        whole = self.groups == 1 and not self.depthwise
        return {view: column_chunks(self.k, view) for view in self._by_output() if whole and view.strides[0] == 1}

    def _by_output(self) -> list[View]:
        views = [self.bias, self.fused.scale, self.fused.shift]
        return list(dict.fromkeys(view for view in views if view is not None))

    def _column(self, columns: dict[View, Block], view: View, lanes: Span) -> Tile:
        start, count = affine(lanes[0]), lanes[1]
        chunk = all(step % PARTITIONS == 0 for step in (start.base, *(step for _, step in start.terms)))
        if view in columns and chunk:
            return columns[view].cut(count, (divided(start, PARTITIONS), 1))
        column = self.k.tile(DType.FLOAT32, count, 1, buffers=2).whole
        self.k.copy(column, view.cut((start, count)).far())
        return column

    def _finish(self, dst: Tile, sums: Tile, columns: Sequence[Tile | float]) -> None:
        scale, shift = columns
        function = self.fused.function
        self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=function, scale=scale, bias=shift))

    def _scale_and_shift(self, columns: dict[View, Block], lanes: Span) -> tuple[Tile | float, Tile | float]:
        scale = self._column(columns, self.fused.scale, lanes) if self.fused.scale is not None else 1.0
        shift = self.bias if self.bias is not None else self.fused.shift
        return scale, self._column(columns, shift, lanes) if shift is not None else 0.0

    # Sums

    def _chunks(self, slab: Slab) -> int:
        """Chunks of 128 outputs in one tile: as many as fit, if all positions of a slab do."""
        positions = slab.block.shape[1] * prod(slab.geometry.places)
        return max(self.tiles.widest(self.k, self.fused.dtype.itemsize) // max(positions, 1), 1)

    def _write_outputs(
        self,
        slab: Slab,
        weights: Block,
        first_output: Affine,  # in `weights`
        outputs: Span,
        columns: dict[View, Block],
        image: Affine,
        rows: Span,
    ) -> None:
        k, dtype = self.k, self.fused.dtype
        chunks = max(outputs[1] // PARTITIONS, 1)
        count = outputs[1] // chunks
        shape = (slab.block.shape[1], *slab.geometry.places)
        origin = tuple(Affine() for _ in shape)
        widest = max(self.tiles.widest(k, dtype.itemsize) // chunks, 1)
        for starts, sizes in blocks(k, shape, widest, interiors(slab.geometry, origin, shape)):
            with k.scope():
                out = k.tile(dtype, count, chunks, prod(sizes), buffers=2)
                with k.loop(chunks) as chunk:
                    own = (outputs[0] + chunk * count, count)
                    by_lane = self._scale_and_shift(columns, own)
                    output = (first_output + chunk * count, count)
                    for begin, extent in blocks(k, sizes, _BANK, interiors(slab.geometry, starts, sizes)):
                        with k.scope():
                            sums = k.psum(count, prod(extent))
                            spans = list(zip(begin, extent, strict=True))
                            self._multiply(sums, slab, weights, output, moved(starts, spans), extent)
                            dst = out.cut(count, (chunk, 1), (linear(begin, sizes), prod(extent)))
                            self._finish(dst, sums.whole, by_lane)
                first = (starts[0] + image, affine(starts[1]) + rows[0], *starts[2:])
                self.tiles.store(flat(out), self.fused.value, outputs, first, sizes)

    def _multiply(
        self, sums: Block, slab: Slab, weights: Block, output: Span, starts: Starts, sizes: tuple[int, ...]
    ) -> None:
        k, lanes = self.k, self.weight.shape[1] * (self.geometry.window[0] if self.fold else 1)
        places, first = prod(slab.geometry.window), slab.geometry.unpadded()
        if not lanes:
            k.emit(Memset(engine=Engine.VECTOR, dst=sums.whole, value=0.0))
        assert first is not None  # `padded` has copied all other inputs
        for chunk, depth in each_chunk(k, lanes):
            for number, tap in enumerate(taps(k, slab.geometry, starts, sizes, first)):
                within = moved(starts, tap.spans)
                order = tap.number if tap.number.terms else affine(number)
                k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=part(sums, sizes, tap.spans),
                        stationary=weights.cut(depth, (chunk, 1), (tap.number, 1), output),
                        moving=slab.shifted(depth, chunk, within, [size for _, size in tap.spans], tap.at),
                        accumulate=chunk * places + order,
                    )
                )

    # Depthwise

    def write_depthwise(self) -> None:
        k, channels, places = self.k, self.weight.shape[0], prod(self.geometry.window)
        for first, count in k.spans(channels, PARTITIONS):
            with k.scope():
                weight = k.tile(DType.FLOAT32, count, places, buffers=2)
                by_lane = self.weight.pick(1, 0).cut((first, count))
                k.copy(replace(weight, shape=self.geometry.window).whole, by_lane.far())
                columns = self._scale_and_shift({}, (first, count))
                for slab, image, rows in self.slabs(self.x.cut((first, count)), DType.FLOAT32):
                    self._fold(slab, weight, columns, (first, count), image, rows)

    def _fold(
        self,
        slab: Slab,
        weight: Block,
        columns: tuple[Tile | float, Tile | float],
        lanes: Span,
        image: Affine,
        rows: Span,
    ) -> None:
        k, count = self.k, lanes[1]
        shape = (slab.block.shape[1], *slab.geometry.places)
        inner = interiors(slab.geometry, tuple(Affine() for _ in shape), shape)
        for starts, sizes in blocks(k, shape, max(self.tiles.widest(k, 4) // 2, 1), inner):
            with k.scope():
                sums = k.tile(DType.FLOAT32, count, prod(sizes), buffers=2)
                k.emit(Memset(engine=Engine.VECTOR, dst=sums.whole, value=0.0))
                for tap in taps(k, slab.geometry, starts, sizes, ()):
                    dst, within = part(sums, sizes, tap.spans), moved(starts, tap.spans)
                    k.emit(
                        ScalarTensorTensor(
                            engine=Engine.VECTOR,
                            dst=dst,
                            src=slab.shifted(count, 0, within, [size for _, size in tap.spans], tap.at),
                            op0=Alu.MULTIPLY,
                            operand0=weight.cut(count, (tap.number, 1)),
                            op1=Alu.ADD,
                            right=dst,
                        )
                    )
                out = k.tile(self.fused.dtype, count, prod(sizes), buffers=2).whole
                self._finish(out, sums.whole, columns)
                first = (starts[0] + image, starts[1] + rows[0], *starts[2:])
                self.tiles.store(out, self.fused.value, lanes, first, sizes)


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


def column_chunks(k: Kernel, view: View) -> Block:
    """Load a vector as columns [128, chunks]. A DMA of one number to a lane takes as long as one of 128: rows of 128
    numbers are loaded and transposed by the vector engine, which keeps every bit."""
    (size,) = view.shape
    full, rest = divmod(size, PARTITIONS)
    columns = k.tile(DType.FLOAT32, min(size, PARTITIONS), chunks_of(size))
    for first, rows, width in ((0, full, PARTITIONS), (full, 1, rest)):
        for top in range(first, first + rows if width else first, _TRANSPOSED):
            count = min(first + rows - top, _TRANSPOSED)
            source = replace(
                view,
                offset=view.offset + top * PARTITIONS * view.strides[0],
                shape=(count, width),
                strides=(PARTITIONS * view.strides[0], view.strides[0]),
            )
            with k.scope():
                loaded = k.tile(DType.FLOAT32, count, width)
                k.copy(loaded.whole, source.far())
                for left in range(0, width, _TRANSPOSED):
                    lanes = min(_TRANSPOSED, width - left)
                    dst = columns.cut((left, lanes), (top, count))
                    k.emit(NcTranspose(engine=Engine.VECTOR, dst=dst, src=loaded.cut(count, (left, lanes))))
    return columns
