"""Collectives: exchanges among the ranks of one program. DMA engines execute them, at the cost of a DMA, and over the
links between the chips of an instance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Final

from nxpipe.emulator.hardware.instance import INSTANCES, Instance
from nxpipe.emulator.hardware.links import link_gb_s, near_gb_s
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
from nxpipe.emulator.isa.cost import START_NS, is_dense, transfer_bytes
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


# Each exchange within one chip, measured (kiln, docs/neuron-notes.md): 12 all-reduces of 32 KB add 0.31 ms on trn1, and
# 0.175 ms to a single one on trn2. Trn3 is not measured: it has Trn2's figure.
_ON_CHIP_NS: Final = {"v2": 26_000.0, "v3": 16_000.0, "v4": 16_000.0}


@dataclass(frozen=True)
class Exchange:
    """The time until the last rank has received the first byte, and the time that the bytes take; in ns."""

    start: float
    takes: float


def exchange(instruction: Instruction, ranks: int, instance: Instance) -> Exchange:
    """The time of a collective of ranks on neighbouring cores. Every hop between chips starts a DMA; bytes go around a
    ring of chips over one link of each. An all-reduce is a reduce-scatter and an all-gather."""
    rounds = 2 if isinstance(instruction, CollectiveAllReduce) else 1
    chips, cores = ceil(ranks / instance.cores_per_chip), min(ranks, instance.cores_per_chip)
    sent = rounds * transfer_bytes(instruction)
    takes = sent * (cores - 1) / cores / near_gb_s(instance)
    if chips == 1:
        return Exchange(_ON_CHIP_NS[instance.core], takes)
    takes = max(takes, sent * (chips - 1) / chips / link_gb_s(instance))
    return Exchange(rounds * START_NS * (_hops(instance, chips) + min(cores - 1, 1)), takes)


def _hops(instance: Instance, chips: int) -> int:
    """Links between the two chips that are farthest from each other; both ways around are used."""
    match instance.topology:
        case "torus2d_4x4":
            return min(chips, 4) // 2 + ceil(chips / 4) // 2
        case "ring":
            return chips // 2
        case _:
            return 1


def instance_for(core: str, ranks: int) -> Instance:
    """The first instance type with enough cores of a generation; the largest if none has."""
    machines = [each for each in INSTANCES.values() if each.core == core]
    return next((each for each in machines if each.cores >= ranks), machines[-1])
