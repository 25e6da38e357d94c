"""Accesses to SBUF and PSUM by allocation: the instructions that read and write each tile, and when it is live.

An allocation is a tile that a kernel has allocated (a positive number) or a buffer that was promoted to SBUF (a
negative one). Its content lives within one iteration of the loops around its scope.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Far, Tile
from nxpipe.emulator.isa.program import Loop, Step, text_length
from nxpipe.emulator.lower.kernel import Allocation

Span = tuple[int, int]  # the first and last position in the text


@dataclass(frozen=True)
class TextLoop:
    """A loop of the text, with the positions of its first and last instruction."""

    count: int
    first: int
    last: int


@dataclass(frozen=True)
class TileAccess:
    """An operand of the instruction at a position: the tile, whether it is written, and its loops."""

    position: int
    name: str
    tile: Tile
    writes: bool


class SbufAccesses:
    """The accesses of a body. Instructions can be replaced or removed; `body` then returns the new text."""

    def __init__(self, body: Sequence[Step], allocations: Mapping[int, Allocation]) -> None:
        self._body, self._allocations = body, allocations
        self.steps: list[Instruction | None] = []
        self.loops: list[tuple[TextLoop, ...]] = []  # around each instruction
        self.by_allocation: dict[int, list[TileAccess]] = {}
        self._visit(body, ())
        for position, step in enumerate(self.steps):
            assert step is not None
            self._add(position, step)

    def _visit(self, body: Sequence[Step], loops: tuple[TextLoop, ...]) -> None:
        for step in body:
            if isinstance(step, Loop):
                first = len(self.steps)
                inside = TextLoop(step.count, first, first + text_length(step.body) - 1)
                self._visit(step.body, (*loops, inside))
            else:
                self.steps.append(step)
                self.loops.append(loops)

    def _add(self, position: int, step: Instruction) -> None:
        for name, tile, writes in tiles_of(step):
            self.by_allocation.setdefault(tile.allocation, []).append(TileAccess(position, name, tile, writes))

    def counts(self, position: int) -> tuple[int, ...]:
        return tuple(loop.count for loop in self.loops[position])

    def replace(self, position: int, step: Instruction | None) -> None:
        """Put another instruction in the place of one; None removes it."""
        old = self.steps[position]
        assert old is not None
        for allocation in {tile.allocation for _, tile, _ in tiles_of(old)}:
            remaining = [access for access in self.by_allocation[allocation] if access.position != position]
            if remaining:
                self.by_allocation[allocation] = remaining
            else:
                del self.by_allocation[allocation]
        self.steps[position] = step
        if step is not None:
            self._add(position, step)

    def depth(self, allocation: int) -> int:
        """The number of loops within one iteration of which the content lives. A buffer that is read before it is
        written in the text keeps its content from iteration to iteration."""
        accesses = self.by_allocation[allocation]
        shared = _common(self.loops[access.position] for access in accesses)
        if allocation > 0:
            return min(shared, self._allocations[allocation].depth)
        first = min(accesses, key=lambda access: (access.position, access.writes))
        return shared if first.writes else 0

    def live(self, allocation: int) -> Span:
        """The text in which the content is live. A loop inside of the scope is live as a whole."""
        depth, spans = self.depth(allocation), []
        for access in self.by_allocation[allocation]:
            loops = self.loops[access.position]
            whole = len(loops) > depth
            spans.append((loops[depth].first, loops[depth].last) if whole else (access.position, access.position))
        return min(first for first, _ in spans), max(last for _, last in spans)

    @property
    def body(self) -> tuple[Step, ...]:
        return tuple(self._rebuilt(self._body, iter(self.steps)))

    def _rebuilt(self, body: Sequence[Step], steps: Iterator[Instruction | None]) -> Iterator[Step]:
        for step in body:
            if isinstance(step, Loop):
                if inside := tuple(self._rebuilt(step.body, steps)):
                    yield Loop(step.count, inside)
            elif (new := next(steps)) is not None:
                yield new


def tiles_of(step: Instruction) -> Iterator[tuple[str, Tile, bool]]:
    """The operands in SBUF and PSUM: the field, the tile, and whether it is written; `field.rows` for row numbers."""
    for name, place in step.places.items():
        if isinstance(place, Tile):
            written = name in step.writes
            if written:
                yield name, place, True
            if not written or name in step.reads_of_dst():
                yield name, place, False
        elif place.rows is not None:
            yield f"{name}.rows", place.rows, False


def with_tiles(step: Instruction, tiles: Mapping[str, Tile]) -> Instruction:
    """The instruction with other tiles in some fields."""
    changes: dict[str, Any] = {}
    for name, tile in tiles.items():
        field, _, rows = name.partition(".")
        place = getattr(step, field)
        changes[field] = replace(place, rows=tile) if rows and isinstance(place, Far) else tile
    return step.with_fields(**changes)


def _common(paths: Iterator[tuple[TextLoop, ...]]) -> int:
    """The number of loops that all paths share."""
    first, *others = paths
    shared = len(first)
    for path in others:
        shared = next(
            (n for n, (a, b) in enumerate(zip(first[:shared], path, strict=False)) if a is not b),
            min(shared, len(path)),
        )
    return shared
