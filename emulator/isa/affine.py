"""Affine expressions of loop indices: the addresses and semaphore counts of a program.

Loops are not unrolled, so programs are small. No other numbers vary in a loop, so bounds, overlaps and waits are proved
for all iterations at once. A rotating buffer (double buffering) adds a step times an affine expression modulo the
number of buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RotatingOffset:
    """`step` times (`of` modulo `count`): the offset of the current buffer among `count` rotating buffers."""

    step: int
    count: int
    of: "Affine"


@dataclass(frozen=True, slots=True)
class Affine:
    """`base` plus, for each (depth, coefficient), `coefficient` times the index of the loop at `depth` (0: outermost).

    Terms ascend by depth and have no coefficient of 0. `rotations` are rotating offsets; they do not nest.
    """

    base: int = 0
    terms: tuple[tuple[int, int], ...] = ()
    rotations: tuple[RotatingOffset, ...] = ()

    def __add__(self, other: "Affine | int") -> "Affine":
        if isinstance(other, int):
            return Affine(self.base + other, self.terms, self.rotations)
        if not (self.terms and other.terms):
            return Affine(self.base + other.base, self.terms or other.terms, self.rotations + other.rotations)
        sums = dict(self.terms)
        for depth, coefficient in other.terms:
            sums[depth] = sums.get(depth, 0) + coefficient
        return Affine(self.base + other.base, _canonical(sums), self.rotations + other.rotations)

    __radd__ = __add__

    def __mul__(self, factor: int) -> "Affine":
        if factor == 1 or not factor:
            return self if factor else Affine()
        rotations = (RotatingOffset(rotation.step * factor, rotation.count, rotation.of) for rotation in self.rotations)
        terms = tuple([(depth, coefficient * factor) for depth, coefficient in self.terms])
        return Affine(self.base * factor, terms, tuple(rotations) if self.rotations else ())

    __rmul__ = __mul__

    def at(self, indices: Sequence[int]) -> int:
        """The value at these loop indices, outermost first."""
        value = self.base
        for depth, coefficient in self.terms:
            value += indices[depth] * coefficient
        for rotation in self.rotations:
            value += rotation.step * (rotation.of.at(indices) % rotation.count)
        return value

    def bound(self, depth: int, number: int) -> "Affine":
        """The expression with a number in place of the index of the loop at `depth`."""
        coefficients = dict(self.terms)
        base = self.base + coefficients.pop(depth, 0) * number
        fixed = Affine(base, _canonical(coefficients))
        rotations = (rotating_offset(r.of.bound(depth, number), r.count, r.step) for r in self.rotations)
        return sum(rotations, fixed)

    def bounds(self, counts: Sequence[int]) -> tuple[int, int]:
        """The least and the greatest value over loops of these counts; rotating offsets count in full."""
        low = high = self.base
        for depth, coefficient in self.terms:
            reach = (counts[depth] - 1) * coefficient
            low, high = low + min(reach, 0), high + max(reach, 0)
        for rotation in self.rotations:
            reach = rotation.step * (rotation.count - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    @property
    def depth(self) -> int:
        """The number of enclosing loops that the expression requires."""
        own = self.terms[-1][0] + 1 if self.terms else 0
        return max([own, *(rotation.of.depth for rotation in self.rotations)]) if self.rotations else own


def index(depth: int) -> Affine:
    """The index of the loop at this depth."""
    return Affine(0, ((depth, 1),))


def affine(value: Affine | int) -> Affine:
    return value if isinstance(value, Affine) else Affine(value)


def divided(value: Affine | int, by: int) -> Affine:
    """The exact quotient, term by term; `by` must divide every term."""
    start = affine(value)
    return Affine(start.base // by, tuple((depth, step // by) for depth, step in start.terms))


def rotating_offset(of: Affine, count: int, step: int) -> Affine:
    """The offset of the current buffer among `count` rotating buffers, `step` apart."""
    if not of.terms:
        return Affine(of.base % count * step)
    return Affine(0, (), (RotatingOffset(step, count, of),)) if count > 1 and step else Affine()


def _canonical(sums: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((depth, coefficient) for depth, coefficient in sums.items() if coefficient))
