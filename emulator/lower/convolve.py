"""Convolutions: for each place of the window a product of channels, all of them summed in PSUM.

Channels lie on the partitions, so a window's place is a shifted, strided pattern of what is in SBUF. Where channels are
few, the rows of the window lie on partitions beside them. Channels that do not mix are the vector engine's.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, ScalarTensorTensor
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.ending import Ending, room_of
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.turned import chunks_of, each_chunk
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.windows import (
    WIDEST,
    Slab,
    Starts,
    Windows,
    blocks,
    each_place,
    folded,
    linear,
    load_folded,
    load_slab,
    padded,
    windows,
)
from nxpipe.emulator.ops import Convolution

_BANK: Final = 512


@lowers(Convolution)
def _convolution(low: Lowering, node: Node, op: Convolution) -> None:
    x, weight = map(low.view, node.operands[:2])
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    places = node.result.type.shape[2:]
    ending = low.ending(node.result, prod(places))
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
    out = on_device(node.result.type.dtype)
    work = _Convolution(low.k, view, over, weight, bias, op.groups, fold, rows, ending, out)
    if depthwise:
        work.write_depthwise()
    else:
        work.write(low)


def slab_rows(room: int, over: Windows, by_place: int) -> int:
    """As many rows of results as there is room for what they need; one where there is room for none."""
    rows = over.places[0]
    while rows > 1 and prod(over.reach(rows)) * by_place > room:
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
    ending: Ending
    out: DType

    def write(self, low: Lowering) -> None:
        """Weights that fit stay for all of a batch."""
        k, (outputs, channels, *window) = self.k, self.weight.shape
        each = outputs // self.groups
        # Channels, and places of the window, as a matrix of each group's outputs for each.
        ordered = self.weight.transposed((*range(1, self.weight.rank), 0))
        shape = (channels, window[0], prod(window[1:]), outputs)
        matrices = ordered.reshaped(shape) or low.packed(ordered).reshaped(shape)
        assert matrices is not None  # packed windows are two axes
        lanes, places = (channels * window[0], prod(window[1:])) if self.fold else (channels, prod(window))
        with k.loop(self.groups) as group, k.room():
            own = matrices.cut((0, channels), (0, window[0]), (0, shape[2]), (group * each, each))
            room, by_output = k.left(Memory.SBUF) // 4, chunks_of(lanes) * places * own.dtype.itemsize
            kept = self._weights(own, 1) if by_output * each <= room else None
            step = PARTITIONS if kept else max(min(room // (2 * by_output), PARTITIONS), 1)
            with k.loop(self.x.shape[0]) as image:
                source = self.x.pick(0, image).cut((group * channels, channels))
                for rows in k.spans(self.over.places[0], self.rows):
                    with k.room():
                        slab = self._slab(source, rows)
                        first = image * outputs + group * each
                        for output in k.spans(each, step):
                            with k.room():
                                self._write_outputs(slab, own, kept, rows, output, first, group * each)

    def _slab(self, source: View, rows: Span) -> Slab:
        if self.fold:
            return load_folded(self.k, self.over, source, rows, self.x.dtype)
        return load_slab(self.k, self.over, source, rows, self.x.dtype, 0.0)

    def _weights(self, matrices: View, turns: int) -> Block:
        """Of [channels, rows of the window, places of a row, outputs], as [128, chunks, places, outputs]."""
        k, (channels, rows, places, outputs) = self.k, matrices.shape
        if self.fold:
            block = k.tile(matrices.dtype, channels * rows, 1, places, outputs, turns=turns)
            for row in range(rows):
                dst = block.cut((row * channels, channels), (0, 1))
                k.copy(replace(dst, axes=dst.axes[1:]), matrices.pick(1, row).far())
            return block
        block = k.tile(matrices.dtype, PARTITIONS, max(chunks_of(channels), 1), rows * places, outputs, turns=turns)
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
            with k.room():
                made = k.tile(self.out, count, prod(sizes), turns=2)
                for inner, some in blocks(k, sizes, _BANK):
                    with k.room():
                        sums = k.psum(count, prod(some)).whole
                        here = tuple(one + other for one, other in zip(starts, inner, strict=True))
                        self._multiply(sums, slab, block, at, here, some)
                        dst = made.cut(count, (linear(inner, sizes), prod(some)))
                        self._bring(dst, sums, bias)
                place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                self.ending.store(made.whole, (start + first, count), (place, prod(sizes)))

    def _widest(self) -> int:
        """Places of a result that are stored at once: as long a run as there is room for what follows."""
        by_place = 2 * self.out.itemsize + room_of(self.ending)
        return max(min(self.k.left(Memory.SBUF) * 3 // 4 // by_place, WIDEST), 1)

    def _column(self, view: View | None, start: Affine, count: int) -> Tile | float:
        if view is None:
            return 0.0
        column = self.k.tile(DType.FLOAT32, count, 1, turns=2).whole
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
                with k.room():
                    weight = k.tile(DType.FLOAT32, count, places, turns=2)
                    by_channel = self.weight.pick(1, 0).cut((first, count))
                    k.copy(replace(weight, shape=self.over.window).whole, by_channel.far())
                    bias = self._column(self.bias, first, count)
                    source = self.x.pick(0, image).cut((first, count))
                    for rows in k.spans(self.over.places[0], self.rows):
                        with k.room():
                            slab = load_slab(k, self.over, source, rows, DType.FLOAT32, 0.0)
                            self._fold(slab, weight, bias, rows, (image * channels + first, count))

    def _fold(self, slab: Slab, weight: Block, bias: Tile | float, rows: Span, lanes: Span) -> None:
        k, count = self.k, lanes[1]
        for starts, sizes in blocks(k, (rows[1], *self.over.places[1:]), self._widest() // 2):
            with k.room():
                sums = k.tile(DType.FLOAT32, count, prod(sizes), turns=2).whole
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
                made = k.tile(self.out, count, prod(sizes), turns=2).whole
                self._bring(made, sums, bias)
                place = linear((starts[0] + rows[0], *starts[1:]), self.over.places)
                self.ending.store(made, lanes, (place, prod(sizes)))
