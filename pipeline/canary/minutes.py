"""Sets of minutes, kept as ranges: a rollout of days takes a handful of numbers."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Minutes:
    ranges: tuple[tuple[int, int], ...] = ()  # first and last, ascending, never touching

    @staticmethod
    def of(minutes: Iterable[int]) -> "Minutes":
        return Minutes().joined(Minutes(tuple((minute, minute) for minute in minutes)))

    @staticmethod
    def from_json(document: Sequence[Sequence[int]]) -> "Minutes":
        return Minutes(tuple((first, last) for first, last in document))

    def __contains__(self, minute: int) -> bool:
        at = bisect.bisect_right(self.ranges, minute, key=lambda each: each[0]) - 1
        return at >= 0 and minute <= self.ranges[at][1]

    @property
    def newest(self) -> int | None:
        return self.ranges[-1][1] if self.ranges else None

    def since(self, begun: int) -> int:
        """How many minutes from `begun` on are in the set."""
        return sum(last - max(first, begun) + 1 for first, last in self.ranges if last >= begun)

    def joined(self, other: "Minutes") -> "Minutes":
        ranges: list[tuple[int, int]] = []
        for first, last in sorted(self.ranges + other.ranges):
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            else:
                ranges.append((first, last))
        return Minutes(tuple(ranges))
