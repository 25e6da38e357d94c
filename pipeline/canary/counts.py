"""Counts of one minute: requests and bad requests of each version; and sets of minutes."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

ERRORS: Final = "errors"
# Latency thresholds, frozen before a rollout from the baseline's history. A request above a threshold is bad in that
# metric, so a latency is judged with the same statistics as an error.
LATENCIES: Final = ("p50", "p75", "p90", "p95", "p99", "p99 x 1.25", "p99 x 1.6")
METRICS: Final = (ERRORS, *LATENCIES)

# A value of a metrics service. It should be a whole number; `fault` reports one that is not.
Count: TypeAlias = int | float
_MAX_COUNT: Final = 10**10  # requests in a minute; a higher count is a broken counter


@dataclass(frozen=True)
class Arm:
    """Counts of one version. `slower` follows LATENCIES, or is empty where no latency is measured."""

    requests: Count
    errors: Count
    timed: Count = 0  # requests with a latency
    slower: tuple[Count, ...] = ()

    def tallies(self) -> tuple[tuple[Count, Count], ...]:
        """(requests, bad requests) of each metric."""
        slower = self.slower or (0,) * len(LATENCIES)
        timed = self.timed if self.slower else 0
        return ((self.requests, self.errors), *((timed, bad) for bad in slower))


@dataclass(frozen=True)
class Pairs:
    """Shadowed requests, served by both versions: pairs of which only one response was bad, by metric.

    Pairs with two good or two bad responses carry no information about the odds ratio.
    """

    canary_alone: tuple[Count, ...]
    stable_alone: tuple[Count, ...]


NO_REQUESTS: Final = Arm(0, 0)


@dataclass(frozen=True)
class Batch:
    """One minute of both versions. A minute with pairs is judged by its pairs only: no request is used twice."""

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
    """The reason why this minute is invalid as evidence; None if it is valid."""
    if not is_whole(batch.minute):
        return "its minute is no whole number"
    for name, arm in (("the canary", batch.canary), ("the stable version", batch.stable)):
        if reason := _arm_fault(arm):
            return f"{name} {reason}"
    if bool(batch.canary.slower) != bool(batch.stable.slower):
        return "one version's latencies are missing"
    return None if batch.pairs is None else _pairs_fault(batch.pairs)


def _arm_fault(arm: Arm) -> str | None:
    counts = (arm.requests, arm.errors, arm.timed, *arm.slower)
    if not all(map(is_whole, counts)):
        return "has a count that is no whole number"
    if min(counts) < 0:
        return "has a negative count"
    if max(counts) > _MAX_COUNT:
        return f"has a count above {_MAX_COUNT:.0e}"
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
        if not all(is_whole(count) and 0 <= count <= _MAX_COUNT for count in counts):
            return "the pairs have a count that is no whole number"
    return None


def is_whole(count: Count) -> bool:
    """CloudWatch returns floats: 12.0 is a count; 12.5 and NaN are not."""
    return isinstance(count, int | float) and math.isfinite(count) and count == int(count)


@dataclass(frozen=True)
class Minutes:
    """A set of minutes as ranges: a rollout of days takes a handful of numbers."""

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
        """The number of minutes in the set from `begun` on."""
        return sum(last - max(first, begun) + 1 for first, last in self.ranges if last >= begun)

    def joined(self, other: "Minutes") -> "Minutes":
        ranges: list[tuple[int, int]] = []
        for first, last in sorted(self.ranges + other.ranges):
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            else:
                ranges.append((first, last))
        return Minutes(tuple(ranges))
