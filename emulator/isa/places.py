"""Which places exist and which an engine can reach, for all turns of the loops around an instruction at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.faults import Breaches, Broken, Rule
from nxpipe.emulator.isa.instructions import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, extent
from nxpipe.emulator.isa.program import Buffer

MOST_AXES = 4
MOST_SIZE = 2**16 - 1
STRIDES = (-(2**15), 2**15 - 1)
MOST_ELEMENTS = {Memory.SBUF: 65536, Memory.PSUM: 4096}
WIDE = (DType.INT64, DType.UINT64)

# By the most partitions that an instruction uses: where they may begin.
STARTS = ((32, (0, 32, 64, 96)), (64, (0, 64)), (128, (0,)))


@dataclass(frozen=True)
class Room:
    """Where an instruction stands: its core, the buffers of its program, and how often each loop around it runs."""

    core: CoreSpec
    buffers: Sequence[Buffer]
    ranks: int
    counts: tuple[int, ...]

    def breaches(self, place: Place, engine: Engine) -> Breaches:
        if place.dtype in WIDE:
            yield Broken(Rule.DTYPE, f"{place.dtype} does not exist on the machine", "narrow it to 32 bits")
        if place.dtype is DType.FLOAT8_E4M3FN and self.core.nki_gen < 4:
            yield Broken(
                Rule.DTYPE, f"{self.core.name} has no {place.dtype}, which began with v4", "use float8_e4m3 or bfloat16"
            )
        if isinstance(place, Tile):
            yield from self._tile(place, engine)
        else:
            yield from self._far(place)

    def follows(self, value: Affine) -> Breaches:
        """Whether its loops are there."""
        if value.depth > len(self.counts):
            yield Broken(
                Rule.LOOP,
                f"i{value.depth - 1} is used inside of {len(self.counts)} loops",
                "use the indices of the loops around the instruction",
            )
        if any(turn.count < 1 for turn in value.turns):
            yield Broken(Rule.LOOP, "a buffer takes turns with less than one place", "give it one place or more")

    def _tile(self, tile: Tile, engine: Engine) -> Breaches:
        lanes, start = tile.partitions, tile.start
        moved = engine in DMA_QUEUES
        if lanes < 1 or start < 0 or start + lanes > self.core.partitions:
            yield Broken(
                Rule.PARTITION,
                f"partitions {start} up to {start + lanes} of {self.core.partitions}",
                "use 1 to 128 of them, from 0 on",
            )
        elif not moved and start not in starts(lanes):
            yield Broken(
                Rule.START,
                f"{lanes} partitions begin at {start}",
                f"begin at {' or '.join(map(str, starts(lanes)))}, or use fewer partitions",
            )
        yield from _axes(tile.axes)
        if engine in _STREAMING and tile.elements > MOST_ELEMENTS[tile.memory]:
            yield Broken(
                Rule.SIZE,
                f"{tile.elements} elements of each partition, where {tile.memory} gives an instruction "
                f"{MOST_ELEMENTS[tile.memory]}",
                "split the free axes",
            )
        size = tile.dtype.itemsize
        if size > 1 and _misaligned(tile.offset, size):
            yield Broken(
                Rule.ALIGNMENT,
                f"the offset is not always a multiple of {size} bytes, an element of {tile.dtype}",
                "align the tile",
            )
        yield from self._within(tile.offset, tile.reach, self._bytes(tile.memory), f"a partition of {tile.memory}")

    def _far(self, far: Far) -> Breaches:
        if not 0 <= far.buffer < len(self.buffers):
            yield Broken(Rule.BUFFER, f"there is no buffer {far.buffer}", f"there are {len(self.buffers)}")
            return
        buffer = self.buffers[far.buffer]
        if len(far.axes) > MOST_AXES or any(axis.size < 1 for axis in far.axes):
            yield Broken(
                Rule.AXES,
                f"a pattern in HBM with axes of {[axis.size for axis in far.axes]}",
                f"use up to {MOST_AXES} axes of at least 1",
            )
        size = far.dtype.itemsize
        if buffer.address % size:
            yield Broken(
                Rule.ALIGNMENT,
                f"{named(buffer)} lies at {buffer.address}, which is not a multiple of {size} bytes",
                "align the buffer",
            )
        if far.rows is not None:
            yield from self._rows(far, far.rows)
        low, high = extent(far.axes[1:] if far.rows is not None else far.axes)
        yield from self._within(far.offset * size, (low * size, (high + 1) * size), buffer.nbytes, named(buffer))

    def _rows(self, far: Far, rows: Tile) -> Breaches:
        yield from self._tile(rows, DMA_QUEUES[0])
        if rows.dtype is not DType.UINT32 or rows.memory is not Memory.SBUF:
            yield Broken(Rule.DTYPE, f"row numbers are {rows.dtype} in {rows.memory}", "give them as uint32 in SBUF")
        if rows.elements != 1 or not far.axes or rows.partitions != far.axes[0].size:
            first = far.axes[0].size if far.axes else 0
            yield Broken(
                Rule.SHAPE,
                f"{rows.partitions} x {rows.elements} row numbers for a first axis of {first}",
                "give one in each of as many partitions",
            )

    def _within(self, offset: Affine, reach: tuple[int, int], room: int, where: str) -> Breaches:
        wrong = list(self.follows(offset))
        if wrong:
            yield from wrong
            return
        low, high = offset.bounds(self.counts)
        if low + reach[0] < 0 or high + reach[1] > room:
            yield Broken(
                Rule.BOUNDS,
                f"bytes {low + reach[0]} up to {high + reach[1]} of {where}, where a program has {room}",
                "make the tile smaller, or move it",
            )

    def _bytes(self, memory: Memory) -> int:
        return self.core.sbuf_usable if memory is Memory.SBUF else self.core.psum

    def bank(self, tile: Tile) -> Breaches:
        """Sums lie inside of one bank; where a matmul may be wider than a bank, they begin at one."""
        if tile.offset.depth > len(self.counts):
            return  # a breach of its own
        bank, reach = self.core.psum_bank, tile.reach
        wide = reach[1] - reach[0] > bank and self.core.max_moving_free_fp32 * DType.FLOAT32.itemsize > bank
        room = self.core.psum if wide else bank
        worst = self._furthest(tile.offset, bank)
        if reach[0] < 0 or worst + reach[1] > room or (wide and worst):
            yield Broken(
                Rule.BANK,
                f"sums of {reach[1] - reach[0]} bytes begin up to {worst} bytes behind that of a bank of {bank}",
                "begin at a bank, and split what is larger than one",
            )

    def _furthest(self, offset: Affine, bank: int) -> int:
        """How far behind the beginning of a bank it may be, at most: as what is left of a sum of the terms that are no
        whole banks, or as any multiple of what they have in common."""
        steps = [c for _, c in offset.terms] + [turn.step for turn in offset.turns]
        grid = gcd(bank, *steps)
        anywhere = offset.base % grid + bank - grid
        terms = tuple(term for term in offset.terms if term[1] % bank)
        turns = tuple(turn for turn in offset.turns if turn.step % bank)
        low, high = Affine(offset.base % bank, terms, turns).bounds(self.counts)
        return min(anywhere, high) if low >= 0 else anywhere


_STREAMING = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


def starts(lanes: int) -> tuple[int, ...]:
    return next(starts for most, starts in STARTS if lanes <= most)


def _axes(axes: tuple[Axis, ...]) -> Breaches:
    if len(axes) > MOST_AXES:
        yield Broken(Rule.AXES, f"a pattern of {len(axes)} axes", f"use up to {MOST_AXES}")
    for axis in axes:
        far = axis.size > 1 and not STRIDES[0] <= axis.stride <= STRIDES[1]
        if far or not 1 <= axis.size <= MOST_SIZE:
            yield Broken(
                Rule.AXES,
                f"an axis of {axis.size} elements, {axis.stride} apart",
                f"sizes go from 1 to {MOST_SIZE}, strides from {STRIDES[0]} to {STRIDES[1]}; split the axis",
            )


def _misaligned(offset: Affine, size: int) -> bool:
    if offset.base % size:
        return True
    return any(c % size for _, c in offset.terms) or any(turn.step % size for turn in offset.turns)


def named(buffer: Buffer) -> str:
    name = next(iter(buffer.names), "")
    return f"the {buffer.role} {name if name.isprintable() else ascii(name)}".rstrip()
