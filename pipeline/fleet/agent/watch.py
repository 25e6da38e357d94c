"""Metrics of an instance: reports of neuron-monitor become events of the fleet's log, from which CloudWatch extracts
them.

They use the embedded metric format, so an instance may write to one log and needs no other permission: PutMetricData
cannot be limited to a resource. Names and units are those of `pipeline.config.device_measures`.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.config.device_measures import DEVICE_MEASURES, NAMESPACE
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


_RUNTIME: Final = ("neuroncore_counters", "memory_used", "execution_stats")


def watch(
    monitor: str,
    period: int,
    dimensions: dict[str, str],
    log: FleetLog,
    compilers: Compilers,
    say: Callable[[str], None],
) -> None:
    """Runs until the monitor exits, which is an error."""
    with monitor_reports(monitor, MonitorSettings.every(period, _RUNTIME, ())) as reports:
        publish(((report, compilers.begun()) for report in reports), monitor, dimensions, log, say)


def publish(
    reports: Iterable[tuple[MonitorReport, int]],
    monitor: str,
    dimensions: dict[str, str],
    log: FleetLog | PrintedLog,
    say: Callable[[str], None],
) -> None:
    """Write an event for each report, with the programs that were compiled in its period.

    An invalid report, or one that AWS did not accept, is printed and dropped: the next one is newer.
    """
    for report, compiled in reports:
        at = int(time.time() * 1000)
        try:
            sent = fleet_metrics(read_figures(report), compiled)
            log.write(at, log_event(at, dimensions, log.instance, sent))
        except ReportInvalid as wrong:
            say(f"invalid report of {monitor} ({wrong}); dropped")
        except AwsError as lost:
            say(f"{lost}; continuing")
