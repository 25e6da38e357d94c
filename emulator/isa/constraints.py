"""Constraints on instructions: the rules, violations with a remedy, and the checks that instructions share.

An `InstructionContext` checks each operand for all iterations of the enclosing loops at once, by the bounds of affine
addresses. The functions below it check operands against each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import BITS, DMA_QUEUES, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, extent
from nxpipe.emulator.isa.program import Buffer


class Rule(StrEnum):
    """The rules of the table in docs/reference/isa.md."""

    PARTITION = "partition"
    START = "start"
    AXES = "axes"
    SIZE = "size"
    BOUNDS = "bounds"
    ALIGNMENT = "alignment"
    BANK = "bank"
    DTYPE = "dtype"
    ENGINE = "engine"
    MEMORY = "memory"
    SHAPE = "shape"
    OPERATOR = "operator"
    VALUE = "value"
    GENERATION = "generation"
    LOOP = "loop"
    WAIT = "wait"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Violation:
    """A violated rule: the finding with its numbers, and the remedy."""

    rule: Rule
    what: str
    remedy: str


@dataclass(frozen=True)
class Fault:
    """A violation and its location: `number` is the instruction's index in the text; None for the buffer table."""

    violation: Violation
    number: int | None = None
    instruction: str = ""
    note: str = ""

    @property
    def rule(self) -> Rule:
        return self.violation.rule

    def __str__(self) -> str:
        where = "" if self.number is None else f"instruction {self.number} ({self.instruction}): "
        place = f", at {self.note if self.note.isprintable() else repr(self.note)}" if self.note else ""
        return f"{where}{self.violation.what}{place}; {self.violation.remedy}"


class ProgramInvalid(CompileError):
    """A program that its core cannot execute."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"the program is not legal{more}: {faults[0]}")


Violations = Iterator[Violation]

MOST_AXES = 4
MOST_SIZE = 2**16 - 1
STRIDES = (-(2**15), 2**15 - 1)
MOST_ELEMENTS = {Memory.SBUF: 65536, Memory.PSUM: 4096}
WIDE = (DType.INT64, DType.UINT64)

# The legal first partitions, by the number of partitions that an instruction uses.
STARTS = ((32, (0, 32, 64, 96)), (64, (0, 64)), (128, (0,)))


@dataclass(frozen=True)
class InstructionContext:
    """The context of an instruction: its core, the program's buffers and ranks, the counts of the enclosing loops."""

    core: CoreSpec
    buffers: Sequence[Buffer]
    ranks: int
    counts: tuple[int, ...]

    def violations(self, place: Place, engine: Engine) -> Violations:
        if place.dtype in WIDE:
            yield Violation(Rule.DTYPE, f"the core has no {place.dtype}", "narrow it to 32 bits")
        if place.dtype is DType.FLOAT8_E4M3FN and self.core.nki_gen < 4:
            yield Violation(
                Rule.DTYPE,
                f"{self.core.name} has no {place.dtype}, new in v4",
                "use float8_e4m3 or bfloat16",
            )
        if isinstance(place, Tile):
            yield from self._tile(place, engine)
        else:
            yield from self._far(place)

    def loops_exist(self, value: Affine) -> Violations:
        """Check that the loops whose indices the value uses enclose the instruction."""
        if value.depth > len(self.counts):
            yield Violation(
                Rule.LOOP,
                f"i{value.depth - 1} is used inside {len(self.counts)} loops",
                "use the indices of the enclosing loops",
            )
        if any(rotation.count < 1 for rotation in value.rotations):
            yield Violation(Rule.LOOP, "a rotating buffer has no copies", "use one copy or more")

    def _tile(self, tile: Tile, engine: Engine) -> Violations:
        lanes, start = tile.partitions, tile.start
        is_dma = engine in DMA_QUEUES
        if lanes < 1 or start < 0 or start + lanes > self.core.partitions:
            yield Violation(
                Rule.PARTITION,
                f"partitions {start} up to {start + lanes} of {self.core.partitions}",
                "use 1 to 128 partitions, from 0 on",
            )
        elif not is_dma and start not in starts(lanes):
            yield Violation(
                Rule.START,
                f"{lanes} partitions begin at {start}",
                f"begin at {' or '.join(map(str, starts(lanes)))}, or use fewer partitions",
            )
        yield from _axes(tile.axes)
        if engine in _STREAMING and tile.elements > MOST_ELEMENTS[tile.memory]:
            yield Violation(
                Rule.SIZE,
                f"{tile.elements} elements in each partition; an instruction may access {MOST_ELEMENTS[tile.memory]} "
                f"in {tile.memory}",
                "split the free axes",
            )
        size = tile.dtype.itemsize
        if size > 1 and _misaligned(tile.offset, size):
            yield Violation(
                Rule.ALIGNMENT,
                f"the offset is not always a multiple of {size} bytes, an element of {tile.dtype}",
                "align the tile",
            )
        yield from self._within(tile.offset, tile.reach, self._bytes(tile.memory), f"a partition of {tile.memory}")

    def _far(self, far: Far) -> Violations:
        if not 0 <= far.buffer < len(self.buffers):
            yield Violation(Rule.BUFFER, f"there is no buffer {far.buffer}", f"the program has {len(self.buffers)}")
            return
        buffer = self.buffers[far.buffer]
        if len(far.axes) > MOST_AXES or any(axis.size < 1 for axis in far.axes):
            yield Violation(
                Rule.AXES,
                f"a pattern in HBM with axes of {[axis.size for axis in far.axes]}",
                f"use up to {MOST_AXES} axes of at least 1",
            )
        size = far.dtype.itemsize
        if buffer.address % size:
            yield Violation(
                Rule.ALIGNMENT,
                f"{named(buffer)} has the address {buffer.address}, which is not a multiple of {size} bytes",
                "align the buffer",
            )
        if far.rows is not None:
            yield from self._rows(far, far.rows)
        low, high = extent(far.axes[1:] if far.rows is not None else far.axes)
        yield from self._within(far.offset * size, (low * size, (high + 1) * size), buffer.nbytes, named(buffer))

    def _rows(self, far: Far, rows: Tile) -> Violations:
        yield from self._tile(rows, DMA_QUEUES[0])
        if rows.dtype is not DType.UINT32 or rows.memory is not Memory.SBUF:
            yield Violation(Rule.DTYPE, f"row numbers are {rows.dtype} in {rows.memory}", "give them as uint32 in SBUF")
        if rows.elements != 1 or not far.axes or rows.partitions != far.axes[0].size:
            first = far.axes[0].size if far.axes else 0
            yield Violation(
                Rule.SHAPE,
                f"{rows.partitions} x {rows.elements} row numbers for a first axis of {first}",
                "put one row number in each partition, as many as the first axis is long",
            )

    def _within(self, offset: Affine, reach: tuple[int, int], limit: int, where: str) -> Violations:
        missing_loops = list(self.loops_exist(offset))
        if missing_loops:
            yield from missing_loops
            return
        low, high = offset.bounds(self.counts)
        if low + reach[0] < 0 or high + reach[1] > limit:
            yield Violation(
                Rule.BOUNDS,
                f"bytes {low + reach[0]} up to {high + reach[1]} of {where}, of which a program may use {limit}",
                "make the tile smaller, or move it",
            )

    def _bytes(self, memory: Memory) -> int:
        return self.core.sbuf_usable if memory is Memory.SBUF else self.core.psum

    def bank(self, tile: Tile) -> Violations:
        """Check that sums stay inside a PSUM bank; they begin at a bank if a matmul may be wider than a bank."""
        if tile.offset.depth > len(self.counts):
            return  # reported by `loops_exist`
        bank, reach = self.core.psum_bank, tile.reach
        wide = reach[1] - reach[0] > bank and self.core.max_moving_free_fp32 * DType.FLOAT32.itemsize > bank
        limit = self.core.psum if wide else bank
        worst = self._furthest(tile.offset, bank)
        if reach[0] < 0 or worst + reach[1] > limit or (wide and worst):
            yield Violation(
                Rule.BANK,
                f"sums of {reach[1] - reach[0]} bytes begin up to {worst} bytes after the start of a bank of {bank}",
                "begin at a bank, and split sums that are larger than a bank",
            )

    def _furthest(self, offset: Affine, bank: int) -> int:
        """An upper bound on the distance of an address from the start of its bank, over all iterations.

        The result is the lesser of two bounds. First, terms that are multiples of a bank do not move an address inside
        its bank, so the remaining terms bound the distance, provided that their sum is never negative. Second, every
        address is congruent to the base modulo the greatest common divisor of a bank and all steps, so the distance is
        at most the largest such remainder inside a bank.
        """
        steps = [c for _, c in offset.terms] + [rotation.step for rotation in offset.rotations]
        grid = gcd(bank, *steps)
        anywhere = offset.base % grid + bank - grid
        terms = tuple(term for term in offset.terms if term[1] % bank)
        rotations = tuple(rotation for rotation in offset.rotations if rotation.step % bank)
        low, high = Affine(offset.base % bank, terms, rotations).bounds(self.counts)
        return min(anywhere, high) if low >= 0 else anywhere


_STREAMING = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


def starts(lanes: int) -> tuple[int, ...]:
    return next(starts for most, starts in STARTS if lanes <= most)


def _axes(axes: tuple[Axis, ...]) -> Violations:
    if len(axes) > MOST_AXES:
        yield Violation(Rule.AXES, f"a pattern of {len(axes)} axes", f"use up to {MOST_AXES}")
    for axis in axes:
        stride_exceeded = axis.size > 1 and not STRIDES[0] <= axis.stride <= STRIDES[1]
        if stride_exceeded or not 1 <= axis.size <= MOST_SIZE:
            yield Violation(
                Rule.AXES,
                f"an axis of {axis.size} elements, {axis.stride} apart",
                f"sizes go from 1 to {MOST_SIZE}, strides from {STRIDES[0]} to {STRIDES[1]}; split the axis",
            )


def _misaligned(offset: Affine, size: int) -> bool:
    if offset.base % size:
        return True
    return any(c % size for _, c in offset.terms) or any(rotation.step % size for rotation in offset.rotations)


def named(buffer: Buffer) -> str:
    name = next(iter(buffer.names), "")
    return f"the {buffer.role} {name if name.isprintable() else ascii(name)}".rstrip()


def length(place: Place) -> int:
    return place.elements * place.partitions if isinstance(place, Tile) else place.elements


def equal(a_name: str, a: Tile, b_name: str, b: Tile) -> Violations:
    if a.partitions != b.partitions or a.elements != b.elements:
        yield unequal(f"{a_name} is {a.partitions} x {a.elements}, {b_name} is {b.partitions} x {b.elements}")


def unequal(what: str) -> Violation:
    return Violation(Rule.SHAPE, what, "make them equal")


def sized(name: str, tile: Tile, partitions: int, elements: int) -> Violations:
    if tile.partitions != partitions or tile.elements != elements:
        yield Violation(
            Rule.SHAPE,
            f"{name} is {tile.partitions} x {tile.elements}",
            f"make it {partitions} x {elements}",
        )


def column(name: str, value: object, like: Tile) -> Violations:
    """Check that an operand is a number, or a column with one number for each partition of `like`."""
    if isinstance(value, Tile):
        yield from sized(name, value, like.partitions, 1)


def one_in_sbuf(a_name: str, a: Tile, b_name: str, b: Tile) -> Violations:
    if a.memory is Memory.PSUM and b.memory is Memory.PSUM:
        yield Violation(Rule.MEMORY, f"{a_name} and {b_name} are both in PSUM", "copy one of them to SBUF first")


def typed(name: str, place: Place, allowed: tuple[DType, ...]) -> Violations:
    if place.dtype not in allowed:
        yield Violation(Rule.DTYPE, f"{name} is {place.dtype}", f"use {' or '.join(allowed)}")


def same_type(a_name: str, a: Place, b_name: str, b: Place) -> Violations:
    if a.dtype is not b.dtype:
        yield Violation(Rule.DTYPE, f"{a_name} is {a.dtype} and {b_name} {b.dtype}", "convert one of them first")


def operator(name: str, op: Alu, allowed: frozenset[Alu]) -> Violations:
    if op not in allowed:
        yield Violation(Rule.OPERATOR, f"{name} is {op}", f"use {' or '.join(sorted(allowed))}")


def bits(instruction: Instruction, *ops: Alu | None) -> Violations:
    """Check the operands of bit operators: integers without conversion, on the vector engine."""
    if not any(op in BITS for op in ops):
        return
    if instruction.engine is not Engine.VECTOR:
        yield Violation(Rule.OPERATOR, f"{instruction.engine} has no bit operators", "use the vector engine")
    for name, place in instruction.places.items():
        if place.dtype.is_float:
            yield Violation(Rule.DTYPE, f"{name} of a bit operator is {place.dtype}", "bit operators take integers")
