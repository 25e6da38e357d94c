"""Matrix products: rows of activations times a weight, alone or for each of a batch.

Rows are turned once and kept for as long as there is room, and every weight passes by them; `plan` says in which
pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from emulator.graph import Node
from emulator.isa.affine import Affine
from emulator.isa.instructions import Alu, Engine, Matmul, Memset, TensorCopy, TensorTensor
from emulator.isa.operands import Memory, Tile
from emulator.lower.buffers import on_device
from emulator.lower.ending import Ending
from emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from emulator.lower.lowering import Lowering, lowers
from emulator.lower.plan import BANK, Sizes, best, turns_of
from emulator.lower.turned import chunks_of, each_chunk, each_slab, load
from emulator.lower.view import View
from emulator.ops import Linear, MatMul
from emulator.types import DType


@lowers(Linear)
def _linear(low: Lowering, node: Node, op: Linear) -> None:
    x, weight = map(low.view, node.operands[:2])
    outputs, inputs = weight.shape
    rows = as_rows(low, x, prod(x.shape[:-1]), inputs)
    bias = low.view(node.operands[2]) if len(node.operands) > 2 else None
    ending = low.ending(node.result, outputs)
    Product(low.k, rows, weight.transposed((1, 0)), bias, ending, on_device(node.result.type.dtype)).write()


@lowers(MatMul)
def _matmul(low: Lowering, node: Node, op: MatMul) -> None:
    a, b = map(low.view, node.operands)
    *batch, rows, columns = node.result.type.shape
    inner = a.shape[-1]
    ending = low.ending(node.result, columns)
    out = on_device(node.result.type.dtype)
    if all(size == 1 for size in b.shape[:-2]):  # one weight for all
        together = as_rows(low, a.broadcast((*batch, rows, inner)), prod(batch) * rows, inner)
        weight = b.reshaped(b.shape[-2:])
        assert weight is not None  # axes of size 1 are always gone
        Product(low.k, together, weight, None, ending, out).write()
        return
    lefts, rights = a.broadcast((*batch, rows, inner)), b.broadcast((*batch, inner, columns))
    for at, (left, right) in each_of_batch(low.k, [lefts, rights], len(batch)):
        Product(low.k, left, right, None, ending, out, at * rows).write()


def as_rows(low: Lowering, view: View, rows: int, width: int) -> View:
    """As a matrix; packed where strides cannot say it."""
    made = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert made is not None  # packed rows are a matrix
    return made


def each_of_batch(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """The number of each combination of the leading axes, and what the views are there."""
    if not axes:
        yield Affine(), list(views)
        return
    size = views[0].shape[0]
    if not size:
        return
    with k.loop(size) as turn:
        for inner, inside in each_of_batch(k, [view.pick(0, turn) for view in views], axes - 1):
            yield turn * prod(views[0].shape[1:axes]) + inner, inside


@dataclass(frozen=True)
class Product:
    k: Kernel
    x: View  # [rows, summed]
    weight: View  # [summed, columns]
    bias: View | None
    ending: Ending
    out: DType
    first: Affine | int = 0  # row of what the ending sees

    def write(self) -> None:
        if not self.x.shape[0] or not self.weight.shape[1]:
            return
        if not self.x.shape[1]:
            self._write_empty_sums()
            return
        k, columns = self.k, self.weight.shape[1]
        sizes = Sizes(self.x, self.weight, self._by_column())
        pieces = best(k.core, k.left(Memory.SBUF), sizes)
        for top, height in k.spans(self.x.shape[0], pieces.height):
            with k.room():
                turned = k.tile(self.x.dtype, PARTITIONS, sizes.chunks, height)
                load(k, turned, self.x.cut((top, height)).transposed((1, 0)))
                for left, width in k.spans(columns, pieces.width):
                    with k.room():
                        bias = self._bias(left, width, height)
                        group = _Group(self, turned, bias, (top, height), (left, width))
                        if pieces.slab < sizes.chunks:
                            group.write_in_slabs(pieces.slab)
                        else:
                            group.write_at_once()

    def _write_empty_sums(self) -> None:
        k = self.k
        for row, count in k.spans(self.x.shape[0], PARTITIONS):
            for left, width in k.spans(self.weight.shape[1], BANK):
                with k.room():
                    made = k.tile(self.out, count, width, turns=2)
                    k.emit(Memset(engine=Engine.VECTOR, dst=made.whole, value=0.0))
                    bias = self._bias(left, width, count)
                    if bias is not None:
                        k.emit(TensorCopy(engine=Engine.VECTOR, dst=made.whole, src=bias.whole))
                    self.ending.store(made.whole, (row + self.first, count), (left, width))

    def _by_column(self) -> int:
        bias = 2 * self.bias.dtype.itemsize if self.bias else 0
        return bias + 2 * self.out.itemsize + room_of(self.ending)

    def _bias(self, left: Affine, width: int, height: int) -> Block | None:
        """The same row on every partition."""
        if self.bias is None:
            return None
        rows = min(height, PARTITIONS)
        block = self.k.tile(self.bias.dtype, rows, width, turns=2)
        self.k.copy(block.whole, self.bias.cut((left, width)).broadcast((rows, width)).far())
        return block


@dataclass(frozen=True)
class _Group:
    """The rows that are kept, times one block of the weight's columns."""

    product: Product
    turned: Block
    bias: Block | None
    rows: Span
    columns: Span

    @property
    def k(self) -> Kernel:
        return self.product.k

    def write_at_once(self) -> None:
        k, (height, width), depth = self.k, (self.rows[1], self.columns[1]), self.product.x.shape[1]
        weight = self._weight(Affine(), depth)
        for row, count in k.spans(height, PARTITIONS):
            with k.room():
                made = k.tile(self.product.out, count, width, turns=2)
                for column, some in k.spans(width, BANK):
                    with k.room():
                        sums = k.psum(count, some).whole
                        self._multiply(sums, weight, Affine(), (row, count), (column, some), depth)
                        self._bring(made.cut(count, (column, some)), sums, (column, some))
                self._store(made, (row, count))

    def write_in_slabs(self, slab: int) -> None:
        """All sums wait in PSUM until the last slab of the weight has passed; there are few, so they are written
        out."""
        k, (height, width) = self.k, (self.rows[1], self.columns[1])
        tiles = chunks_of(height)
        banks = -(-width // BANK)
        waiting = k.psum(min(height, PARTITIONS), tiles, banks, BANK, turns=turns_of(tiles * banks))
        for chunk, depth in each_slab(k, self.product.x.shape[1], slab):
            with k.room():
                weight = self._weight(chunk, depth)
                for tile in range(tiles):
                    row = (tile * PARTITIONS, min(height - tile * PARTITIONS, PARTITIONS))
                    for bank, wide in self._banks():
                        sums = waiting.cut(row[1], (tile, 1), (bank, 1), (0, wide))
                        self._multiply(sums, weight, chunk, row, (bank * BANK, wide), depth)
        for tile in range(tiles):
            with k.room():
                count = min(height - tile * PARTITIONS, PARTITIONS)
                made = k.tile(self.product.out, count, width, turns=2)
                for bank, some in self._banks():
                    sums = waiting.cut(count, (tile, 1), (bank, 1), (0, some))
                    self._bring(made.cut(count, (bank * BANK, some)), sums, (bank * BANK, some))
                self._store(made, (tile * PARTITIONS, count))

    def _banks(self) -> Iterator[tuple[int, int]]:
        """Number and width of each bank of sums."""
        return ((bank, min(self.columns[1] - bank * BANK, BANK)) for bank in range(-(-self.columns[1] // BANK)))

    def _weight(self, chunk: Affine, depth: int) -> Block:
        weight = self.product.weight
        block = self.k.tile(weight.dtype, PARTITIONS, chunks_of(depth), self.columns[1], turns=2)
        load(self.k, block, weight.cut((chunk * PARTITIONS, depth), self.columns))
        return block

    def _multiply(self, sums: Tile, weight: Block, first: Affine, row: Span, column: Span, depth: int) -> None:
        for chunk, deep in each_chunk(self.k, depth):
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=self.turned.cut(deep, (first + chunk, 1), row),
                    moving=weight.cut(deep, (chunk, 1), column),
                    accumulate=first + chunk,
                )
            )

    def _bring(self, dst: Tile, sums: Tile, column: Span) -> None:
        if self.bias is None:
            self.k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=sums))
        else:
            right = self.bias.cut(dst.partitions, column)
            self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=sums, right=right, op=Alu.ADD))

    def _store(self, made: Block, row: Span) -> None:
        product, (top, _) = self.product, self.rows
        product.ending.store(made.whole, (top + row[0] + product.first, row[1]), self.columns)


def room_of(ending: Ending) -> int:
    """Bytes that each column of a piece takes on its way to where it is stored."""
    return ending.chain.width if ending.chain.links else 0
