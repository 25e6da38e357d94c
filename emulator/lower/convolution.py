"""Convolutions: one matmul over channels for each window position, accumulated in PSUM (implicit GEMM).

The input is not unfolded (no im2col). Channels are on the partition dimension, and a window position is a shifted,
strided access pattern of the input tile in SBUF. For few channels, the window's rows are placed on further partitions,
which fills the tensor engine's rows. Depthwise convolutions, whose channels do not mix, run on the vector engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, ScalarTensorTensor
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.tiles import fill
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk
from nxpipe.emulator.lower.view import View, packed
from nxpipe.emulator.ops import Convolution

Starts = tuple[Affine, ...]
WIDEST: Final = 2048  # output positions in one tile


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

    def fills(self) -> bool:
        """True if a window reaches into padding."""
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
    """Windows over the trailing axes of a view; negative padding crops the view."""
    leading = x.rank - len(window)
    cuts = [max(-margin, 0) for margin in before]
    cut = x.cut(*((0, size) for size in x.shape[:leading]))
    geometry = Windows(window, stride, dilation, places, (0,) * len(window), tuple(max(margin, 0) for margin in before))
    reach = geometry.reach(places[0])
    remaining = [size - start for size, start in zip(x.shape[leading:], cuts, strict=True)]
    sizes = tuple(
        max(min(size, needed - margin), 0)
        for size, needed, margin in zip(remaining, reach, geometry.margin, strict=True)
    )
    spans = [(0, size) for size in x.shape[:leading]] + list(zip(cuts, sizes, strict=True))
    return cut.cut(*spans), replace(geometry, sizes=sizes)


def padded(low: Lowering, view: View, geometry: Windows, filling: float) -> tuple[View, Windows]:
    """A padded copy in HBM. It is needed if SBUF holds only some of the rows, so that padding cannot be filled
    there."""
    if not geometry.fills():
        return view, geometry
    leading = view.rank - len(geometry.window)
    reach = geometry.reach(geometry.places[0])
    copy = low.scratch(view.dtype, (*view.shape[:leading], *reach))
    fill(low.k, copy, filling)
    spans = [(0, size) for size in view.shape[:leading]] + list(zip(geometry.margin, geometry.sizes, strict=True))
    low.copy(copy.cut(*spans), view)
    return copy, replace(geometry, sizes=reach, margin=(0,) * len(reach))


@dataclass(frozen=True)
class Slab:
    """An input tile [128, chunks, position ...] in SBUF: all positions, or those that some output rows need."""

    geometry: Windows
    block: Block

    def shifted(self, lanes: int, chunk: Affine | int, starts: Starts, sizes: Sequence[int], at: Starts) -> Tile:
        """The input elements at window position `at`, for `sizes` output positions from `starts` on."""
        geometry, (_, *reach) = self.geometry, self.block.shape
        offset, axes = affine(chunk) * prod(reach), []
        for axis, stride in enumerate(packed(tuple(reach))):
            offset += starts[axis] * (geometry.stride[axis] * stride) + at[axis] * (geometry.dilation[axis] * stride)
            axes.append(Axis(sizes[axis], geometry.stride[axis] * stride))
        tile = self.block.whole
        return replace(
            tile, partitions=lanes, offset=tile.offset + offset * tile.dtype.itemsize, axes=_merged(tuple(axes))
        )


def load_slab(k: Kernel, geometry: Windows, view: View, rows: Span, dtype: DType, filling: float) -> Slab:
    """Load the slab of a view [lanes, position ...] that the output rows `rows` need."""
    size, lanes = rows[1], view.shape[0]
    chunks = -(-lanes // 128)
    reach = geometry.reach(size)
    block = k.tile(dtype, min(lanes, 128), chunks, *reach, buffers=2)
    if geometry.fills():
        k.emit(Memset(engine=Engine.GPSIMD, dst=flat(block), value=stored_number(filling, dtype)))
    extents = tuple(min(size, needed) for size, needed in zip(geometry.sizes, reach, strict=True))
    spans = [(margin, extent) for margin, extent in zip(geometry.margin, extents, strict=True)]
    first = affine(rows[0]) * geometry.stride[0]
    if prod(extents):
        for chunk in range(chunks):
            count = min(lanes - chunk * 128, 128)
            source = view.cut((chunk * 128, count), (first, extents[0]), *((0, extent) for extent in extents[1:]))
            dst = block.cut(count, (chunk, 1), *spans)
            k.copy(replace(dst, axes=dst.axes[1:]), source.far())
    return Slab(geometry, block)


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
    """Load a view [lanes, position ...] once per window row, each copy to partitions of its own. Padding is filled with
    zeros, which requires that the slab holds all output rows."""
    lanes, window_rows = view.shape[0], geometry.window[0]
    row_windows = folded(geometry)
    block = k.tile(dtype, lanes * window_rows, 1, *row_windows.reach(rows[1]), buffers=2)
    if geometry.fills():
        k.emit(Memset(engine=Engine.GPSIMD, dst=flat(block), value=0.0))
    reach = zip(row_windows.margin, row_windows.sizes, block.shape[1:], strict=True)
    columns = [(margin, min(size, extent)) for margin, size, extent in reach][1:]
    for row in range(window_rows):
        origin = row * geometry.dilation[0] - geometry.margin[0]  # input row of this window row at output row 0
        low, high = 0, rows[1]
        if geometry.fills():
            low = max(-(origin // geometry.stride[0]), 0)
            high = min((geometry.sizes[0] - 1 - origin) // geometry.stride[0] + 1, high)
        if high > low:
            first = (affine(rows[0]) + low) * geometry.stride[0] + origin
            source = view.cut((0, lanes), (first, high - low), *((0, size) for _, size in columns))
            strides = (source.strides[0], source.strides[1] * geometry.stride[0], *source.strides[2:])
            dst = block.cut((row * lanes, lanes), (0, 1), (low, high - low), *columns)
            k.copy(replace(dst, axes=dst.axes[1:]), replace(source, strides=strides).far())
    return Slab(row_windows, block)


def flat(block: Block) -> Tile:
    return replace(block, shape=(prod(block.shape),)).whole


def blocks(k: Kernel, shape: Sequence[int], most: int) -> Iterator[tuple[Starts, tuple[int, ...]]]:
    """Blocks of at most `most` consecutive positions of a shape: their starts and sizes."""
    if len(shape) == 1:
        for start, size in k.spans(shape[0], most):
            yield (start,), (size,)
        return
    inner = prod(shape[1:])
    if inner > most:
        with k.loop(shape[0]) as index:
            for starts, sizes in blocks(k, shape[1:], most):
                yield (index, *starts), (1, *sizes)
        return
    for start, size in k.spans(shape[0], max(most // max(inner, 1), 1)):
        yield (start, *(Affine() for _ in shape[1:])), (size, *shape[1:])


def each_place(k: Kernel, window: Sequence[int]) -> Iterator[tuple[Affine, Starts]]:
    """Loops over a window's positions; yields the linear index and the offset on each axis."""
    if not window:
        yield Affine(), ()
        return
    with k.loop(window[0]) as index:
        for number, inner in each_place(k, window[1:]):
            yield index * prod(window[1:]) + number, (index, *inner)


def linear(starts: Starts, shape: Sequence[int]) -> Affine:
    """The linear index of a position in a shape."""
    index = Affine()
    for start, stride in zip(starts, packed(tuple(shape)), strict=True):
        index += start * stride
    return index


def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    nontrivial = tuple(axis for axis in axes if axis.size != 1)
    return nontrivial or axes[-1:]


_BANK: Final = 512


@lowers(Convolution)
def _convolution(low: Lowering, node: Node, op: Convolution) -> None:
    x, weight = map(low.view, node.operands[:2])
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    places = node.result.type.shape[2:]
    epilogue = low.epilogue(node.result, prod(places))
    if not node.result.type.elements:
        return
    view, geometry = windows(x, weight.shape[2:], op.stride, op.dilation, op.before, places)
    depthwise = op.groups == x.shape[1] == weight.shape[0]
    lanes = x.shape[1] if depthwise else weight.shape[1]
    fold = not depthwise and 1 < geometry.window[0] * lanes <= PARTITIONS and geometry.window[0] > 1
    needed = folded(geometry) if fold else geometry
    rows = slab_rows(
        low.k.free_bytes(Memory.SBUF) // 2, needed, chunks_of(lanes) * (4 if depthwise else x.dtype.itemsize) * 2
    )
    if rows < places[0]:
        view, geometry = padded(low, view, geometry, 0.0)
    out = node.result.type.dtype.on_device
    work = _Convolution(low.k, view, geometry, weight, bias, op.groups, fold, rows, epilogue, out)
    if depthwise:
        work.write_depthwise()
    else:
        work.write(low)


def slab_rows(budget: int, geometry: Windows, by_place: int) -> int:
    """The number of output rows whose inputs fit the budget; at least one."""
    rows = geometry.places[0]
    while rows > 1 and prod(geometry.reach(rows)) * by_place > budget:
        rows = rows // 2
    return rows


@dataclass(frozen=True)
class _Convolution:
    """One convolution with its tile sizes."""

    k: Kernel
    x: View  # [batch, channels, position ...]
    geometry: Windows
    weight: View  # [outputs, channels of a group, window ...]
    bias: View | None
    groups: int
    fold: bool  # the window's rows are on partitions beside the channels
    rows: int  # output rows whose inputs are in SBUF at a time
    epilogue: Epilogue
    out: DType

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
        with k.loop(self.groups) as group, k.scope():
            group_weights = matrices.cut(
                (0, channels), (0, window[0]), (0, shape[2]), (group * group_outputs, group_outputs)
            )
            budget, by_output = k.free_bytes(Memory.SBUF) // 4, chunks_of(lanes) * places * group_weights.dtype.itemsize
            resident = self._weights(group_weights, 1) if by_output * group_outputs <= budget else None
            step = PARTITIONS if resident else max(min(budget // (2 * by_output), PARTITIONS), 1)
            with k.loop(self.x.shape[0]) as image:
                source = self.x.pick(0, image).cut((group * channels, channels))
                for rows in k.spans(self.geometry.places[0], self.rows):
                    with k.scope():
                        slab = self._slab(source, rows)
                        first = image * outputs + group * group_outputs
                        for output in k.spans(group_outputs, step):
                            with k.scope():
                                self._write_outputs(
                                    slab, group_weights, resident, rows, output, first, group * group_outputs
                                )

    def _slab(self, source: View, rows: Span) -> Slab:
        if self.fold:
            return load_folded(self.k, self.geometry, source, rows, self.x.dtype)
        return load_slab(self.k, self.geometry, source, rows, self.x.dtype, 0.0)

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
        for chunk, depth in each_chunk(k, channels):
            dst = replace(block, shape=(block.shape[0], rows, places, outputs)).cut(depth, (chunk, 1))
            k.copy(replace(dst, axes=dst.axes[1:]), matrices.cut((chunk * PARTITIONS, depth)).far())
        return block

    def _write_outputs(
        self,
        slab: Slab,
        matrices: View,
        resident: Block | None,
        rows: Span,
        output: Span,
        first_row: Affine,
        group_start: Affine,
    ) -> None:
        k, (start, count) = self.k, output
        bias = self._column(self.bias, start + group_start, count)
        if resident is None:
            block = self._weights(matrices.cut(*((0, size) for size in matrices.shape[:3]), output), 2)
        else:
            block = resident
        columns: Span = (start, count) if resident is not None else (0, count)
        shape = (rows[1], *self.geometry.places[1:])
        for starts, sizes in blocks(k, shape, self._tile_positions()):
            with k.scope():
                out_tile = k.tile(self.out, count, prod(sizes), buffers=2)
                for bank_starts, bank_sizes in blocks(k, sizes, _BANK):
                    with k.scope():
                        sums = k.psum(count, prod(bank_sizes)).whole
                        positions = tuple(outer + inner for outer, inner in zip(starts, bank_starts, strict=True))
                        self._multiply(sums, slab, block, columns, positions, bank_sizes)
                        dst = out_tile.cut(count, (linear(bank_starts, sizes), prod(bank_sizes)))
                        self._add_bias(dst, sums, bias)
                position = linear((starts[0] + rows[0], *starts[1:]), self.geometry.places)
                self.epilogue.store(out_tile.whole, (start + first_row, count), (position, prod(sizes)))

    def _tile_positions(self) -> int:
        """Output positions in one tile: the longest run for which the epilogue fits SBUF."""
        by_place = 2 * self.out.itemsize + epilogue_bytes(self.epilogue)
        return max(min(self.k.free_bytes(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def _column(self, view: View | None, start: Affine, count: int) -> Tile | float:
        if view is None:
            return 0.0
        column = self.k.tile(DType.FLOAT32, count, 1, buffers=2).whole
        self.k.copy(column, view.cut((start, count)).far())
        return column

    def _multiply(
        self, sums: Tile, slab: Slab, weights: Block, output: Span, starts: Starts, sizes: tuple[int, ...]
    ) -> None:
        k, lanes = self.k, self.weight.shape[1] * (self.geometry.window[0] if self.fold else 1)
        places = prod(slab.geometry.window)
        if not lanes:
            k.emit(Memset(engine=Engine.VECTOR, dst=sums, value=0.0))
        for chunk, depth in each_chunk(k, lanes):
            for position, at in each_place(k, slab.geometry.window):
                k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=sums,
                        stationary=weights.cut(depth, (chunk, 1), (position, 1), output),
                        moving=slab.shifted(depth, chunk, starts, sizes, at),
                        accumulate=chunk * places + position,
                    )
                )

    def _add_bias(self, dst: Tile, sums: Tile, bias: Tile | float) -> None:
        function = Function.COPY
        self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=function, bias=bias))

    # Depthwise

    def write_depthwise(self) -> None:
        k, channels, places = self.k, self.weight.shape[0], prod(self.geometry.window)
        with k.loop(self.x.shape[0]) as image:
            for first, count in k.spans(channels, PARTITIONS):
                with k.scope():
                    weight = k.tile(DType.FLOAT32, count, places, buffers=2)
                    by_channel = self.weight.pick(1, 0).cut((first, count))
                    k.copy(replace(weight, shape=self.geometry.window).whole, by_channel.far())
                    bias = self._column(self.bias, first, count)
                    source = self.x.pick(0, image).cut((first, count))
                    for rows in k.spans(self.geometry.places[0], self.rows):
                        with k.scope():
                            slab = load_slab(k, self.geometry, source, rows, DType.FLOAT32, 0.0)
                            self._fold(slab, weight, bias, rows, (image * channels + first, count))

    def _fold(self, slab: Slab, weight: Block, bias: Tile | float, rows: Span, lanes: Span) -> None:
        k, count = self.k, lanes[1]
        for starts, sizes in blocks(k, (rows[1], *self.geometry.places[1:]), self._tile_positions() // 2):
            with k.scope():
                sums = k.tile(DType.FLOAT32, count, prod(sizes), buffers=2).whole
                k.emit(Memset(engine=Engine.VECTOR, dst=sums, value=0.0))
                for number, at in each_place(k, self.geometry.window):
                    k.emit(
                        ScalarTensorTensor(
                            engine=Engine.VECTOR,
                            dst=sums,
                            src=slab.shifted(count, 0, starts, sizes, at),
                            op0=Alu.MULTIPLY,
                            operand0=weight.cut(count, (number, 1)),
                            op1=Alu.ADD,
                            right=sums,
                        )
                    )
                out_tile = k.tile(self.out, count, prod(sizes), buffers=2).whole
                self._add_bias(out_tile, sums, bias)
                position = linear((starts[0] + rows[0], *starts[1:]), self.geometry.places)
                self.epilogue.store(out_tile, lanes, (position, prod(sizes)))
