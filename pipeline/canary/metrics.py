"""What is asked of CloudWatch, and how many requests its answers say there were, minute by minute.

A minute is asked for until it has settled, and then taken as it is. A series without a value for it has counted
nothing: the load balancer publishes a count only when there is something to count.

An error is whatever is no good answer of a target: a 5XX, and a request that no target answered (`answers`). What the
load balancer sends in place of an answer, 502 and 504, is counted for all target groups together only.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.canary.answers import Open
from nxpipe.pipeline.canary.counts import Arm, Batch, Count

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
    results: Results, minutes: Iterable[int], latencies: Sequence[float], period: int, opened: tuple[Open, Open]
) -> tuple[list[Batch], tuple[Open, Open]]:
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


def _arm(name: str, values: _Values, minute: int, latencies: int, opened: tuple[Open, float]) -> tuple[Open, Arm]:
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


def beginning_of(minute: int, period: int) -> str:
    return datetime.fromtimestamp(minute * period, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(timestamp: str) -> datetime:
    moment = datetime.fromisoformat(timestamp)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
