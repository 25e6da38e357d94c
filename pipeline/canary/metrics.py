"""CloudWatch metrics of a load balancer: the queries, and the counts of each minute that their results hold.

A minute is read once, after its counts have settled. A series without a value for a minute counted zero: the load
balancer publishes a metric only when it is nonzero.

An error is a request without a good response of a target: a 5XX, or no response at all. A target that hangs, crashes
or closes the connection sends none; the load balancer then returns a 502 or 504 of its own, which it counts for all
target groups together. What remains is a difference: a request was routed to the group, and no target responded.

A request may be counted in one minute and its response in the next, so the difference of one minute is noise. The
balance of all minutes is kept instead: the number of requests that are open at the end of each. Requests of the last
minute that arrived within the slowest latency of its end may still be in flight. The part of the remainder that exceeds
its previous maximum is new, and counts as unanswered. So a healthy version has no unanswered requests, however many are
in flight, and a version that stops to respond has more every minute.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.canary.counts import Arm, Batch, Count, is_whole


@dataclass(frozen=True)
class UnansweredRequests:
    """Requests without a response since the first minute of a rollout."""

    now: int = 0
    most: int = 0  # maximum that was overdue, as far as it has been counted
    busiest: int = 0  # maximum of one minute: at most so many were open when the rollout began

    @staticmethod
    def from_json(document: Sequence[int]) -> "UnansweredRequests":
        return UnansweredRequests(*document)

    def as_json(self) -> list[int]:
        return [self.now, self.most, self.busiest]

    def after(
        self, requests: Count, answers: Count, *, failed: Count, in_flight: float
    ) -> tuple["UnansweredRequests", Count]:
        """The balance one minute later, and the requests that are proved unanswered.

        A minute reports at most as many as it has requests beside its `failed` ones; the rest follows in the next.
        `in_flight` is the fraction of a minute's requests that may be open at its end. Invalid counts change nothing.
        """
        if not all(is_whole(count) and count >= 0 for count in (requests, answers, failed)):
            return self, 0
        busiest = max(self.busiest, int(requests))
        now = max(-busiest, self.now + int(requests) - int(answers))
        overdue = now - math.ceil(int(requests) * in_flight)
        proved = max(0, min(overdue - self.most, int(requests - failed)))
        return UnansweredRequests(now, self.most + proved, busiest), proved


Results: TypeAlias = Sequence[Mapping[str, Any]]  # MetricDataResults of GetMetricData
_Values: TypeAlias = Mapping[str, Mapping[int, Count]]  # by the id of the query, by minute

_NAMESPACE: Final = "AWS/ApplicationELB"
_LATENCY: Final = "TargetResponseTime"
_ANSWERS: Final = ("2xx", "3xx", "4xx", "5xx")
_COUNTS: Final = {
    "requests": ("RequestCount", "Sum"),
    **{kind: (f"HTTPCode_Target_{kind.upper()}_Count", "Sum") for kind in _ANSWERS},
    "timed": (_LATENCY, "SampleCount"),
}


def queries(balancer: str, arms: Mapping[str, str], latencies: Sequence[float], period: int) -> list[dict[str, Any]]:
    """`arms` are target groups by the name of the arm. A trimmed count TC(x:) omits values up to x, so it counts the
    slower requests.
    """
    slower = {f"slower{number}": (_LATENCY, f"TC({latency:.10g}:)") for number, latency in enumerate(latencies)}
    return [
        {
            "Id": f"{arm}_{name}",
            "MetricStat": {
                "Metric": {
                    "Namespace": _NAMESPACE,
                    "MetricName": metric,
                    "Dimensions": [
                        {"Name": "LoadBalancer", "Value": balancer},
                        {"Name": "TargetGroup", "Value": targets},
                    ],
                },
                "Period": period,
                "Stat": statistic,
            },
        }
        for arm, targets in arms.items()
        for name, (metric, statistic) in (_COUNTS | slower).items()
    ]


def complete(results: Results) -> bool:
    """CloudWatch may return partial data; the next evaluation queries these minutes again."""
    return all(result.get("StatusCode", "Complete") == "Complete" for result in results)


def batches(
    results: Results,
    minutes: Iterable[int],
    latencies: Sequence[float],
    period: int,
    opened: tuple[UnansweredRequests, UnansweredRequests],
) -> tuple[list[Batch], tuple[UnansweredRequests, UnansweredRequests]]:
    """The batches of the given minutes, and the open requests after them (canary, stable). Without latencies a request
    may be in flight for a minute.
    """
    in_flight = min(1.0, latencies[-1] / period) if latencies else 1.0
    values: _Values = {
        result["Id"]: {
            minute_of(timestamp, period): value
            for timestamp, value in zip(result["Timestamps"], result["Values"], strict=True)
        }
        for result in results
    }
    found, (canary, stable) = [], opened
    for minute in minutes:
        canary, new = _arm("canary", values, minute, len(latencies), (canary, in_flight))
        stable, old = _arm("stable", values, minute, len(latencies), (stable, in_flight))
        found.append(Batch(minute, new, old))
    return found, (canary, stable)


def _arm(
    name: str, values: _Values, minute: int, latencies: int, opened: tuple[UnansweredRequests, float]
) -> tuple[UnansweredRequests, Arm]:
    def count(of: str) -> Count:
        return values.get(f"{name}_{of}", {}).get(minute, 0)

    before, in_flight = opened
    requests, failed = count("requests"), count("5xx")
    after, unanswered = before.after(requests, sum(map(count, _ANSWERS)), failed=failed, in_flight=in_flight)
    return after, Arm(
        requests=requests,
        errors=failed + unanswered,
        timed=count("timed"),
        slower=tuple(count(f"slower{number}") for number in range(latencies)),
    )


def minute_of(timestamp: str, period: int, *, earlier: int = 0) -> int:
    """The number of a minute since 1970, `earlier` seconds before the timestamp."""
    return (int(_moment(timestamp).timestamp()) - earlier) // period


def start_of(minute: int, period: int) -> str:
    return datetime.fromtimestamp(minute * period, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(timestamp: str) -> datetime:
    moment = datetime.fromisoformat(timestamp)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
