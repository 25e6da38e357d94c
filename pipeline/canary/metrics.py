"""What is asked of CloudWatch, and how many requests its answers say there were, minute by minute.

A minute is asked for until it has settled, and then taken as it is. A series without a value for it has counted
nothing: the load balancer publishes a count only when there is something to count.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from pipeline.canary.counts import Arm, Batch, Count

Results: TypeAlias = Sequence[Mapping[str, Any]]  # MetricDataResults of one answer
_Values: TypeAlias = Mapping[str, Mapping[int, Count]]  # by the id of the query, by minute

_NAMESPACE: Final = "AWS/ApplicationELB"
_LATENCY: Final = "TargetResponseTime"
_COUNTS: Final = {
    "requests": ("RequestCount", "Sum"),
    "failed": ("HTTPCode_Target_5XX_Count", "Sum"),
    "unreached": ("TargetConnectionErrorCount", "Sum"),
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


def batches(results: Results, minutes: Iterable[int], latencies: int, period: int) -> list[Batch]:
    """Of the given minutes, each with both arms."""
    values: _Values = {
        result["Id"]: {
            minute_of(timestamp, period): value
            for timestamp, value in zip(result["Timestamps"], result["Values"], strict=True)
        }
        for result in results
    }
    return [
        Batch(minute, _arm("canary", values, minute, latencies), _arm("stable", values, minute, latencies))
        for minute in minutes
    ]


def _arm(name: str, values: _Values, minute: int, latencies: int) -> Arm:
    def count(of: str) -> Count:
        return values.get(f"{name}_{of}", {}).get(minute, 0)

    return Arm(
        requests=count("requests"),
        errors=count("failed") + count("unreached"),
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
