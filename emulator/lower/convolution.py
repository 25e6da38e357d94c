"""Convolutions: for each position of the window a matmul over channels, all of them accumulated in PSUM.

Nothing is unfolded (no im2col): channels are on the partitions, and a position of the window is a shifted, strided
pattern of what is in SBUF. Where channels are few, the rows of the window are on partitions beside them, so that the
tensor engine's rows are filled. Depthwise convolutions, whose channels do not mix, run on the vector engine.
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
WIDEST: Final = 2048  # places of a piece of the result


@dataclass(frozen=True)
class Windows:
    """Sliding windows on each spatial axis; `margin` are the padded positions before the first."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]  # of the result
    sizes: tuple[int, ...]  # of what the windows slide over, margins excluded
    margin: tuple[int, ...]

    def reach(self, rows: int) -> tuple[int, ...]:
        """The input positions that so many rows of the first result axis need."""
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
    """Windows over the trailing axes of a view; negative padding cuts the view."""
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
    """A padded copy in HBM, where padding cannot be filled in SBUF because that holds a part of the positions only."""
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
    """Rows [128, chunks, position ...] in SBUF: all positions, or those that some rows of results need."""

    over: Windows
    block: Block

    def shifted(self, lanes: int, chunk: Affine | int, starts: Starts, sizes: Sequence[int], at: Starts) -> Tile:
        """The elements that the windows of the results from `starts` on have at one of their positions."""
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
    """Load a slab of a view [lanes, position ...] for these rows of results."""
    size, lanes = rows[1], view.shape[0]
    chunks = -(-lanes // 128)
    reach = over.reach(size)
    block = k.tile(dtype, min(lanes, 128), chunks, *reach, buffers=2)
    if over.fills():
        k.emit(Memset(engine=Engine.GPSIMD, dst=flat(block), value=stored_number(filling, dtype)))
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
    """The windows when each row of the window has its own partitions: what is left of a window is one row."""
    return replace(
        over,
        window=(1, *over.window[1:]),
        stride=(1, *over.stride[1:]),
        dilation=(1, *over.dilation[1:]),
        sizes=(over.places[0], *over.sizes[1:]),
        margin=(0, *over.margin[1:]),
    )


def load_folded(k: Kernel, over: Windows, view: View, rows: Span, dtype: DType) -> Slab:
    """Load a view [lanes, position ...] with as many lanes again for each row of the window. Padding is filled with
    zeros, which requires that the slab holds all rows of results."""
    lanes, number = view.shape[0], over.window[0]
    alone = folded(over)
    block = k.tile(dtype, lanes * number, 1, *alone.reach(rows[1]), buffers=2)
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
    """Blocks of consecutive positions."""
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
    """The number of each position of a window, and its offset."""
    if not window:
        yield Affine(), ()
        return
    with k.loop(window[0]) as index:
        for number, inner in each_place(k, window[1:]):
            yield index * prod(window[1:]) + number, (index, *inner)


def linear(starts: Starts, shape: Sequence[int]) -> Affine:
    """The number of a position among those of a shape."""
    found = Affine()
    for start, stride in zip(starts, packed(tuple(shape)), strict=True):
        found += start * stride
    return found


def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    kept = tuple(axis for axis in axes if axis.size != 1)
    return kept or axes[-1:]


_BANK: Final = 512


@lowers(Convolution)
def _convolution(low: Lowering, node: Node, op: Convolution) -> None:
    x, weight = map(low.view, node.operands[:2])
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    places = node.result.type.shape[2:]
    epilogue = low.epilogue(node.result, prod(places))
    if not node.result.type.elements:
        return
    view, over = windows(x, weight.shape[2:], op.stride, op.dilation, op.before, places)
    depthwise = op.groups == x.shape[1] == weight.shape[0]
    lanes = x.shape[1] if depthwise else weight.shape[1]
    fold = not depthwise and 1 < over.window[0] * lanes <= PARTITIONS and over.window[0] > 1
    needed = folded(over) if fold else over
    rows = slab_rows(
        low.k.left(Memory.SBUF) // 2, needed, chunks_of(lanes) * (4 if depthwise else x.dtype.itemsize) * 2
    )
    if rows < places[0]:
        view, over = padded(low, view, over, 0.0)
    out = node.result.type.dtype.on_device
    work = _Convolution(low.k, view, over, weight, bias, op.groups, fold, rows, epilogue, out)
    if depthwise:
        work.write_depthwise()
    else:
        work.write(low)


def slab_rows(budget: int, over: Windows, by_place: int) -> int:
    """Rows of results whose inputs fit SBUF; at least one."""
    rows = over.places[0]
    while rows > 1 and prod(over.reach(rows)) * by_place > budget:
        rows = rows // 2
    return rows


@dataclass(frozen=True)
class _Convolution:
    k: Kernel
    x: View  # [batch, channels, place ...]
    over: Windows
    weight: View  # [outputs, channels of a group, window ...]
    bias: View | None
    groups: int
    fold: bool  # the window's rows on partitions beside the channels
    rows: int  # of results for which places are at hand
    epilogue: Epilogue
    out: DType

    def write(self, low: Lowering) -> None:
        """Weights that fit SBUF are loaded once for a whole batch."""
        k, (outputs, channels, *window) = self.k, self.weight.shape
        each = outputs // self.groups
        # Channels, and places of the window, as a matrix of each group's outputs for each.
        ordered = self.weight.transposed((*range(1, self.weight.rank), 0))
        shape = (channels, window[0], prod(window[1:]), outputs)
        matrices = ordered.reshaped(shape) or low.packed(ordered).reshaped(shape)
        assert matrices is not None  # packed windows are two axes
        lanes, places = (channels * window[0], prod(window[1:])) if self.fold else (channels, prod(window))
        with k.loop(self.groups) as group, k.scope():
            own = matrices.cut((0, channels), (0, window[0]), (0, shape[2]), (group * each, each))
            budget, by_output = k.left(Memory.SBUF) // 4, chunks_of(lanes) * places * own.dtype.itemsize
            kept = self._weights(own, 1) if by_output * each <= budget else None
            step = PARTITIONS if kept else max(min(budget // (2 * by_output), PARTITIONS), 1)
            with k.loop(self.x.shape[0]) as image:
                source = self.x.pick(0, image).cut((group * channels, channels))
                for rows in k.spans(self.over.places[0], self.rows):
                    with k.scope():
                        slab = self._slab(source, rows)
                        first = image * outputs + group * each
                        for output in k.spans(each, step):
                            with k.scope():
                                self._write_outputs(slab, own, kept, rows, output, first, group * each)

    def _slab(self, source: View, rows: Span) -> Slab:
        if self.fold:
            return load_folded(self.k, self.over, source, rows, self.x.dtype)
        return load_slab(self.k, self.over, source, rows, self.x.dtype, 0.0)

    def _weights(self, matrices: View, buffers: int) -> Block:
        """Weights [channels, window rows, window columns, outputs] as [128, chunks, positions, outputs]."""
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
        self, slab: Slab, matrices: View, kept: Block | None, rows: Span, output: Span, first: Affine, own: Affine
    ) -> None:
        k, (start, count) = self.k, output
        bias = self._column(self.bias, start + own, count)
        if kept is None:
            block = self._weights(matrices.cut(*((0, size) for size in matrices.shape[:3]), output), 2)
        else:
            block = kept
        at: Span = (start, count) if kept is not None else (0, count)
        shape = (rows[1], *self.over.places[1:])
        for starts, sizes in blocks(k, shape, self._widest()):
            with k.scope():
                made = k.tile(self.out, count, prod(sizes), buffers=2)
                for inner, some in blocks(k, sizes, _BANK):
                    with k.scope():
                        sums = k.psum(count, prod(some)).whole
                        here = tuple(one + other for one, other in zip(starts, inner, strict=True))
                        self._multiply(sums, slab, block, at, here, some)
                        dst = made.cut(count, (linear(inner, sizes), prod(some)))
                        self._bring(dst, sums, bias)
                place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                self.epilogue.store(made.whole, (start + first, count), (place, prod(sizes)))

    def _widest(self) -> int:
        """Positions of a result that are stored at once: the longest run for which the epilogue fits."""
        by_place = 2 * self.out.itemsize + epilogue_bytes(self.epilogue)
        return max(min(self.k.left(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def _column(self, view: View | None, start: Affine, count: int) -> Tile | float:
        if view is None:
            return 0.0
        column = self.k.tile(DType.FLOAT32, count, 1, buffers=2).whole
        self.k.copy(column, view.cut((start, count)).far())
        return column

    def _multiply(
        self, sums: Tile, slab: Slab, weights: Block, output: Span, starts: Starts, sizes: tuple[int, ...]
    ) -> None:
        k, lanes = self.k, self.weight.shape[1] * (self.over.window[0] if self.fold else 1)
        places = prod(slab.over.window)
        if not lanes:
            k.emit(Memset(engine=Engine.VECTOR, dst=sums, value=0.0))
        for chunk, depth in each_chunk(k, lanes):
            for number, at in each_place(k, slab.over.window):
                k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=sums,
                        stationary=weights.cut(depth, (chunk, 1), (number, 1), output),
                        moving=slab.shifted(depth, chunk, starts, sizes, at),
                        accumulate=chunk * places + number,
                    )
                )

    def _bring(self, dst: Tile, sums: Tile, bias: Tile | float) -> None:
        function = Function.COPY
        self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=function, bias=bias))

    # Channels by themselves

    def write_depthwise(self) -> None:
        k, channels, places = self.k, self.weight.shape[0], prod(self.over.window)
        with k.loop(self.x.shape[0]) as image:
            for first, count in k.spans(channels, PARTITIONS):
                with k.scope():
                    weight = k.tile(DType.FLOAT32, count, places, buffers=2)
                    by_channel = self.weight.pick(1, 0).cut((first, count))
                    k.copy(replace(weight, shape=self.over.window).whole, by_channel.far())
                    bias = self._column(self.bias, first, count)
                    source = self.x.pick(0, image).cut((first, count))
                    for rows in k.spans(self.over.places[0], self.rows):
                        with k.scope():
                            slab = load_slab(k, self.over, source, rows, DType.FLOAT32, 0.0)
                            self._fold(slab, weight, bias, rows, (image * channels + first, count))

    def _fold(self, slab: Slab, weight: Block, bias: Tile | float, rows: Span, lanes: Span) -> None:
        k, count = self.k, lanes[1]
        for starts, sizes in blocks(k, (rows[1], *self.over.places[1:]), self._widest() // 2):
            with k.scope():
                sums = k.tile(DType.FLOAT32, count, prod(sizes), buffers=2).whole
                k.emit(Memset(engine=Engine.VECTOR, dst=sums, value=0.0))
                for number, at in each_place(k, self.over.window):
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
                made = k.tile(self.out, count, prod(sizes), buffers=2).whole
                self._bring(made, sums, bias)
                place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                self.epilogue.store(made, lanes, (place, prod(sizes)))
