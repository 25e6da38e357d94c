"""The tensor engine: matrix products and transposes. The vector engine transposes small tiles too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.constraints import InstructionContext, Rule, Violation, Violations, same_type, sized, typed
from nxpipe.emulator.isa.cost import ISSUE
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Tile

_MULTIPLIED: Final = (
    DType.FLOAT8_E4M3,
    DType.FLOAT8_E4M3FN,
    DType.FLOAT8_E5M2,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.TFLOAT32,
    DType.FLOAT32,
)
_FULL_PRECISION: Final = (DType.FLOAT32, DType.TFLOAT32)
_LARGEST_TRANSPOSE: Final = {Engine.TENSOR: 128, Engine.VECTOR: 32}


@dataclass(frozen=True, kw_only=True)
class Matmul(Instruction, name="nc_matmul"):
    """`dst` [M, N] in PSUM = transposed `stationary` [K, M] times `moving` [K, N]. If `accumulate` is above 0, the
    product is added to `dst`, where a matmul that does not accumulate must have begun the sum."""

    dst: Tile
    stationary: Tile
    moving: Tile
    accumulate: Affine = field(default=Affine())

    engines: ClassVar[Mapping[Engine, int]] = {Engine.TENSOR: 2}

    def reads_of_dst(self) -> tuple[str, ...]:
        return () if self.accumulate == Affine() else ("dst",)

    def violations(self, context: InstructionContext) -> Violations:
        core = context.core
        rows, columns = self.stationary.elements, self.moving.elements
        most = core.max_moving_free_fp32
        if self.dst.dtype is DType.BFLOAT16 and core.max_moving_free_bf16:
            most = core.max_moving_free_bf16
        if rows > core.max_stationary_free or columns > most:
            yield Violation(
                Rule.SHAPE,
                f"stationary has {rows} columns and moving {columns}",
                f"split them: {core.name} takes {core.max_stationary_free} and {most}",
            )
        if (self.stationary.start, self.stationary.partitions) != (self.moving.start, self.moving.partitions):
            yield Violation(
                Rule.SHAPE,
                f"stationary is in {self.stationary.partitions} partitions from {self.stationary.start} on, moving in "
                f"{self.moving.partitions} from {self.moving.start} on",
                "put them into the same partitions",
            )
        yield from sized("dst", self.dst, rows, columns)
        yield from typed("dst", self.dst, tuple(map(DType, core.psum_dtypes)))
        yield from typed("stationary", self.stationary, _MULTIPLIED)
        yield from typed("moving", self.moving, _MULTIPLIED)
        yield from _paired(self.stationary.dtype, self.moving.dtype)
        yield from context.bank(self.dst)
        yield from context.loops_exist(self.accumulate)

    def cycles(self, core: CoreSpec) -> float:
        slow = core.fp32_cycle_factor if DType.FLOAT32 in (self.stationary.dtype, self.moving.dtype) else 1
        return slow * max(min(ISSUE, self.stationary.elements), self.moving.elements)


def _paired(left: DType, right: DType) -> Violations:
    mixed = (left in _FULL_PRECISION) != (right in _FULL_PRECISION)
    if mixed or {left, right} == {DType.FLOAT8_E4M3, DType.FLOAT8_E4M3FN}:
        yield Violation(Rule.DTYPE, f"{left} is multiplied by {right}", "convert one of them first")


@dataclass(frozen=True, kw_only=True)
class NcTranspose(Instruction, name="nc_transpose"):
    """`dst` [F, P] = transposed `src` [P, F]: on the tensor engine up to 128 x 128 from SBUF into PSUM without a type
    conversion, on the vector engine up to 32 x 32 between any memories."""

    dst: Tile
    src: Tile

    engines: ClassVar[Mapping[Engine, int]] = {Engine.TENSOR: 2, Engine.VECTOR: 2}

    def violations(self, context: InstructionContext) -> Violations:
        most = _LARGEST_TRANSPOSE[self.engine]
        if self.src.partitions > most or self.src.elements > most:
            yield Violation(
                Rule.SHAPE,
                f"src is {self.src.partitions} x {self.src.elements}",
                f"use at most {most} x {most} on {self.engine}",
            )
        yield from sized("dst", self.dst, self.src.elements, self.src.partitions)
        if self.engine is Engine.TENSOR:
            yield from same_type("dst", self.dst, "src", self.src)
            wide = tuple(dtype for dtype in _MULTIPLIED if dtype.itemsize > 1)
            yield from typed("src", self.src, _MULTIPLIED if context.core.nki_gen < 3 else wide)
            yield from context.bank(self.dst)

    def cycles(self, core: CoreSpec) -> float:
        if self.engine is Engine.VECTOR:
            return max(ISSUE, self.src.elements)
        slow = core.fp32_cycle_factor if self.src.dtype is DType.FLOAT32 else 1
        return slow * max(self.src.partitions, min(ISSUE, self.src.elements))
