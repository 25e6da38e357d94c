"""Matrix products: rows of activations times a weight.

The tensor engine wants the summed axis on the partitions of both operands. A weight lies so already; rows are turned
there 128 x 128 elements at a time, kept for as long as there is room, and every weight passes by them once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from emulator.graph import Node
from emulator.isa.affine import Affine
from emulator.isa.instructions import Alu, Engine, Matmul, TensorCopy, TensorTensor
from emulator.isa.instructions import Transpose as Turned
from emulator.isa.operands import Memory
from emulator.lower.buffers import on_device
from emulator.lower.ending import Ending
from emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from emulator.lower.lowering import Lowering, lowers
from emulator.lower.view import View
from emulator.ops import Linear
from emulator.types import DType

_BANK: Final = 512  # float32 sums
_KEPT: Final = 0.5  # of the room that is left: what rows may take, so that weights and results find theirs


@lowers(Linear)
def _linear(low: Lowering, node: Node, op: Linear) -> None:
    x, weight = map(low.view, node.operands[:2])
    outputs, inputs = weight.shape
    rows = low.packed(x).reshaped((prod(x.shape[:-1]), inputs))
    if rows is None:
        raise AssertionError("packed rows are a matrix")
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    ending = low.ending(node.result, outputs)
    _Product(low.k, rows, weight.transposed((1, 0)), bias, ending, on_device(node.result.type.dtype)).write()


@dataclass(frozen=True)
class _Product:
    k: Kernel
    x: View  # [rows, inputs]
    weight: View  # [inputs, outputs]
    bias: View | None
    ending: Ending
    out: DType

    def write(self) -> None:
        k = self.k
        inputs, outputs = self.weight.shape
        chunks = -(-inputs // PARTITIONS)
        for top, height in k.spans(self.x.shape[0], self._rows_kept(chunks)):
            with k.room():
                turned = self._turned(top, height, chunks)
                for left, width in k.spans(outputs, self._width(chunks)):
                    with k.room():
                        weight, bias = self._weight(left, width, chunks), self._bias(left, width, height)
                        for row, count in k.spans(height, PARTITIONS):
                            with k.room():
                                made = self._piece(turned, weight, bias, (row, count))
                                self.ending.store(made.whole, (top + row, count), (left, width))

    def _rows_kept(self, chunks: int) -> int:
        most = int(self.k.left(Memory.SBUF) * _KEPT) // (chunks * self.x.dtype.itemsize)
        return max(most // PARTITIONS * PARTITIONS, PARTITIONS)

    def _width(self, chunks: int) -> int:
        """Of the columns of a weight that are at hand at once: two turns in half of what is left beside the rows."""
        most = int(self.k.left(Memory.SBUF) * _KEPT) // (2 * chunks * self.weight.dtype.itemsize)
        return max(min(most // 64 * 64, _BANK), 64)

    def _turned(self, top: Affine, height: int, chunks: int) -> Block:
        """Rows with their elements on the partitions: [128, chunks, rows]."""
        k, inputs = self.k, self.x.shape[1]
        turned = k.tile(self.x.dtype, PARTITIONS, chunks, height, turns=1)
        for row, count in k.spans(height, PARTITIONS):
            with k.room():
                straight = k.tile(self.x.dtype, count, inputs, turns=2)
                k.copy(straight.whole, self.x.cut((top + row, count)).far())
                for chunk, depth in _chunks(k, inputs):
                    with k.room():
                        passing = k.tile(self.x.dtype, depth, count, memory=Memory.PSUM, turns=2)
                        source = straight.cut(count, (chunk * PARTITIONS, depth))
                        k.emit(Turned(engine=Engine.TENSOR, dst=passing.whole, src=source))
                        place = turned.cut(depth, (chunk, 1), (row, count))
                        k.emit(TensorCopy(engine=Engine.VECTOR, dst=place, src=passing.whole))
        return turned

    def _weight(self, left: Affine, width: int, chunks: int) -> Block:
        k, inputs = self.k, self.weight.shape[0]
        block = k.tile(self.weight.dtype, PARTITIONS, chunks, width, turns=2)
        full, rest = divmod(inputs, PARTITIONS)
        columns = self.weight.cut((0, inputs), (left, width))
        if full:
            folded = columns.cut((0, full * PARTITIONS)).reshaped((full, PARTITIONS, width))
            assert folded is not None  # an axis in two always has strides
            k.copy(block.cut(PARTITIONS, (0, full)), folded.transposed((1, 0, 2)).far())
        if rest:
            k.copy(block.cut(rest, (full, 1)), columns.cut((full * PARTITIONS, rest)).far())
        return block

    def _bias(self, left: Affine, width: int, height: int) -> Block | None:
        """The same row on every partition."""
        if self.bias is None:
            return None
        rows = min(height, PARTITIONS)
        block = self.k.tile(self.bias.dtype, rows, width, turns=2)
        self.k.copy(block.whole, self.bias.cut((left, width)).broadcast((rows, width)).far())
        return block

    def _piece(self, turned: Block, weight: Block, bias: Block | None, rows: Span) -> Block:
        k, width = self.k, weight.shape[1]
        sums = k.psum(rows[1], width)
        for chunk, depth in _chunks(k, self.x.shape[1]):
            k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums.whole,
                    stationary=turned.cut(depth, (chunk, 1), rows),
                    moving=weight.cut(depth, (chunk, 1)),
                    accumulate=chunk,
                )
            )
        made = k.tile(self.out, rows[1], width, turns=2)
        if bias is None:
            k.emit(TensorCopy(engine=Engine.VECTOR, dst=made.whole, src=sums.whole))
        else:
            right = bias.cut(rows[1])
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=made.whole, left=sums.whole, right=right, op=Alu.ADD))
        return made


def _chunks(k: Kernel, size: int) -> Iterator[tuple[Affine, int]]:
    """The number of each chunk of a summed axis, and how much of it there is."""
    full, rest = divmod(size, PARTITIONS)
    if full:
        with k.loop(full) as chunk:
            yield chunk, PARTITIONS
    if rest:
        yield Affine(full), rest
