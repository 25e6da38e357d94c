"""Requests that got no answer at all, from two counts that need not fall into the same minute.

A target that hangs, crashes or closes the connection has no answer: the load balancer sends a 502 or a 504 in its
place, which it counts for itself and not for the target group. What is left is the difference: a request was sent to
the group, and no target answered it.

A request may be counted in one minute and its answer in the next, so that the difference of one minute says little,
and the balance of all minutes is kept: how many requests were open at the end of each. Of those, the ones of the last
minute that came within the slowest latency of its end may still be in flight. What remains above the highest remainder
so far is new, and counts as unanswered. So healthy versions have none, however much of their traffic is in flight, and
a version that stops to answer has more in every minute.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.canary.counts import Arm, Batch, Count, is_whole


@dataclass(frozen=True)
class UnansweredRequests:
    """Requests without an answer, since the first minute of a rollout."""

    now: int = 0
    most: int = 0  # that were overdue at any time, as far as they have been counted
    busiest: int = 0  # requests in one minute: at most so many were open when the rollout began

    @staticmethod
    def from_json(document: Sequence[int]) -> "UnansweredRequests":
        return UnansweredRequests(*document)

    def as_json(self) -> list[int]:
        return [self.now, self.most, self.busiest]

    def after(
        self, requests: Count, answers: Count, *, failed: Count, in_flight: float
    ) -> tuple["UnansweredRequests", Count]:
        """A minute later, and how many requests have proved to be without an answer: at most so many as the minute has
        beside its `failed` ones, the rest in the next. `in_flight` is the share of a minute's requests that may be open
        at its end. A minute that cannot be changes nothing.
        """
        if not all(is_whole(count) and count >= 0 for count in (requests, answers, failed)):
            return self, 0
        busiest = max(self.busiest, int(requests))
        now = max(-busiest, self.now + int(requests) - int(answers))
        overdue = now - math.ceil(int(requests) * in_flight)
        proved = max(0, min(overdue - self.most, int(requests - failed)))
        return UnansweredRequests(now, self.most + proved, busiest), proved


Results: TypeAlias = Sequence[Mapping[str, Any]]  # MetricDataResults of one answer
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
    """`arms` are target groups by the name of the arm. Trimmed counts leave out what is at most their lower bound, so
    that they count the requests that took longer.
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
    """CloudWatch may answer in part, when it is asked again for the rest."""
    return all(result.get("StatusCode", "Complete") == "Complete" for result in results)


def batches(
    results: Results,
    minutes: Iterable[int],
    latencies: Sequence[float],
    period: int,
    opened: tuple[UnansweredRequests, UnansweredRequests],
) -> tuple[list[Batch], tuple[UnansweredRequests, UnansweredRequests]]:
    """Of the given minutes, each with both arms; and how many requests are open after them, canary and stable. Where no
    latency is known, a request may take a minute.
    """
    in_flight = min(1.0, latencies[-1] / period) if latencies else 1.0
    values: _Values = {
        result["Id"]: {
            minute_of(timestamp, period): value
            for timestamp, value in zip(result["Timestamps"], result["Values"], strict=True)
        }
        for result in results
    }
    made, (canary, stable) = [], opened
    for minute in minutes:
        canary, new = _arm("canary", values, minute, len(latencies), (canary, in_flight))
        stable, old = _arm("stable", values, minute, len(latencies), (stable, in_flight))
        made.append(Batch(minute, new, old))
    return made, (canary, stable)


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
    """Minutes are counted from 1970 on. The one that was so many seconds earlier, if that is asked for."""
    return (int(_moment(timestamp).timestamp()) - earlier) // period


def start_of(minute: int, period: int) -> str:
    return datetime.fromtimestamp(minute * period, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(timestamp: str) -> datetime:
    moment = datetime.fromisoformat(timestamp)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
