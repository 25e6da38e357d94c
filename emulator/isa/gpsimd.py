"""GpSimd: index patterns, gathers inside partitions, reductions across partitions. Some of `vector` runs here too."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.constraints import (
    InstructionContext,
    Rule,
    Violation,
    Violations,
    equal,
    operator,
    same_type,
    sized,
    typed,
    unequal,
)
from nxpipe.emulator.isa.cost import GPSIMD_START
from nxpipe.emulator.isa.instruction import BITS, COMPARISONS, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Tile

_GPSIMD: Final = {Engine.GPSIMD: 2}
_ACROSS_PARTITIONS: Final = frozenset({Alu.ADD, Alu.MAXIMUM, Alu.BITWISE_OR, Alu.BITWISE_AND})
_GATHERED_AT_ONCE: Final = 512


@dataclass(frozen=True, kw_only=True)
class IotaPattern(Instruction, name="iota"):
    """`start + p * by_partition + sum of index * step` over the axes of `dst`."""

    dst: Tile
    start: Affine
    by_partition: int
    steps: tuple[int, ...]

    engines: ClassVar[Mapping[Engine, int]] = _GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        yield from _pattern(self, context)

    def cycles(self, core: CoreSpec) -> float:
        return GPSIMD_START + self.dst.elements


@dataclass(frozen=True, kw_only=True)
class AffineSelect(Instruction, name="affine_select"):
    """`src` where `start + p * by_partition + sum of index * step` compared with 0 is true; `otherwise` elsewhere."""

    dst: Tile
    src: Tile
    start: Affine
    by_partition: int
    steps: tuple[int, ...]
    compare: Alu
    otherwise: float

    engines: ClassVar[Mapping[Engine, int]] = _GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)
        yield from operator("compare", self.compare, COMPARISONS)
        yield from _pattern(self, context)

    def cycles(self, core: CoreSpec) -> float:
        return GPSIMD_START + self.dst.elements


def _pattern(instruction: IotaPattern | AffineSelect, context: InstructionContext) -> Violations:
    """Check for one step for each axis, and for values that fit 32 bits in every iteration."""
    if len(instruction.steps) != len(instruction.dst.axes):
        yield Violation(
            Rule.SHAPE,
            f"{len(instruction.steps)} steps for {len(instruction.dst.axes)} axes",
            "give one step for each axis of dst",
        )
        return
    missing_loops = list(context.loops_exist(instruction.start))
    yield from missing_loops
    if not missing_loops:
        reach = [(instruction.dst.partitions - 1) * instruction.by_partition]
        reach += [(axis.size - 1) * step for axis, step in zip(instruction.dst.axes, instruction.steps, strict=True)]
        low, high = instruction.start.bounds(context.counts)
        low, high = low + sum(min(span, 0) for span in reach), high + sum(max(span, 0) for span in reach)
        if low < -(2**31) or high >= 2**31:
            yield Violation(Rule.VALUE, f"numbers from {low} to {high}", "stay within 32 bits")


@dataclass(frozen=True, kw_only=True)
class GatherFree(Instruction, name="nc_n_gather"):
    """`dst[p, i] = src[p, indices[p, i]]`: a gather inside each partition."""

    dst: Tile
    src: Tile
    indices: Tile

    engines: ClassVar[Mapping[Engine, int]] = _GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "indices", self.indices)
        yield from same_type("dst", self.dst, "src", self.src)
        yield from typed("indices", self.indices, (DType.UINT32,))
        if self.src.partitions != self.dst.partitions:
            yield unequal(f"dst has {self.dst.partitions} partitions, src {self.src.partitions}")

    def cycles(self, core: CoreSpec) -> float:
        return GPSIMD_START * ceil(self.dst.elements / _GATHERED_AT_ONCE) + self.dst.elements


@dataclass(frozen=True, kw_only=True)
class PartitionReduce(Instruction, name="tensor_partition_reduce"):
    """A reduction over all partitions into one partition."""

    dst: Tile
    src: Tile
    op: Alu

    engines: ClassVar[Mapping[Engine, int]] = _GPSIMD

    def violations(self, context: InstructionContext) -> Violations:
        yield from operator("op", self.op, _ACROSS_PARTITIONS)
        if self.op in BITS and (self.dst.dtype.is_float or self.src.dtype.is_float):
            types = f"{self.op} from {self.src.dtype} to {self.dst.dtype}"
            yield Violation(Rule.DTYPE, types, "bit operators take integers")
        yield from sized("dst", self.dst, 1, self.src.elements)

    def cycles(self, core: CoreSpec) -> float:
        return GPSIMD_START + self.src.partitions * self.src.elements
