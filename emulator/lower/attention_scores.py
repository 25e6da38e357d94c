"""Attention scores of several heads' rows: matmuls into PSUM, scale and mask on the copy to SBUF, and the softmax."""

from dataclasses import dataclass, replace
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.gpsimd import AffineSelect
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
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
            k.emit(Memset(engine=Engine.GPSIMD, dst=tile, value=number))
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


def load_mask(k: Kernel, view: View) -> Block:
    """Load a mask [heads, rows, keys] as [rows, heads, keys]; one key if all share the mask."""
    heads, rows, keys = view.shape
    size = keys if view.strides[2] else 1
    block = k.tile(view.dtype, rows, heads, size, buffers=2)
    k.copy(block.whole, view.cut((0, heads), (0, rows), (0, size)).transposed((1, 0, 2)).far())
    return block


@dataclass(frozen=True)
class ScoreTile:
    """Scores [rows, heads, keys], masked. `scale` is not yet applied."""

    block: Block
    scale: float = 1.0


@dataclass(frozen=True)
class Scores:
    """Scores of up to 128 rows of several heads; every row sees the first `visible_keys` keys. If all keys of these
    heads fit a PSUM bank, their sums are masked as they are copied, or stay in PSUM without a mask."""

    k: Kernel
    op: Attention
    causal: bool
    buffers: int
    queries: Block  # [128 elements, chunks, heads, rows]
    elements: int
    query: Affine  # number of the first query head
    head: Affine  # number of the first key head among those in SBUF
    heads: int
    in_bank: bool
    rows: Span
    visible_keys: int
    masked_keys: MaskedKeys | None
    mask: View | None  # [heads, rows, keys]; the heads may share it
    loaded_mask: Block | None  # the mask in SBUF, if all heads share it

    def column(self) -> Block:
        return self.k.tile(DType.FLOAT32, self.rows[1], self.heads, buffers=2)

    def memset(self, dst: Tile, number: float) -> None:
        self.k.emit(Memset(engine=Engine.VECTOR, dst=dst, value=number))

    def combine(self, dst: Block, left: Block, op: Alu, right: Block) -> None:
        self.k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst.whole, left=left.whole, right=right.whole, op=op))

    def compute(self, keys: Block, piece: Span, first: Affine) -> ScoreTile:
        """Compute the scores of a piece of the keys, masked. Its first key is at a place of the tile of keys."""
        sums = self.k.tile(DType.FLOAT32, self.rows[1], self.heads, piece[1], buffers=self.buffers)
        self.start(sums, keys, piece, first)
        return self.masked(sums, piece)

    def start(self, sums: Block, keys: Block, piece: Span, first: Affine | int = 0) -> None:
        """Compute the scores of a piece of the keys: into a bank of PSUM, without mask and scale, or into SBUF."""
        k, (_, size) = self.k, piece
        if self.in_bank:
            self._multiply_keys(sums, keys, piece, (0, size))
            return
        mask = self._mask(piece)
        for start, width in k.spans(size, BANK):
            with k.scope():
                bank = k.psum(self.rows[1], self.heads, width)
                self._multiply_keys(bank, keys, piece, (start, width), first)
                place = sums.cut(self.rows[1], (0, self.heads), (start, width))
                self._scale(place, bank.whole, mask, (start, width))
        self._hide(sums, mask, size)
        if self._hides(piece):
            self._apply_causal_mask(sums, piece)

    def masked(self, sums: Block, piece: Span) -> ScoreTile:
        """The scores that `start` computed. Those in PSUM are masked as they are copied to SBUF, or stay there."""
        if not self.in_bank:
            return ScoreTile(sums)
        k, (_, size), scale = self.k, piece, self.op.scale
        mask, hides = self._mask(piece), self._hides(piece)
        if scale > 0 and mask is None and not hides:
            return ScoreTile(sums, scale)
        scores = k.tile(DType.FLOAT32, self.rows[1], self.heads, size, buffers=self.buffers)
        if scale > 0 and mask is not None and mask.dtype is DType.UINT8:
            predicate = self._repeated_mask(mask, (0, size))
            k.emit(Memset(engine=Engine.GPSIMD, dst=scores.whole, value=-float("inf")))
            k.emit(CopyPredicated(engine=Engine.VECTOR, dst=scores.whole, src=sums.whole, predicate=predicate))
        else:
            self._scale(scores.whole, sums.whole, mask, (0, size))
            self._hide(scores, mask, size)
            scale = 1.0
        if hides:
            self._apply_causal_mask(scores, piece)
        return ScoreTile(scores, scale)

    def _mask(self, piece: Span) -> Block | None:
        """The mask [rows, heads, keys] of a piece, with one head if the heads share it."""
        if self.mask is None or self.loaded_mask is not None:
            return self.loaded_mask
        heads = self.heads if self.mask.strides[0] else 1
        return load_mask(self.k, self.mask.cut((0, heads), self.rows, piece))

    def _repeated_mask(self, mask: Block, columns: Span) -> Tile:
        """The mask of some keys, repeated for the heads that share it."""
        heads, size = mask.shape
        start = columns[0] if size > 1 else 0
        tile = mask.cut(self.rows[1], (0, 1), (start, 1))
        axes = Axis(self.heads, size if heads > 1 else 0), Axis(columns[1], 1 if size > 1 else 0)
        return replace(tile, axes=axes)

    def _hide(self, scores: Block, mask: Block | None, size: int) -> None:
        """Replace the scores that a boolean mask hides by minus infinity."""
        if mask is None or mask.dtype is not DType.UINT8:
            return
        column = self.k.tile(DType.FLOAT32, self.rows[1], 1, buffers=2).whole
        self.memset(column, -float("inf"))
        self.k.emit(
            CopyPredicated(
                engine=Engine.VECTOR,
                dst=scores.whole,
                src=repeated(column, self.heads * size),
                predicate=self._repeated_mask(mask, (0, size)),
                reverse=True,
            )
        )

    def _multiply_keys(self, sums: Block, keys: Block, piece: Span, columns: Span, first: Affine | int = 0) -> None:
        elements = self.elements
        if not elements:
            self.memset(sums.whole, 0.0)
            return
        with self.k.loop(self.heads) as head:
            for chunk, depth in each_chunk(self.k, elements):
                self.k.emit(
                    Matmul(
                        engine=Engine.TENSOR,
                        dst=sums.cut(self.rows[1], (head, 1)),
                        stationary=self.queries.cut(depth, (chunk, 1), (self.query + head, 1)),
                        moving=keys.cut(
                            depth, (chunk, 1), (self.head + head, 1), (affine(first) + columns[0], columns[1])
                        ),
                        accumulate=chunk,
                    )
                )
        if self.masked_keys is not None:
            row = self.masked_keys.row.cut(1, (affine(piece[0]) + columns[0], columns[1]))
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums.whole,
                    stationary=self.masked_keys.ones.cut(1, (0, self.rows[1])),
                    moving=replace(row, axes=(Axis(self.heads, 0), *row.axes)),
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
        self.k.emit(
            ScalarTensorTensor(
                engine=Engine.VECTOR,
                dst=dst,
                src=sums,
                op0=Alu.MULTIPLY,
                operand0=scale,
                op1=Alu.ADD,
                right=self._repeated_mask(mask, columns),
            )
        )

    def _hides(self, piece: Span) -> bool:
        """True if the causal mask hides keys of a piece."""
        return self.causal and self._unmasked(piece) < piece[1]

    def _unmasked(self, piece: Span) -> int:
        """The number of keys at the beginning of a piece that every row sees."""
        return self.visible_keys if affine(piece[0]) == Affine() else 0

    def _apply_causal_mask(self, scores: Block, piece: Span) -> None:
        """Apply the causal mask. Keys before the first row's position need none, because every row sees them."""
        (start, size), unmasked = piece, self._unmasked(piece)
        hidden = scores.cut(self.rows[1], (0, self.heads), (unmasked, size - unmasked))
        self.k.emit(
            AffineSelect(
                engine=Engine.GPSIMD,
                dst=hidden,
                src=hidden,
                start=affine(self.rows[0]) + affine(start) * -1 + -unmasked,
                by_partition=1,
                steps=(0, -1),
                compare=Alu.GREATER_EQUAL,
                otherwise=-float("inf"),
            )
        )

    def highest(self, scores: ScoreTile) -> Block:
        column = self.column()
        self.k.emit(TensorReduce(engine=Engine.VECTOR, dst=column.whole, src=scores.block.whole, op=Alu.MAXIMUM))
        return column

    def negative(self, highest: Block, scale: float) -> Block:
        """The negated and scaled maximum. A row with every key masked has the maximum -inf, for which a finite number
        is used: its exponentials are 0 with any finite number, and NaN with infinity."""
        column = self.column()
        self.k.emit(
            TensorScalar(
                engine=Engine.VECTOR,
                dst=column.whole,
                src=highest.whole,
                op0=Alu.MAXIMUM,
                operand0=LOWEST / max(scale, 1.0),
                op1=Alu.MULTIPLY,
                operand1=-scale,
            )
        )
        return column

    def exponentials(self, scores: ScoreTile, negative: Block, total: Block | None) -> Block:
        """The exponentials, in place unless the scores are in PSUM."""
        k, rows, block = self.k, self.rows[1], scores.block
        if block.memory is Memory.PSUM:
            block = k.tile(DType.FLOAT32, rows, *block.shape, buffers=self.buffers)
        with k.loop(self.heads) as head:
            k.emit(
                Activation(
                    engine=Engine.SCALAR,
                    dst=block.cut(rows, (head, 1)),
                    src=scores.block.cut(rows, (head, 1)),
                    function=Function.EXP,
                    scale=scores.scale,
                    bias=negative.cut(rows, (head, 1)),
                    total=total.cut(rows, (head, 1)) if total else None,
                )
            )
        return block

    def rounded_exponentials(self, scores: ScoreTile, negative: Block, total: Block) -> Block:
        """The exponentials of one head, rounded to the type of probabilities, in a type that the tensor engine can
        transpose. Their sum is that of the numbers before they are rounded."""
        k, rows, dtype = self.k, self.rows[1], self.op.probabilities
        rounded = k.tile(dtype, rows, *scores.block.shape, buffers=self.buffers)
        k.emit(
            Activation(
                engine=Engine.SCALAR,
                dst=rounded.whole,
                src=scores.block.whole,
                function=Function.EXP,
                scale=scores.scale,
                bias=negative.whole,
                total=total.whole,
            )
        )
        return self._transposable(rounded)

    def inverse(self, total: Block) -> Block:
        """The inverse of the sum. The highest score contributes exp(0) = 1, so that a sum below 1 is the 0 of a row
        with every key masked. Raising it to 1 keeps that row's probabilities at 0."""
        at_least_one, inverse = self.column(), self.column()
        self.k.emit(
            TensorScalar(engine=Engine.VECTOR, dst=at_least_one.whole, src=total.whole, op0=Alu.MAXIMUM, operand0=1.0)
        )
        self.k.emit(Reciprocal(engine=Engine.VECTOR, dst=inverse.whole, src=at_least_one.whole))
        return inverse

    def probabilities(self, exponentials: Block, inverse: Block) -> Block:
        """The probabilities, rounded to their type, in a type that the tensor engine can transpose."""
        k, rows, dtype = self.k, self.rows[1], self.op.probabilities
        buffers = self.buffers
        rounded = k.tile(dtype, rows, *exponentials.shape, buffers=buffers)
        with k.loop(self.heads) as head:
            k.emit(
                TensorScalar(
                    engine=Engine.VECTOR,
                    dst=rounded.cut(rows, (head, 1)),
                    src=exponentials.cut(rows, (head, 1)),
                    op0=Alu.MULTIPLY,
                    operand0=inverse.cut(rows, (head, 1)),
                )
            )
        return self._transposable(rounded)

    def _transposable(self, rounded: Block) -> Block:
        k, dtype = self.k, transpose_type(rounded.dtype)
        if dtype is rounded.dtype:
            return rounded
        transposable = k.tile(dtype, self.rows[1], *rounded.shape, buffers=self.buffers)
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=transposable.whole, src=rounded.whole))
        return transposable
