"""The vector engine: elementwise operators, reductions, scans, searches. Some run on `scalar` and `gpsimd` too."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from typing import ClassVar, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.constraints import (
    InstructionContext,
    Rule,
    Violation,
    Violations,
    bits,
    column,
    equal,
    one_in_sbuf,
    operator,
    same_type,
    sized,
    typed,
)
from nxpipe.emulator.isa.cost import GPSIMD_START, ISSUE, is_dense
from nxpipe.emulator.isa.instruction import BINARY, BITS, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Memory, Tile

_VECTOR: Final = {Engine.VECTOR: 2}
_VECTOR_AND_GPSIMD: Final = {Engine.VECTOR: 2, Engine.GPSIMD: 2}
_ALL_THREE: Final = {Engine.VECTOR: 2, Engine.SCALAR: 3, Engine.GPSIMD: 2}

_HALVES: Final = (DType.BFLOAT16, DType.FLOAT16)
_BYTES: Final = (DType.FLOAT8_E4M3, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
_PREDICATES: Final = (DType.UINT8, DType.UINT16, DType.UINT32, DType.BOOL)
_FLOAT_REDUCTIONS: Final = {Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY, Alu.MAXIMUM, Alu.MINIMUM}
_BIT_REDUCTIONS: Final = {Alu.BITWISE_AND, Alu.BITWISE_OR, Alu.BITWISE_XOR}
_LOGICAL: Final = {Alu.LOGICAL_AND, Alu.LOGICAL_OR, Alu.LOGICAL_XOR}
_REDUCTIONS: Final = frozenset(_FLOAT_REDUCTIONS | _LOGICAL | _BIT_REDUCTIONS)
_LARGEST: Final = {
    dtype: float(ml_dtypes.finfo(dtype.stored).max)  # type: ignore[no-untyped-call]
    for dtype in DType
    if dtype.is_float
}
_MOST_STATISTICS: Final = 512
_SEARCHED: Final = (8, 16384)


@dataclass(frozen=True, kw_only=True)
class TensorTensor(Instruction, name="tensor_tensor"):
    """`left op right`, elementwise: in float32; exactly for 32-bit integers on GpSimd; bit operators on raw bits."""

    dst: Tile
    left: Tile
    right: Tile
    op: Alu

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR_AND_GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "left", self.left)
        yield from equal("left", self.left, "right", self.right)
        yield from one_in_sbuf("left", self.left, "right", self.right)
        yield from operator("op", self.op, BINARY)
        yield from bits(self, self.op)
        if self.op is Alu.POWER and self.engine is not Engine.GPSIMD:
            yield Violation(Rule.OPERATOR, f"{self.engine} has no power of two tensors", "use gpsimd")

    def cycles(self, core: CoreSpec) -> float:
        n, all_three = self.left.elements, (self.dst, self.left, self.right)
        if self.engine is Engine.GPSIMD:
            return GPSIMD_START + 2 * n
        in_sbuf = self.left.memory is self.right.memory is Memory.SBUF
        plain_op = self.op in (Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY)
        plain = plain_op and all(tile.dtype is DType.BFLOAT16 and is_dense(tile.axes) for tile in all_three)
        fast = core.nki_gen > 2 and all(tile.dtype in _short(core) for tile in all_three)
        return max(ISSUE, n if not in_sbuf or plain or fast else 2 * n)


@dataclass(frozen=True, kw_only=True)
class TensorScalar(Instruction, name="tensor_scalar"):
    """`(src op0 operand0) op1 operand1`; an operand is a number or a column; reversed, the operand is on the left."""

    dst: Tile
    src: Tile
    op0: Alu
    operand0: float | Tile
    reverse0: bool = False
    op1: Alu | None = None
    operand1: float | Tile = 0.0
    reverse1: bool = False

    engines: ClassVar[Mapping[Engine, int]] = _ALL_THREE

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)
        yield from column("operand0", self.operand0, self.src)
        yield from column("operand1", self.operand1, self.src)
        if self.op1 is not None and (self.op0 in BITS) != (self.op1 in BITS):
            yield Violation(Rule.OPERATOR, f"op0 is {self.op0} and op1 is {self.op1}", "use two bit operators, or none")
        yield from bits(self, self.op0, self.op1)
        if self.engine is Engine.GPSIMD and (self.op0 is not Alu.RSQRT or self.op1 is not None):
            yield Violation(Rule.OPERATOR, f"op0 is {self.op0} on gpsimd", "use vector; gpsimd executes rsqrt only")
        if self.engine is Engine.SCALAR and context.core.nki_gen < 4:
            legal = ((Alu.MULTIPLY, Alu.ADD), (Alu.MULTIPLY, None), (Alu.ADD, None))
            if (self.op0, self.op1) not in legal or self.reverse0 or self.reverse1:
                yield Violation(
                    Rule.OPERATOR,
                    f"op0 is {self.op0} and op1 is {self.op1 or 'none'} on scalar",
                    f"use vector; scalar of {context.core.name} executes multiply, add, or multiply and add",
                )

    def cycles(self, core: CoreSpec) -> float:
        if self.engine is Engine.GPSIMD:
            return GPSIMD_START + 4 * self.src.elements
        return _one_input(self.engine, self.dst, self.src, core)


@dataclass(frozen=True, kw_only=True)
class ScalarTensorTensor(Instruction, name="scalar_tensor_tensor"):
    """`(src op0 operand0) op1 right`: a scalar and a tensor in one pass."""

    dst: Tile
    src: Tile
    op0: Alu
    operand0: float | Tile
    op1: Alu
    right: Tile
    reverse0: bool = False
    reverse1: bool = False

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)
        yield from equal("src", self.src, "right", self.right)
        yield from column("operand0", self.operand0, self.src)
        yield from one_in_sbuf("src", self.src, "right", self.right)
        yield from operator("op0", self.op0, frozenset(Alu) - BITS)
        yield from operator("op1", self.op1, BINARY - BITS)

    def cycles(self, core: CoreSpec) -> float:
        n = self.src.elements
        short = self.src.dtype is self.right.dtype is DType.BFLOAT16
        fast = short and self.op0 is Alu.SUBTRACT and self.op1 is Alu.MULTIPLY and n % 2 == 0
        return max(ISSUE, n if fast else 2 * n)


@dataclass(frozen=True, kw_only=True)
class TensorReduce(Instruction, name="tensor_reduce"):
    """A reduction over the last `axes` axes of `src`, in float32 or on bits."""

    dst: Tile
    src: Tile
    op: Alu
    axes: int = 1
    negate: bool = False

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from operator("op", self.op, _REDUCTIONS)
        yield from bits(self, self.op)
        if not 1 <= self.axes <= len(self.src.axes):
            yield Violation(Rule.SHAPE, f"{self.axes} of {len(self.src.axes)} axes are reduced", "reduce one or more")
            return
        result_size = 1
        for axis in self.src.axes[: len(self.src.axes) - self.axes]:
            result_size *= axis.size
        yield from sized("dst", self.dst, self.src.partitions, result_size)

    def cycles(self, core: CoreSpec) -> float:
        fast = self.src.dtype is self.dst.dtype is DType.BFLOAT16 and self.op in (Alu.ADD, Alu.MAXIMUM)
        return max(ISSUE, self.src.elements / 2 if fast else self.src.elements)


@dataclass(frozen=True, kw_only=True)
class TensorCopy(Instruction, name="tensor_copy"):
    """A copy, with conversion if the types differ."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = _ALL_THREE

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)

    def cycles(self, core: CoreSpec) -> float:
        if self.engine is Engine.GPSIMD:
            return GPSIMD_START + self.src.elements
        return _one_input(self.engine, self.dst, self.src, core)


@dataclass(frozen=True, kw_only=True)
class CopyPredicated(Instruction, name="tensor_copy_predicated"):
    """`dst` becomes `src` where the predicate is not 0 (with `reverse`, where it is 0), and is unchanged elsewhere."""

    dst: Tile
    src: Tile
    predicate: Tile
    reverse: bool = False

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR
    updates: ClassVar[tuple[str, ...]] = ("dst",)

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)
        yield from equal("src", self.src, "predicate", self.predicate)
        yield from same_type("dst", self.dst, "src", self.src)
        yield from typed("predicate", self.predicate, _PREDICATES)
        yield from one_in_sbuf("src", self.src, "predicate", self.predicate)

    def cycles(self, core: CoreSpec) -> float:
        in_sbuf = self.src.memory is self.predicate.memory is Memory.SBUF
        return max(ISSUE, 2 * self.src.elements if in_sbuf else self.src.elements)


@dataclass(frozen=True, kw_only=True)
class TensorTensorScan(Instruction, name="tensor_tensor_scan"):
    """`r[i] = (left[i] op0 r[i-1]) op1 right[i]` along the free axis, from `initial` on, in float32."""

    dst: Tile
    left: Tile
    right: Tile
    initial: float | Tile
    op0: Alu
    op1: Alu

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "left", self.left)
        yield from equal("left", self.left, "right", self.right)
        yield from column("initial", self.initial, self.left)
        yield from one_in_sbuf("left", self.left, "right", self.right)
        yield from operator("op0", self.op0, BINARY - BITS)
        yield from operator("op1", self.op1, BINARY - BITS)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, 2 * self.left.elements)


@dataclass(frozen=True, kw_only=True)
class Memset(Instruction, name="memset"):
    """`value` in every element."""

    dst: Tile
    value: float

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR_AND_GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        if not _fits(self.value, self.dst.dtype):
            yield Violation(Rule.VALUE, f"{self.dst.dtype} does not hold {self.value}", "use another value or type")

    def cycles(self, core: CoreSpec) -> float:
        n = self.dst.elements
        if self.engine is Engine.GPSIMD:
            return GPSIMD_START + n
        return max(ISSUE, n / 2 if self.value == 0 and self.dst.dtype in _HALVES else n)


@dataclass(frozen=True, kw_only=True)
class Reciprocal(Instruction, name="reciprocal"):
    """1/x in full float32 precision."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, 8 * self.src.elements)


@dataclass(frozen=True, kw_only=True)
class BnStats(Instruction, name="bn_stats"):
    """Count, mean, and variance times count of the elements at even indices, then of those at odd indices."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        n = self.src.elements
        if n > _MOST_STATISTICS:
            yield Violation(Rule.SHAPE, f"src has {n} elements", f"split it into pieces of {_MOST_STATISTICS}")
        yield from sized("dst", self.dst, self.src.partitions, 6)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, self.src.elements)


@dataclass(frozen=True, kw_only=True)
class BnAggregate(Instruction, name="bn_aggr"):
    """Mean and variance of the elements of several `bn_stats`."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        if self.src.elements % 3:
            yield Violation(Rule.SHAPE, f"src has {self.src.elements} elements", "pass whole triples of bn_stats")
        yield from sized("dst", self.dst, self.src.partitions, 2)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, 13 * self.src.elements / 3)


@dataclass(frozen=True, kw_only=True)
class Max8(Instruction, name="max8"):
    """The eight largest elements of each partition, descending."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from _searched(self.src)
        if len(self.src.axes) > 2:
            yield Violation(Rule.AXES, f"src has {len(self.src.axes)} free axes", "use up to 2")
        yield from sized("dst", self.dst, self.src.partitions, 8)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, self.src.elements)


@dataclass(frozen=True, kw_only=True)
class FindIndex8(Instruction, name="nc_find_index8"):
    """The index of each of eight values' first match; equal values take successive matches, absent values give -1."""

    dst: Tile
    src: Tile
    values: Tile

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from _searched(self.src)
        yield from sized("values", self.values, self.src.partitions, 8)
        yield from sized("dst", self.dst, self.src.partitions, 8)
        yield from typed("dst", self.dst, (DType.UINT16, DType.UINT32))

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, self.src.elements)


@dataclass(frozen=True, kw_only=True)
class MatchReplace8(Instruction, name="nc_match_replace8"):
    """`src` with the first match of each of eight values replaced by `number`."""

    dst: Tile
    src: Tile
    values: Tile
    number: float

    engines: ClassVar[Mapping[Engine, int]] = _VECTOR

    def violations(self, context: InstructionContext) -> Violations:
        yield from _searched(self.src)
        yield from sized("values", self.values, self.src.partitions, 8)
        yield from equal("dst", self.dst, "src", self.src)

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, self.src.elements)


def _one_input(engine: Engine, dst: Tile, src: Tile, core: CoreSpec) -> float:
    """Cycles of one pass; some engines process several short floats in a cycle."""
    per_cycle = 1
    if engine is Engine.SCALAR:
        per_cycle = 2 if core.nki_gen > 3 and all(tile.dtype in _HALVES for tile in (dst, src)) else 1
    elif core.nki_gen > 2 and all(tile.dtype in _short(core) for tile in (dst, src)):
        per_cycle = 4 if all(is_dense(tile.axes) and tile.memory is Memory.SBUF for tile in (dst, src)) else 2
    return max(ISSUE, src.elements / per_cycle)


def _short(core: CoreSpec) -> tuple[DType, ...]:
    return (*_HALVES, *_BYTES) if core.nki_gen > 3 else _HALVES


def _searched(src: Tile) -> Violations:
    if not _SEARCHED[0] <= src.elements <= _SEARCHED[1]:
        yield Violation(Rule.SHAPE, f"src has {src.elements} elements", f"search {_SEARCHED[0]} to {_SEARCHED[1]}")


def _fits(value: float, dtype: DType) -> bool:
    if dtype is DType.BOOL:
        return value in (0, 1)
    if dtype.is_float:
        return not isfinite(value) or abs(value) <= _LARGEST[dtype]
    info = np.iinfo(dtype.stored)
    return not isnan(value) and bool(info.min <= value <= info.max) and value == int(value)
