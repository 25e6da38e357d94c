"""When a program needs each of its buffers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nxpipe.emulator.isa.instructions import Instruction
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Loop, Step


@dataclass(frozen=True)
class Life:
    """From one instruction of the text to another, both included."""

    first: int
    last: int

    def meets(self, other: "Life") -> bool:
        return self.first <= other.last and other.first <= self.last


def lives(body: Sequence[Step]) -> dict[int, Life]:
    """Of each buffer that is used. One that is used inside a loop and outside of it lives as long as the loop."""
    uses: dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
    for position, (instruction, loops) in enumerate(_positions(body)):
        for buffer in _named(instruction):
            uses.setdefault(buffer, []).append((position, loops))
    found = {}
    for buffer, where in uses.items():
        shared = set(where[0][1]).intersection(*(loops for _, loops in where))
        spans = [span for _, loops in where for span in loops if span not in shared]
        points = [position for position, _ in where]
        found[buffer] = Life(
            min([*points, *(start for start, _ in spans)]), max([*points, *(stop - 1 for _, stop in spans)])
        )
    return found


def _positions(
    body: Sequence[Step], start: int = 0, loops: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[Instruction, tuple[tuple[int, int], ...]]]:
    """Each instruction with the loops around it, as the numbers of their first instruction and of that behind them."""
    for step in body:
        if isinstance(step, Loop):
            stop = start + _length(step.body)
            yield from _positions(step.body, start, (*loops, (start, stop)))
            start = stop
        else:
            yield step, loops
            start += 1


def _length(body: Sequence[Step]) -> int:
    return sum(_length(step.body) if isinstance(step, Loop) else 1 for step in body)


def _named(instruction: Instruction) -> set[int]:
    return {place.buffer for place in instruction.places.values() if isinstance(place, Far)}
