"""CloudWatch metrics of a load balancer: the queries, and the counts of each minute that their results hold.

A minute is read once, after its counts have settled. A series without a value for a minute counted zero: the load
balancer publishes only nonzero metrics.

An error is a request without a good response of a target: a 5XX, or no response at all. A target that hangs, crashes
or closes the connection sends none; the load balancer then returns a 502 or 504 of its own, which it counts for all
target groups together. What remains is a difference: a request was routed to the group, and no target responded.

A request may be counted in one minute and its response minutes later, so the difference of one minute is noise. The
balance of all minutes is kept instead: the number of requests that are open at the end of each. An open request is in
flight or unanswered; AWS documents neither when a request is counted nor when its response is. Three facts decide:

- The load balancer has returned so many 502, 504 and 4XX (460: the client gave up) of its own. At most so many requests
  are unanswered. Those that arrived within the slowest latency of the minute's end are still in flight.
- No response takes longer than a fleet allows. Requests that are older than that are unanswered.
- A connection that a target refused is a request that it did not answer.

The part of their maximum that exceeds its previous maximum is new, and counts as unanswered. So a healthy version has
no unanswered requests, however many are in flight, and a version that stops to respond has more every minute.
"""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

ERRORS: Final = "errors"
# Latency thresholds, frozen before a rollout from the baseline's history. A request above a threshold is bad in that
# metric, so a latency is judged with the same statistics as an error.
LATENCIES: Final = ("p50", "p75", "p90", "p95", "p99", "p99 x 1.25", "p99 x 1.6")
METRICS: Final = (ERRORS, *LATENCIES)

# A value of a metrics service. It should be a whole number; `fault` reports other values.
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
            _parsed_arm(document["canary"]),
            _parsed_arm(document["stable"]),
            pairs and Pairs(tuple(pairs["canary_alone"]), tuple(pairs["stable_alone"])),
        )


def _parsed_arm(document: Mapping[str, Any]) -> Arm:
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
    """A set of minutes as ranges: a rollout of days has few of them."""

    ranges: tuple[tuple[int, int], ...] = ()  # first and last, ascending, never touching

    @staticmethod
    def of(minutes: Iterable[int]) -> "Minutes":
        return Minutes().joined(Minutes(tuple((minute, minute) for minute in minutes)))

    @staticmethod
    def from_json(document: Sequence[Sequence[int]]) -> "Minutes":
        return Minutes(tuple((first, last) for first, last in document))

    def __contains__(self, minute: int) -> bool:
        at = bisect.bisect_right(self.ranges, minute, key=lambda span: span[0]) - 1
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


@dataclass(frozen=True)
class InFlight:
    """How long a request may be open before it counts as unanswered."""

    usual: float = 1.0  # minutes within which nearly all responses start; at most one
    longest: int = 1  # minutes after which no response comes


@dataclass(frozen=True)
class MinuteCounts:
    """What the load balancer has counted in one minute: of one target group, and `returned` of all together."""

    requests: Count
    answers: Count  # responses of targets, of any status
    failed: Count = 0  # those with status 5XX
    refused: Count = 0  # connections that targets refused
    returned: Count = 0  # 502, 504 and 4XX of the load balancer itself

    @property
    def valid(self) -> bool:
        counts = (self.requests, self.answers, self.failed, self.refused, self.returned)
        return all(is_whole(count) and count >= 0 for count in counts)


@dataclass(frozen=True)
class UnansweredRequests:
    """The balance of requests and responses since the first minute of a rollout."""

    now: int = 0
    most: int = 0  # largest number of overdue requests that was counted as unanswered
    busiest: int = 0  # most requests of one minute, a limit of those open when the rollout began
    refused: int = 0  # connections that targets refused
    returned: int = 0  # responses of the load balancer itself that only unanswered requests have
    recent: tuple[int, ...] = ()  # requests of the last minutes, in which a response may still come

    @staticmethod
    def from_json(document: Sequence[int]) -> "UnansweredRequests":
        now, most, busiest, refused, returned, *recent = (*document, *(0,) * (5 - len(document)))
        return UnansweredRequests(now, most, busiest, refused, returned, tuple(recent))

    def as_json(self) -> list[int]:
        return [self.now, self.most, self.busiest, self.refused, self.returned, *self.recent]

    def after(self, minute: MinuteCounts, in_flight: InFlight) -> tuple["UnansweredRequests", Count]:
        """The balance one minute later, and the number of requests that are proved unanswered.

        A minute reports at most its requests without the failed ones; the remainder is reported by the next minutes.
        Invalid counts change nothing.
        """
        if not minute.valid:
            return self, 0
        requests = int(minute.requests)
        busiest = max(self.busiest, requests)
        now = max(-busiest * in_flight.longest, self.now + requests - int(minute.answers))
        recent = (*self.recent, requests)[-in_flight.longest :]
        refused, returned = self.refused + int(minute.refused), self.returned + int(minute.returned)
        overdue = max(min(now - math.ceil(requests * in_flight.usual), returned), now - sum(recent), refused)
        proved = max(0, min(overdue - self.most, int(requests - minute.failed)))
        return UnansweredRequests(now, self.most + proved, busiest, refused, returned, recent), proved


@dataclass(frozen=True)
class PairCounts:
    """The pairs of one minute. A pair is bad for the canary if its response is missing or differs from the stable
    one."""

    pairs: Count
    canary_bad: Count
    canary_alone: Count  # bad for the canary only
    stable_alone: Count

    def batch(self, minute: int, stable: Arm) -> Batch:
        """The minute as the judge takes it. Latencies are not compared: the canary's requests are other ones."""
        others = (0,) * len(LATENCIES)
        pairs = Pairs((self.canary_alone, *others), (self.stable_alone, *others))
        return Batch(minute, Arm(self.pairs, self.canary_bad), stable, pairs)


# Metrics that the agents of stable instances publish, in the order of PairCounts. Their dimension ROLLOUT is the
# execution's name: pairs of an earlier rollout that arrive late are not counted.
PAIR_METRICS: Final = tuple(f"shadow_{field.name}_total" for field in fields(PairCounts))
PAIR_NAMESPACE: Final = "nxpipe"
ROLLOUT: Final = "Rollout"


Results: TypeAlias = Sequence[Mapping[str, Any]]  # MetricDataResults of GetMetricData
_Values: TypeAlias = Mapping[str, Mapping[int, Count]]  # by the id of the query, by minute

_NAMESPACE: Final = "AWS/ApplicationELB"
_LATENCY: Final = "TargetResponseTime"
_ANSWERS: Final = ("2xx", "3xx", "4xx", "5xx")
_COUNTS: Final = {
    "requests": ("RequestCount", "Sum"),
    **{kind: (f"HTTPCode_Target_{kind.upper()}_Count", "Sum") for kind in _ANSWERS},
    "refused": ("TargetConnectionErrorCount", "Sum"),
    "timed": (_LATENCY, "SampleCount"),
}
# Responses of the load balancer itself to requests that no target answered. It counts them for all target groups
# together. 460, a client that gave up, is one of its 4XX.
_RETURNED: Final = {f"balancer_{kind}": f"HTTPCode_ELB_{kind.upper()}_Count" for kind in ("502", "504", "4xx")}


def queries(balancer: str, arms: Mapping[str, str], latencies: Sequence[float], period: int) -> list[dict[str, Any]]:
    """Queries of CloudWatch. `arms` are target groups by arm. A trimmed count TC(x:) omits values up to x, so it counts
    the slower requests."""
    slower = {f"slower{number}": (_LATENCY, f"TC({latency:.10g}:)") for number, latency in enumerate(latencies)}
    of_balancer = {"LoadBalancer": balancer}
    return [
        *(
            _query(f"{arm}_{name}", metric, statistic, of_balancer | {"TargetGroup": targets}, period)
            for arm, targets in arms.items()
            for name, (metric, statistic) in (_COUNTS | slower).items()
        ),
        *(_query(name, metric, "Sum", of_balancer, period) for name, metric in _RETURNED.items()),
    ]


def pair_queries(dimensions: Mapping[str, str], period: int) -> list[dict[str, Any]]:
    """Queries of the pairs that the agents of the stable instances publish."""
    return [_query(name, name, "Sum", dimensions, period, PAIR_NAMESPACE) for name in PAIR_METRICS]


def with_pairs(results: Results, batch: Batch, period: int) -> Batch:
    """The minute judged by its pairs if it has any. The stable version's own counts still show an incident."""
    values = _by_minute(results, period)
    counts = PairCounts(*(values.get(name, {}).get(batch.minute, 0) for name in PAIR_METRICS))
    return counts.batch(batch.minute, Arm(batch.stable.requests, batch.stable.errors)) if counts.pairs else batch


def _query(
    name: str, metric: str, statistic: str, dimensions: Mapping[str, str], period: int, namespace: str = _NAMESPACE
) -> dict[str, Any]:
    return {
        "Id": name,
        "MetricStat": {
            "Metric": {
                "Namespace": namespace,
                "MetricName": metric,
                "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
            },
            "Period": period,
            "Stat": statistic,
        },
    }


def complete(results: Results) -> bool:
    """False for partial data of CloudWatch; the next evaluation queries these minutes again."""
    return all(result.get("StatusCode", "Complete") == "Complete" for result in results)


def batches(
    results: Results,
    minutes: Iterable[int],
    latencies: Sequence[float],
    period: int,
    opened: tuple[UnansweredRequests, UnansweredRequests],
    longest: int = 1,
) -> tuple[list[Batch], tuple[UnansweredRequests, UnansweredRequests]]:
    """The batches of the given minutes, and the balances after them (canary, stable). No response takes more than
    `longest` minutes."""
    in_flight = InFlight(min(1.0, latencies[-1] / period) if latencies else 1.0, longest)
    values = _by_minute(results, period)
    by_minute, (canary, stable) = [], opened
    for minute in minutes:
        canary, new = _arm("canary", values, minute, len(latencies), (canary, in_flight))
        stable, old = _arm("stable", values, minute, len(latencies), (stable, in_flight))
        by_minute.append(Batch(minute, new, old))
    return by_minute, (canary, stable)


def _by_minute(results: Results, period: int) -> _Values:
    return {
        result["Id"]: {
            minute_of(timestamp, period): value
            for timestamp, value in zip(result["Timestamps"], result["Values"], strict=True)
        }
        for result in results
    }


def _arm(
    name: str, values: _Values, minute: int, latencies: int, opened: tuple[UnansweredRequests, InFlight]
) -> tuple[UnansweredRequests, Arm]:
    """The counts of one version in one minute, and its balance after it."""

    def count(series: str) -> Count:
        return values.get(series, {}).get(minute, 0)

    before, in_flight = opened
    counts = MinuteCounts(
        requests=count(f"{name}_requests"),
        answers=sum(count(f"{name}_{kind}") for kind in _ANSWERS),
        failed=count(f"{name}_5xx"),
        refused=count(f"{name}_refused"),
        returned=sum(map(count, _RETURNED)),
    )
    after, unanswered = before.after(counts, in_flight)
    return after, Arm(
        requests=counts.requests,
        errors=counts.failed + unanswered,
        timed=count(f"{name}_timed"),
        slower=tuple(count(f"{name}_slower{number}") for number in range(latencies)),
    )


def minute_of(timestamp: str, period: int, *, earlier: int = 0) -> int:
    """The number of the minute since 1970 that is `earlier` seconds before the timestamp."""
    return (int(_moment(timestamp).timestamp()) - earlier) // period


def start_of(minute: int, period: int) -> str:
    return datetime.fromtimestamp(minute * period, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(timestamp: str) -> datetime:
    moment = datetime.fromisoformat(timestamp)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
