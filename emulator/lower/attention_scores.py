"""Attention scores of a head's rows: matmuls into PSUM, scale and mask on the copy to SBUF, and the softmax."""

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
_FULL: Final = (DType.FLOAT32, DType.TFLOAT32)


def is_matched(op: Attention, values: DType) -> bool:
    """True if probabilities and values can be multiplied in their own types; otherwise both are float32."""
    return (op.probabilities in _FULL) == (values in _FULL)


@dataclass(frozen=True)
class MaskedKeys:
    """A boolean mask that all rows share, as a row of 0 and minus infinity.

    The tensor engine accumulates the product of a column of ones and this row onto the scores. That adds the row to all
    rows without work for the vector engine."""

    ones: Block
    row: Block

    @staticmethod
    def of(k: Kernel, op: Attention, dtype: DType, mask: View) -> "MaskedKeys | None":
        if mask.dtype is not DType.UINT8 or any(mask.strides[:-1]) or not op.scale > 0:
            return None
        mask_type = DType.FLOAT32 if dtype in (DType.FLOAT32, DType.TFLOAT32) else DType.BFLOAT16
        keys = mask.shape[-1]
        bytes_tile, row, ones = (
            k.tile(mask.dtype, 1, keys),
            k.tile(mask_type, 1, keys),
            k.tile(mask_type, 1, PARTITIONS),
        )
        minus_infinity = k.tile(mask_type, 1, 1)
        k.copy(bytes_tile.whole, mask.pick(0, 0).pick(0, 0).cut((0, 1)).far())
        for tile, number in ((ones.whole, 1.0), (row.whole, 0.0), (minus_infinity.whole, -float("inf"))):
            k.emit(Memset(engine=Engine.VECTOR, dst=tile, value=number))
        k.emit(
            CopyPredicated(
                engine=Engine.VECTOR,
                dst=row.whole,
                src=repeated(minus_infinity.whole, keys),
                predicate=bytes_tile.whole,
                reverse=True,
            )
        )
        return MaskedKeys(ones, row)


@dataclass(frozen=True)
class Scores:
    """Scores of up to 128 rows of one head; every row sees the first `visible_keys` keys."""

    k: Kernel
    op: Attention
    causal: bool
    buffers: int
    queries: Block  # [128 elements, chunks, heads, rows]
    elements: int
    query: Affine  # number of the query head
    head: Affine  # number of the key head among those in SBUF
    rows: Span
    visible_keys: int
    masked_keys: MaskedKeys | None
    mask: View | None  # [rows, keys]
    loaded_mask: Block | None  # the mask in SBUF, if the heads share it

    def column(self) -> Tile:
        return self.k.tile(DType.FLOAT32, self.rows[1], 1, buffers=2).whole

    def memset(self, dst: Tile, number: float) -> None:
        self.k.emit(Memset(engine=Engine.VECTOR, dst=dst, value=number))

    def combine(self, dst: Tile, left: Tile, op: Alu, right: Tile) -> None:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=op))

    def compute(self, keys: Block, piece: Span) -> Block:
        """Compute the scores of a piece of the keys, scaled and masked."""
        k, (_, size) = self.k, piece
        scores = k.tile(DType.FLOAT32, self.rows[1], size, buffers=self.buffers)
        mask = self._mask(piece)
        for start, width in k.spans(size, BANK):
            with k.scope():
                sums = k.psum(self.rows[1], width).whole
                self._multiply_keys(sums, keys, (start, width))
                self._add_masked_keys(sums, affine(piece[0]) + start, width)
                self._scale(scores.cut(self.rows[1], (start, width)), sums, mask, (start, width))
        if mask is not None and mask.dtype is DType.UINT8:
            minus_infinity = repeated(self._column_of(-float("inf")), size)
            k.emit(
                CopyPredicated(
                    engine=Engine.VECTOR, dst=scores.whole, src=minus_infinity, predicate=mask.whole, reverse=True
                )
            )
        if self.causal:
            self._apply_causal_mask(scores, piece)
        return scores

    def _mask(self, piece: Span) -> Block | None:
        if self.mask is None or self.loaded_mask is not None:
            return self.loaded_mask
        block = self.k.tile(self.mask.dtype, self.rows[1], piece[1], buffers=2)
        self.k.copy(block.whole, self.mask.cut(self.rows, piece).far())
        return block

    def _column_of(self, number: float) -> Tile:
        column = self.column()
        self.memset(column, number)
        return column

    def _multiply_keys(self, sums: Tile, keys: Block, columns: Span) -> None:
        elements = self.elements
        if not elements:
            self.memset(sums, 0.0)
        for chunk, depth in each_chunk(self.k, elements):
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=self.queries.cut(depth, (chunk, 1), (self.query, 1)),
                    moving=keys.cut(depth, (chunk, 1), (self.head, 1), columns),
                    accumulate=chunk,
                )
            )

    def _add_masked_keys(self, sums: Tile, start: Affine, width: int) -> None:
        masked_keys = self.masked_keys
        if masked_keys is not None:
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=masked_keys.ones.cut(1, (0, self.rows[1])),
                    moving=masked_keys.row.cut(1, (start, width)),
                    accumulate=Affine(1),
                )
            )

    def _scale(self, dst: Tile, sums: Tile, mask: Block | None, columns: Span) -> None:
        """Copy scores from PSUM with the scale: on the scalar engine, which is less busy. A float mask needs the vector
        engine, because the scalar engine cannot add tensors."""
        scale = self.op.scale
        if mask is None or mask.dtype is DType.UINT8:
            self.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=sums, function=Function.COPY, scale=scale))
            return
        right = mask.cut(self.rows[1], columns)
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

    def _apply_causal_mask(self, scores: Block, piece: Span) -> None:
        """Apply the causal mask. Keys before the first row's position need none, because every row sees them."""
        start, size = piece
        unmasked = self.visible_keys if affine(start) == Affine() else 0
        if unmasked >= size:
            return
        hidden = scores.cut(self.rows[1], (unmasked, size - unmasked))
        self.k.emit(
            AffineSelect(
                engine=Engine.GPSIMD,
                dst=hidden,
                src=hidden,
                start=affine(self.rows[0]) + affine(start) * -1 + -unmasked,
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
        """The negated maximum. A row with every key masked has the maximum -inf, for which a finite number is used: its
        exponentials are 0 with any finite number, and NaN with infinity."""
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
        """The inverse of the sum. The highest score contributes exp(0) = 1, so that a sum below 1 is the 0 of a row
        with every key masked. Raising it to 1 keeps that row's probabilities at 0."""
        at_least_one, inverse = self.column(), self.column()
        self.k.emit(TensorScalar(engine=Engine.VECTOR, dst=at_least_one, src=total, op0=Alu.MAXIMUM, operand0=1.0))
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse, src=at_least_one))
        return inverse

    def probabilities(self, exponentials: Block, inverse: Tile) -> Block:
        """The probabilities, rounded to their type, in a type that the tensor engine can transpose."""
        k, dtype, size = self.k, self.op.probabilities, exponentials.shape[0]
        buffers = self.buffers
        rounded = k.tile(dtype, self.rows[1], size, buffers=buffers)
        k.emit(
            TensorScalar(
                engine=Engine.VECTOR,
                dst=rounded.whole,
                src=exponentials.whole,
                op0=Alu.MULTIPLY,
                operand0=inverse,
            )
        )
        if transpose_type(dtype) is dtype:
            return rounded
        transposable = k.tile(transpose_type(dtype), self.rows[1], size, buffers=buffers)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=transposable.whole, src=rounded.whole))
        return transposable
