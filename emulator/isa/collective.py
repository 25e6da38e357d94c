"""Collectives: exchanges among the ranks of one program. DMA engines execute them, at the cost of a DMA."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from nxpipe.emulator.isa.constraints import (
    InstructionContext,
    Rule,
    Violation,
    Violations,
    length,
    operator,
    same_type,
    unequal,
)
from nxpipe.emulator.isa.cost import is_dense
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Place, Tile

_COLLECTIVE: Final = {Engine.COLLECTIVE: 2}
_ACROSS_RANKS: Final = frozenset({Alu.ADD, Alu.MINIMUM, Alu.MAXIMUM})


@dataclass(frozen=True, kw_only=True)
class CollectiveAllReduce(Instruction, name="all_reduce"):
    """`op` over the `src` of all ranks, in rank order and in float32; every rank receives the result."""

    dst: Place
    src: Place
    op: Alu = Alu.ADD

    engines: ClassVar[Mapping[Engine, int]] = _COLLECTIVE

    def violations(self, context: InstructionContext) -> Violations:
        yield from _exchanged(("dst", self.dst), ("src", self.src), 1)
        yield from operator("op", self.op, _ACROSS_RANKS)


@dataclass(frozen=True, kw_only=True)
class CollectiveReduceScatter(Instruction, name="reduce_scatter"):
    """An all-reduce whose result is split into one equal part for each rank; each rank receives its own part."""

    dst: Place
    src: Place
    op: Alu = Alu.ADD

    engines: ClassVar[Mapping[Engine, int]] = _COLLECTIVE

    def violations(self, context: InstructionContext) -> Violations:
        yield from _exchanged(("src", self.src), ("dst", self.dst), context.ranks)
        yield from operator("op", self.op, _ACROSS_RANKS)


@dataclass(frozen=True, kw_only=True)
class CollectiveAllGather(Instruction, name="all_gather"):
    """The `src` of all ranks, concatenated in rank order; every rank receives the result."""

    dst: Place
    src: Place

    engines: ClassVar[Mapping[Engine, int]] = _COLLECTIVE

    def violations(self, context: InstructionContext) -> Violations:
        yield from _exchanged(("dst", self.dst), ("src", self.src), context.ranks)


def _exchanged(long: tuple[str, Place], short: tuple[str, Place], times: int) -> Violations:
    """Check that both operands are contiguous, in HBM or in each partition, and that `long` is `times` as long."""
    yield from same_type("dst", long[1], "src", short[1])
    sizes = [length(place) for _, place in (long, short)]
    if sizes[0] != sizes[1] * times:
        remedy = f"make {long[0]} {times} times as long"
        yield Violation(Rule.SHAPE, f"{long[0]} has {sizes[0]} elements, {short[0]} {sizes[1]}", remedy)
    shapes = {(type(place), place.partitions if isinstance(place, Tile) else 1) for _, place in (long, short)}
    if len(shapes) > 1:
        yield unequal("dst and src differ in memory or partitions")
    for name, place in (long, short):
        if (isinstance(place, Far) and place.rows) or not is_dense(place.axes):
            yield Violation(Rule.SHAPE, f"{name} is not contiguous", "exchange contiguous elements")
