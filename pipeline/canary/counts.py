"""What one minute brings: how many requests each version had, and how many of them were bad."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

ERRORS: Final = "errors"
# Where the latencies stand that are frozen before a rollout, from the stable version's history.
LATENCIES: Final = ("p50", "p75", "p90", "p95", "p99", "p99 x 1.25", "p99 x 1.6")
METRICS: Final = (ERRORS, *LATENCIES)

# What a metrics service answers: it should be a whole number, and `fault` says when it is not.
Count: TypeAlias = int | float
_MOST: Final = 10**10  # requests in a minute; above it is a counter gone wrong


@dataclass(frozen=True)
class Arm:
    """One version's minute. `slower` goes with LATENCIES, or is empty where no latency is known."""

    requests: Count
    errors: Count
    timed: Count = 0  # the requests whose latency is known
    slower: tuple[Count, ...] = ()

    def tallies(self) -> tuple[tuple[Count, Count], ...]:
        """Of how many requests how many were bad, metric by metric."""
        slower = self.slower or (0,) * len(LATENCIES)
        timed = self.timed if self.slower else 0
        return ((self.requests, self.errors), *((timed, bad) for bad in slower))


@dataclass(frozen=True)
class Pairs:
    """Requests that both versions answered: of how many pairs the one alone was bad, metric by metric."""

    canary_alone: tuple[Count, ...]
    stable_alone: tuple[Count, ...]


NO_REQUESTS: Final = Arm(0, 0)


@dataclass(frozen=True)
class Batch:
    """A minute of both versions. A minute with pairs counts by its pairs alone: the same request is not used twice."""

    minute: int
    canary: Arm
    stable: Arm
    pairs: Pairs | None = None

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        if self.pairs is None:
            del document["pairs"]
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Batch":
        pairs = document.get("pairs")
        return Batch(
            document["minute"],
            _arm(document["canary"]),
            _arm(document["stable"]),
            pairs and Pairs(tuple(pairs["canary_alone"]), tuple(pairs["stable_alone"])),
        )


def _arm(document: Mapping[str, Any]) -> Arm:
    return Arm(document["requests"], document["errors"], document.get("timed", 0), tuple(document.get("slower", ())))


def fault(batch: Batch) -> str | None:
    """Why no evidence can be made of this minute; None when it can."""
    if not is_whole(batch.minute):
        return "its minute is no whole number"
    for name, arm in (("the canary", batch.canary), ("the stable version", batch.stable)):
        if said := _arm_fault(arm):
            return f"{name} {said}"
    if bool(batch.canary.slower) != bool(batch.stable.slower):
        return "one version's latencies are missing"
    return None if batch.pairs is None else _pairs_fault(batch.pairs)


def _arm_fault(arm: Arm) -> str | None:
    counts = (arm.requests, arm.errors, arm.timed, *arm.slower)
    if not all(map(is_whole, counts)):
        return "has a count that is no whole number"
    if min(counts) < 0:
        return "has a negative count"
    if max(counts) > _MOST:
        return f"has a count above {_MOST:.0e}"
    if len(arm.slower) not in (0, len(LATENCIES)):
        return f"has {len(arm.slower)} latencies instead of {len(LATENCIES)}"
    if arm.errors > arm.requests or max(arm.slower, default=0) > arm.timed:
        return "has more bad requests than requests"
    if any(slow < slower for slow, slower in zip(arm.slower, arm.slower[1:], strict=False)):
        return "has more requests above a higher latency than above a lower one"
    return None


def _pairs_fault(pairs: Pairs) -> str | None:
    for counts in (pairs.canary_alone, pairs.stable_alone):
        if len(counts) != len(METRICS):
            return f"the pairs have {len(counts)} metrics instead of {len(METRICS)}"
        if not all(is_whole(count) and 0 <= count <= _MOST for count in counts):
            return "the pairs have a count that is no whole number"
    return None


def is_whole(count: Count) -> bool:
    """A service of metrics answers in floats: 12.0 is a count, 12.5 and NaN are none."""
    return isinstance(count, int | float) and math.isfinite(count) and count == int(count)


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
