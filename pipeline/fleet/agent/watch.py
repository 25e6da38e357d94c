"""Metrics of an instance: reports of neuron-monitor become events of the fleet's log, from which CloudWatch extracts
them.

They use the embedded metric format, so an instance may write to one log and needs no other permission: PutMetricData
cannot be limited to a resource. Names and units are those of `pipeline.config.device_measures`.
"""

import http.client
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.request import urlopen

from nxpipe.pipeline.config.device_measures import (
    DEVICE_MEASURES,
    GENERATED_TOKENS,
    INSTANCE_SECONDS,
    INSTANCE_TYPE,
    NAMESPACE,
    PROMPT_TOKENS,
)
from nxpipe.pipeline.fleet.monitor.report import Figures, MonitorReport, ReportInvalid, read_figures
from nxpipe.pipeline.fleet.monitor.source import Compilers, MonitorSettings, monitor_reports
from nxpipe.pipeline.util.aws import client, convert_sdk_errors
from nxpipe.pipeline.util.errors import AwsError


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    value: float
    only: tuple[tuple[str, str], ...] = ()  # dimensions beyond project and fleet


def fleet_metrics(figures: Figures, compiled: int) -> list[Metric]:
    """Metrics of one report. An absent figure is not sent: it is not a zero."""
    values = {
        "execution-errors": figures.hardware_failures,
        "compile-events": compiled,
        "utilisation": figures.utilisation,
        "core-memory": figures.fullest_core,
    }
    return [_metric(key, value) for key, value in values.items() if value is not None]


def _metric(key: str, value: float) -> Metric:
    series = DEVICE_MEASURES[key].series
    assert series is not None
    return Metric(series.name, series.unit, value, tuple(series.only.items()))


def log_event(at: int, dimensions: Mapping[str, str], instance: str, sent: Sequence[Metric]) -> str:
    """`at` is in milliseconds. The instance is a field and not a dimension: a metric belongs to a fleet."""
    more = {name: value for metric in sent for name, value in metric.only}
    directives = [
        {
            "Namespace": NAMESPACE,
            "Dimensions": [[*dimensions, *(name for name, _ in only)]],
            "Metrics": [{"Name": metric.name, "Unit": metric.unit} for metric in sent if metric.only == only],
        }
        for only in dict.fromkeys(metric.only for metric in sent)
    ]
    document: dict[str, Any] = {
        "_aws": {"Timestamp": at, "CloudWatchMetrics": directives},
        **dimensions,
        **more,
        "instance": instance,
        **{metric.name: metric.value for metric in sent},
    }
    return json.dumps(document, separators=(",", ":"))


@dataclass(frozen=True)
class FleetLog:
    """The fleet's log group, with one stream per instance, which the first event creates."""

    group: str
    instance: str
    region: str

    @classmethod
    def open(cls, group: str, instance: str, region: str) -> "FleetLog":
        """The log with its stream; AwsError if it cannot be written to."""
        log = cls(group, instance, region)
        assert log._logs is not None
        return log

    @cached_property
    def _logs(self) -> Any:
        logs = client("logs", self.region)
        already = logs.exceptions.ResourceAlreadyExistsException  # created before a restart
        with convert_sdk_errors(f"create a stream in the log {self.group}"), suppress(already):
            logs.create_log_stream(logGroupName=self.group, logStreamName=self.instance)
        return logs

    def write(self, at: int, text: str) -> None:
        logs = self._logs
        with convert_sdk_errors(f"write into the log {self.group}"):
            logs.put_log_events(
                logGroupName=self.group,
                logStreamName=self.instance,
                logEvents=[{"timestamp": at, "message": text}],
            )


@dataclass(frozen=True)
class PrintedLog:
    """A log on stdout, for a log driver or CloudWatch's own agent."""

    instance: str
    show: Callable[[str], None]

    def write(self, _: int, text: str) -> None:
        self.show(text)


TOKEN_COUNTERS: Final = {
    GENERATED_TOKENS: re.compile(r"^(?:serving_|vllm:)generation_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE),
    PROMPT_TOKENS: re.compile(r"^(?:serving_|vllm:)prompt_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE),
}
_LARGEST: Final = 8 << 20  # bytes of a server's metrics
_ANSWER: Final = 2.0  # seconds


@dataclass
class InstanceUse:
    """What an instance did since the last reading: seconds of its type, and tokens of its server if that counts them.

    A server that restarts begins at zero again."""

    type: str
    port: int
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._at, self._counted = self.now(), self._read()

    def metrics(self) -> list[Metric]:
        at, counted = self.now(), self._read()
        found = [Metric(INSTANCE_SECONDS, "Seconds", round(at - self._at, 3), ((INSTANCE_TYPE, self.type),))]
        for name, count in counted.items():
            before = self._counted.get(name, 0.0)
            found.append(Metric(name, "Count", count - before if count >= before else count))
        self._at, self._counted = at, self._counted | counted
        return found

    def _read(self) -> dict[str, float]:
        """The counters of the server; none while it does not answer, or if it generates no tokens."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=_ANSWER) as answer:
                text = answer.read(_LARGEST).decode(errors="replace")
            counted = {name: list(map(float, each.findall(text))) for name, each in TOKEN_COUNTERS.items()}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        return {name: sum(counts) for name, counts in counted.items() if counts and math.isfinite(sum(counts))}


_RUNTIME: Final = ("neuroncore_counters", "memory_used", "execution_stats")


def watch(
    monitor: str,
    period: int,
    dimensions: dict[str, str],
    log: FleetLog,
    compilers: Compilers,
    use: InstanceUse,
    say: Callable[[str], None],
) -> None:
    """Runs until the monitor exits, which is an error."""
    with monitor_reports(monitor, MonitorSettings.every(period, _RUNTIME, ())) as reports:
        publish(((report, compilers.begun()) for report in reports), monitor, dimensions, log, say, use)


def publish(
    reports: Iterable[tuple[MonitorReport, int]],
    monitor: str,
    dimensions: dict[str, str],
    log: FleetLog | PrintedLog,
    say: Callable[[str], None],
    use: InstanceUse | None = None,
) -> None:
    """Write an event for each report, with the programs that were compiled in its period.

    An invalid report, or one that AWS did not accept, is printed and dropped: the next one is newer.
    """
    for report, compiled in reports:
        at = int(time.time() * 1000)
        try:
            sent = [*fleet_metrics(read_figures(report), compiled), *(use.metrics() if use else ())]
            log.write(at, log_event(at, dimensions, log.instance, sent))
        except ReportInvalid as wrong:
            say(f"invalid report of {monitor} ({wrong}); dropped")
        except AwsError as lost:
            say(f"{lost}; continuing")
