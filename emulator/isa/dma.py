"""DMA queues: moves between HBM and SBUF, or from HBM to HBM. `emulator.isa.cost` has the rule for their cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from nxpipe.emulator.isa.constraints import (
    InstructionContext,
    Rule,
    Violation,
    Violations,
    length,
    same_type,
    sized,
    unequal,
)
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Place, Tile

TRANSPOSE_RATE: Final = 0.9  # of the rate of a copy


@dataclass(frozen=True, kw_only=True)
class DmaCopy(Instruction, name="dma_copy"):
    """A copy of elements in axis order; a tile's partition is its first axis. Types are converted through float32."""

    dst: Place
    src: Place

    engines: ClassVar[Mapping[Engine, int]] = dict.fromkeys(DMA_QUEUES, 2)

    def violations(self, context: InstructionContext) -> Violations:
        if length(self.dst) != length(self.src):
            yield unequal(f"dst has {length(self.dst)} elements, src {length(self.src)}")
        if all(isinstance(place, Far) and place.rows for place in (self.dst, self.src)):
            yield Violation(Rule.SHAPE, "both sides are indexed by row numbers", "copy through SBUF")


@dataclass(frozen=True, kw_only=True)
class DmaTranspose(Instruction, name="dma_transpose"):
    """A transpose of a matrix of 2-byte or 4-byte elements from HBM into SBUF; v3 and later."""

    dst: Tile
    src: Far

    engines: ClassVar[Mapping[Engine, int]] = dict.fromkeys(DMA_QUEUES, 3)
    # The DMA engine reorders elements itself, so only the contiguous bytes that it writes count.
    dma_rate: ClassVar[float] = TRANSPOSE_RATE
    dma_limited_by: ClassVar[tuple[str, ...]] = ("dst",)

    def violations(self, context: InstructionContext) -> Violations:
        yield from same_type("dst", self.dst, "src", self.src)
        if self.src.dtype.itemsize not in (2, 4):
            yield Violation(Rule.DTYPE, f"src is {self.src.dtype}", "use a type of 2 or 4 bytes")
        if len(self.src.axes) != 2 or self.src.rows:
            yield Violation(Rule.SHAPE, f"src has {len(self.src.axes)} axes", "transpose plain matrices")
        else:
            rows, columns = self.src.axes
            yield from sized("dst", self.dst, columns.size, rows.size)
