"""Convolutions: one matmul over channels for each window position, accumulated in PSUM (implicit GEMM).

The input is not unfolded (no im2col) and not padded. Channels are on the partition dimension, and a window position is
a shifted, strided access pattern of the input tile in SBUF. For few channels, the window's rows are placed on further
partitions, which fills the tensor engine's rows. Depthwise convolutions, whose channels do not mix, run on the vector
engine.

Feature maps are stored channel by channel, [channels, batch, position ...]: each lane's elements are one contiguous run
of all images, and a matmul covers several small images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine, divided
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.scalar import Activation
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import Memset, ScalarTensorTensor
from nxpipe.emulator.lower.epilogue import FUNCTION, SCALE, RowAffine
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import chunk_spans, fill
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.windows import (
    PIECE,
    ChannelTiles,
    Slab,
    Starts,
    Windows,
    blocks,
    by_channel,
    edge_spans,
    flat,
    interiors,
    linear,
    load_lanes,
    load_slab,
    merged_axes,
    moved,
    part,
    slab_sizes,
    taps,
    windows,
)
from nxpipe.emulator.ops import Convolution

_BANK: Final = 512  # sums in a bank of PSUM
_TRANSPOSED: Final = 32  # rows and columns of one transpose on the vector engine


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
                            self._write_outputs(slab, resident, affine(output[0]), outputs_of, columns, image, rows)
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
            k.emit(Memset(engine=Engine.VECTOR, dst=replace(border, axes=merged_axes(border.axes)), value=0.0))
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
