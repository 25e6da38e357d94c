"""How the stable version has done lately: from that come the latencies that a plan freezes, and what it can detect."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from nxpipe.pipeline.rollout.machine import Machine

_DAY: Final = 86_400  # seconds; the longest period that CloudWatch counts over
_QUANTILES: Final = ("p50", "p75", "p90", "p95", "p99")
_BEYOND: Final = (1.25, 1.6)  # of p99
FEWEST: Final = 1_000  # requests, of which ten are slower than p99
_MINUTES: Final = 180
_NAMESPACE: Final = "AWS/ApplicationELB"
_GOOD: Final = (2, 3, 4)  # hundreds: answers of targets; what is none of them has failed
_LATENCY: Final = "TargetResponseTime"


@dataclass(frozen=True)
class History:
    """`latencies` are none where there were too few requests to know them."""

    timed: int  # requests
    latencies: tuple[float, ...]  # seconds, in the order that a plan has them
    rps: float
    error_rate: float

    @property
    def known(self) -> bool:
        return bool(self.latencies)


def history(machine: Machine, colour: str, minute: int) -> History:
    """`minute` is how many seconds a minute of the plan has."""
    timed, latencies = _latencies(machine, colour)
    asked = {"requests": "RequestCount"} | {f"good{kind}": f"HTTPCode_Target_{kind}XX_Count" for kind in _GOOD}
    counts = machine.metrics(
        [_query(machine, colour, name, metric, "Sum", minute) for name, metric in asked.items()],
        datetime.now(UTC) - timedelta(seconds=_MINUTES * minute),
    )
    requests, minutes = sum(counts["requests"]), sum(1 for each in counts["requests"] if each)
    good = sum(sum(counts[f"good{kind}"]) for kind in _GOOD)
    return History(
        timed,
        latencies,
        rps=requests / (minutes * minute) if minutes else 0.0,
        error_rate=max(0.0, 1 - good / requests) if requests else 0.0,
    )


def _latencies(machine: Machine, colour: str) -> tuple[int, tuple[float, ...]]:
    """Of the fullest day among the last: percentiles of several days cannot be put together."""
    statistics = {"timed": "SampleCount", **{name: name for name in _QUANTILES}}
    asked = [_query(machine, colour, name, _LATENCY, each, _DAY) for name, each in statistics.items()]
    days = machine.metrics(asked, datetime.now(UTC) - timedelta(days=2))
    if not days["timed"]:
        return 0, ()
    fullest = max(range(len(days["timed"])), key=days["timed"].__getitem__)
    timed = int(days["timed"][fullest])
    if timed < FEWEST:
        return timed, ()
    quantiles = [days[name][fullest] for name in _QUANTILES]
    # Percentiles are estimated one by one: of nearly equal ones the higher may come out lower.
    return timed, tuple(sorted([*quantiles, *(quantiles[-1] * each for each in _BEYOND)]))


def _query(machine: Machine, colour: str, id_: str, metric: str, statistic: str, period: int) -> dict[str, Any]:
    dimensions = {"LoadBalancer": machine.front.balancer, "TargetGroup": machine.front.colours[colour]["series"]}
    return {
        "Id": id_,
        "MetricStat": {
            "Metric": {
                "Namespace": _NAMESPACE,
                "MetricName": metric,
                "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
            },
            "Period": period,
            "Stat": statistic,
        },
    }
