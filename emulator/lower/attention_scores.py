"""Attention scores of a head's rows: computed in PSUM, scaled and masked on the way to SBUF, and their softmax."""

from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.gpsimd import AffineSelect
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import (
    CopyPredicated,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
)
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.matmul.tiling import BANK
from nxpipe.emulator.lower.transpose import each_chunk, transpose_type
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import largest_finite
from nxpipe.emulator.ops import Attention

LOWEST: Final = -largest_finite(DType.FLOAT32)


@dataclass(frozen=True)
class Nowhere:
    """A boolean mask that is the same for all rows, as 0 and minus infinity. The tensor engine adds it to all rows as a
    product with ones, so that the vector engine does no work for it."""

    ones: Block
    row: Block

    @staticmethod
    def of(k: Kernel, op: Attention, dtype: DType, mask: View) -> "Nowhere | None":
        if mask.dtype is not DType.UINT8 or any(mask.strides[:-1]) or not op.scale > 0:
            return None
        made = DType.FLOAT32 if dtype in (DType.FLOAT32, DType.TFLOAT32) else DType.BFLOAT16
        keys = mask.shape[-1]
        looked, row, ones = k.tile(mask.dtype, 1, keys), k.tile(made, 1, keys), k.tile(made, 1, PARTITIONS)
        lowest = k.tile(made, 1, 1)
        k.copy(looked.whole, mask.pick(0, 0).pick(0, 0).cut((0, 1)).far())
        for tile, number in ((ones.whole, 1.0), (row.whole, 0.0), (lowest.whole, -float("inf"))):
            k.emit(Memset(engine=Engine.VECTOR, dst=tile, value=number))
        k.emit(
            CopyPredicated(
                engine=Engine.VECTOR,
                dst=row.whole,
                src=repeated(lowest.whole, keys),
                predicate=looked.whole,
                reverse=True,
            )
        )
        return Nowhere(ones, row)


@dataclass(frozen=True)
class Scores:
    """Scores of up to 128 rows of one head; all rows see the first `open_` keys."""

    k: Kernel
    op: Attention
    causal: bool
    buffers: int
    queries: Block  # [128 elements, chunks, heads, rows]
    elements: int
    query: Affine  # which of the heads
    head: Affine  # which of the key heads at hand
    rows: Span
    open_: int
    nowhere: Nowhere | None
    mask: View | None  # [rows, keys]
    masked: Block | None  # where it is at hand

    def column(self) -> Tile:
        return self.k.tile(DType.FLOAT32, self.rows[1], 1, buffers=2).whole

    def memset(self, dst: Tile, number: float) -> None:
        self.k.emit(Memset(engine=Engine.VECTOR, dst=dst, value=number))

    def combine(self, dst: Tile, left: Tile, op: Alu, right: Tile) -> None:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))

    def made(self, keys: Block, piece: Span) -> Block:
        """The scores, scaled and masked."""
        k, (_, size) = self.k, piece
        scores = k.tile(DType.FLOAT32, self.rows[1], size, buffers=self.buffers)
        mask = self._mask(piece)
        for start, width in k.spans(size, BANK):
            with k.scope():
                sums = k.psum(self.rows[1], width).whole
                self._multiply_keys(sums, keys, (start, width))
                self._add_nowhere(sums, affine(piece[0]) + start, width)
                self._scale(scores.cut(self.rows[1], (start, width)), sums, mask, (start, width))
        if mask is not None and mask.dtype is DType.UINT8:
            nowhere = repeated(self._filled(-float("inf")), size)
            k.emit(
                CopyPredicated(engine=Engine.VECTOR, dst=scores.whole, src=nowhere, predicate=mask.whole, reverse=True)
            )
        if self.causal:
            self._hide(scores, piece)
        return scores

    def _mask(self, piece: Span) -> Block | None:
        if self.mask is None or self.masked is not None:
            return self.masked
        block = self.k.tile(self.mask.dtype, self.rows[1], piece[1], buffers=2)
        self.k.copy(block.whole, self.mask.cut(self.rows, piece).far())
        return block

    def _filled(self, number: float) -> Tile:
        column = self.column()
        self.memset(column, number)
        return column

    def _multiply_keys(self, sums: Tile, keys: Block, some: Span) -> None:
        elements = self.elements
        if not elements:
            self.memset(sums, 0.0)
        for chunk, depth in each_chunk(self.k, elements):
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=self.queries.cut(depth, (chunk, 1), (self.query, 1)),
                    moving=keys.cut(depth, (chunk, 1), (self.head, 1), some),
                    accumulate=chunk,
                )
            )

    def _add_nowhere(self, sums: Tile, start: Affine, width: int) -> None:
        nowhere = self.nowhere
        if nowhere is not None:
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=nowhere.ones.cut(1, (0, self.rows[1])),
                    moving=nowhere.row.cut(1, (start, width)),
                    accumulate=Affine(1),
                )
            )

    def _scale(self, dst: Tile, sums: Tile, mask: Block | None, some: Span) -> None:
        """Scale on the scalar engine, which has time to spare; a mask needs the vector engine, because the scalar
        engine adds no tensors."""
        scale = self.op.scale
        if mask is None or mask.dtype is DType.UINT8:
            self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=Function.COPY, scale=scale))
            return
        right = mask.cut(self.rows[1], some)
        self.k.emit(
            ScalarTensorTensor(
                engine=Engine.VECTOR,
                dst=dst,
                src=sums,
                op0=Alu.MULTIPLY,
                operand0=scale,
                op1=Alu.ADD,
                right=right,
            )
        )

    def _hide(self, scores: Block, piece: Span) -> None:
        """Hide the keys behind a row's own position; those before the first row's position are seen by all."""
        start, size = piece
        seen = self.open_ if affine(start) == Affine() else 0
        if seen >= size:
            return
        hidden = scores.cut(self.rows[1], (seen, size - seen))
        self.k.emit(
            AffineSelect(
                engine=Engine.GPSIMD,
                dst=hidden,
                src=hidden,
                start=affine(self.rows[0]) + affine(start) * -1 + -seen,
                by_partition=1,
                steps=(-1,),
                compare=Alu.GREATER_EQUAL,
                otherwise=-float("inf"),
            )
        )

    def highest(self, scores: Block) -> Tile:
        column = self.column()
        self.k.emit(TensorReduce(engine=Engine.VECTOR, dst=column, src=scores.whole, op=Alu.MAXIMUM))
        return column

    def negative(self, highest: Tile) -> Tile:
        """The negated maximum. Where everything is masked a finite number replaces it: the exponentials are 0 with
        any."""
        column = self.column()
        self.k.emit(
            TensorScalar(
                engine=Engine.VECTOR,
                dst=column,
                src=highest,
                op0=Alu.MAXIMUM,
                operand0=LOWEST,
                op1=Alu.MULTIPLY,
                operand1=-1.0,
            )
        )
        return column

    def exponentials(self, scores: Block, negative: Tile, total: Tile | None) -> None:
        tile = scores.whole
        self.k.emit(
            Activation(engine=Engine.SCALAR, dst=tile, src=tile, function=Function.EXP, bias=negative, total=total)
        )

    def inverse(self, total: Tile) -> Tile:
        """The inverse of the sum. The highest score alone contributes 1; a smaller sum means that the row sees no key,
        and its probabilities stay 0."""
        least, inverse = self.column(), self.column()
        self.k.emit(TensorScalar(engine=Engine.VECTOR, dst=least, src=total, op0=Alu.MAXIMUM, operand0=1.0))
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=least))
        return inverse

    def probabilities(self, exponentials: Block, inverse: Tile) -> Block:
        """The probabilities, rounded to their type, in a form that can be transposed."""
        k, dtype, size = self.k, self.op.probabilities, exponentials.shape[0]
        buffers = self.buffers
        made = k.tile(dtype, self.rows[1], size, buffers=buffers)
        k.emit(
            TensorScalar(
                engine=Engine.VECTOR,
                dst=made.whole,
                src=exponentials.whole,
                op0=Alu.MULTIPLY,
                operand0=inverse,
            )
        )
        if transpose_type(dtype) is dtype:
            return made
        wide = k.tile(transpose_type(dtype), self.rows[1], size, buffers=buffers)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=wide.whole, src=made.whole))
        return wide
