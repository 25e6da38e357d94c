"""Affine numbers: addresses and semaphore counts, as sums of loop indices times constants.

A program is small because its loops are not unrolled. No other numbers may change in a loop, so that every property of
a program follows from its text: bounds, overlaps and waits hold for all iterations at once. Rotating buffers (double
buffering) add a step times such a sum modulo the number of buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotatingOffset:
    """`step` times (`of` modulo `count`): the offset of the current one of `count` rotating buffers."""

    step: int
    count: int
    of: "Affine"


@dataclass(frozen=True, slots=True)
class Affine:
    """`base` plus, for each (depth, coefficient), the index of the loop at that depth (0: outermost) times coefficient.

    Terms ascend by depth and have no coefficient of 0. `turns` are rotating offsets; they do not nest.
    """

    base: int = 0
    terms: tuple[tuple[int, int], ...] = ()
    turns: tuple[RotatingOffset, ...] = ()

    def __add__(self, other: "Affine | int") -> "Affine":
        if isinstance(other, int):
            return Affine(self.base + other, self.terms, self.turns)
        sums = dict(self.terms)
        for depth, coefficient in other.terms:
            sums[depth] = sums.get(depth, 0) + coefficient
        return Affine(self.base + other.base, _canonical(sums), self.turns + other.turns)

    __radd__ = __add__

    def __mul__(self, factor: int) -> "Affine":
        turns = tuple(RotatingOffset(turn.step * factor, turn.count, turn.of) for turn in self.turns) if factor else ()
        return Affine(self.base * factor, _canonical({d: c * factor for d, c in self.terms}), turns)

    __rmul__ = __mul__

    def at(self, indices: Sequence[int]) -> int:
        """The value at these loop indices, outermost first."""
        value = self.base
        for depth, coefficient in self.terms:
            value += indices[depth] * coefficient
        for turn in self.turns:
            value += turn.step * (turn.of.at(indices) % turn.count)
        return value

    def bounds(self, counts: Sequence[int]) -> tuple[int, int]:
        """The least and the greatest value over loops of these counts; rotating offsets count in full."""
        low = high = self.base
        for depth, coefficient in self.terms:
            reach = (counts[depth] - 1) * coefficient
            low, high = low + min(reach, 0), high + max(reach, 0)
        for turn in self.turns:
            reach = turn.step * (turn.count - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    @property
    def depth(self) -> int:
        """The number of loops that must be around it."""
        own = self.terms[-1][0] + 1 if self.terms else 0
        return max([own, *(turn.of.depth for turn in self.turns)])


def index(depth: int) -> Affine:
    """The index of the loop at this depth."""
    return Affine(0, ((depth, 1),))


def affine(value: Affine | int) -> Affine:
    return value if isinstance(value, Affine) else Affine(value)


def divided(value: Affine | int, by: int) -> Affine:
    """The quotient, term by term; every term must be a multiple."""
    start = affine(value)
    return Affine(start.base // by, tuple((depth, step // by) for depth, step in start.terms))


def rotating_offset(of: Affine, count: int, step: int) -> Affine:
    """The offset of the current one of `count` rotating buffers, `step` apart."""
    if not of.terms:
        return Affine(of.base % count * step)
    return Affine(0, (), (RotatingOffset(step, count, of),)) if count > 1 and step else Affine()


def _canonical(sums: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((depth, coefficient) for depth, coefficient in sums.items() if coefficient))
