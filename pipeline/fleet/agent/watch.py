"""Metrics of an instance: reports of neuron-monitor become events of the fleet's log, from which CloudWatch extracts
them.

They use the embedded metric format, so an instance may write to one log and needs no other permission: PutMetricData
cannot be limited to a resource. Alarms and rollouts act on these figures, so a value that no device can have never
becomes one: text, NaN, negative or out of bounds.
"""

import json
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from nxpipe.pipeline.artifacts.contract import COMPILERS
from nxpipe.pipeline.util.aws import client, convert_sdk_errors
from nxpipe.pipeline.util.errors import AwsError, NotReady

MonitorReport = Mapping[str, Any]

_PERCENT: Final = 110  # of a core's time; rounding may exceed 100
_BYTES: Final = 2**50  # on one core
_FAILURES: Final = 10**12
_DEVICES: Final = 4096


class ReportInvalid(Exception):
    """A report with a value that no device can have; the message names it."""


@dataclass(frozen=True)
class Figures:
    """Figures of one report; None if absent, as on an instance whose server has not started."""

    utilisation: float | None  # of all cores' time, idle cores included
    fullest_core: int | None  # bytes
    hardware_failures: int


def read_figures(report: MonitorReport) -> Figures:
    """Figures of a report. A group that was not measured has an `error` and counts as absent."""
    failures = [
        _number(_table(group, "error_summary"), "hardware", _FAILURES) for group in _groups(report, "execution_stats")
    ]
    return Figures(
        utilisation=_utilisation(report),
        fullest_core=max(_memory(report).values(), default=None),
        hardware_failures=int(sum(failures)),
    )


def _groups(report: MonitorReport, kind: str) -> Iterator[MonitorReport]:
    runtimes = report.get("neuron_runtime_data") or ()
    if not isinstance(runtimes, list | tuple):
        raise ReportInvalid("neuron_runtime_data is not a list")
    for runtime in runtimes:
        group = _table({"runtime": runtime}, "runtime", "report", kind)
        if group and not group.get("error"):
            yield group


def _utilisation(report: MonitorReport) -> float | None:
    hardware = _table(report, "neuron_hardware_info")
    cores = math.prod(
        _number(hardware, name, _DEVICES) for name in ("neuron_device_count", "neuroncore_per_device_count")
    )
    used = [
        _number(_table(cores, core), "neuroncore_utilization", _PERCENT)
        for group in _groups(report, "neuroncore_counters")
        for cores in [_table(group, "neuroncores_in_use")]
        for core in cores
    ]
    return sum(used) / 100 / cores if used and cores else None


def _memory(report: MonitorReport) -> Counter[str]:
    """Bytes by core, summed over the processes that share it."""
    used: Counter[str] = Counter()
    for group in _groups(report, "memory_used"):
        cores = _table(group, "neuron_runtime_used_bytes", "usage_breakdown", "neuroncore_memory_usage")
        for core in cores:
            parts = _table(cores, core)
            used[core] += int(sum(_number(parts, part, _BYTES) for part in parts))
    return used


def _table(within: MonitorReport, *path: str) -> MonitorReport:
    """A nested table; empty if absent."""
    table: Any = within
    for name in path:
        table = table.get(name) or {}
        if not isinstance(table, dict):
            raise ReportInvalid(f"{name!r:.40} is not a table")
    return table  # type: ignore[no-any-return]


def _number(within: MonitorReport, name: str, most: int) -> float:
    """A number; zero if absent."""
    number = within.get(name)
    if number is None:
        return 0
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most:
        raise ReportInvalid(f"{name!r:.40} is not a number from 0 to {most}")
    return number


NAMESPACE: Final = "nxpipe"
_OF_HARDWARE: Final = {"status_type": "hardware"}


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    value: float
    only: tuple[tuple[str, str], ...] = ()  # dimensions beyond project and fleet


def fleet_metrics(figures: Figures, compiled: int) -> list[Metric]:
    """Metrics of one report. An absent figure is not sent: it is not a zero."""
    sent = [
        Metric("execution_status_total", "Count", figures.hardware_failures, tuple(_OF_HARDWARE.items())),
        Metric("compile_events_total", "Count", compiled),
    ]
    if figures.utilisation is not None:
        sent.append(Metric("neuroncore_utilization_ratio", "None", figures.utilisation))
    if figures.fullest_core is not None:
        sent.append(Metric("neuroncore_memory_usage_bytes", "Bytes", figures.fullest_core))
    return sent


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


_RUNTIME: Final = ("neuroncore_counters", "memory_used", "execution_stats")
_MAX_BYTES: Final = 2**20  # of one report; that of a trn2.48xlarge has some hundred thousand
_GRACE: Final = 5  # seconds for the monitor to exit


@dataclass
class Compilers:
    """Counts compiler processes since the last count: on a serving fleet there should never be one."""

    processes: Path
    _seen: frozenset[str] = field(default=frozenset())

    def begun(self) -> int:
        running = frozenset(process.name for process in self.processes.glob("[0-9]*") if _compiles(process))
        begun = len(running - self._seen)
        self._seen = running
        return begun


@dataclass(frozen=True)
class FleetLog:
    """The fleet's log group, with one stream per instance."""

    group: str
    instance: str
    logs: Any

    @classmethod
    def open(cls, group: str, instance: str, region: str) -> "FleetLog":
        logs = client("logs", region)
        already = logs.exceptions.ResourceAlreadyExistsException  # created before a restart
        with convert_sdk_errors(f"create a stream in the log {group}"), suppress(already):
            logs.create_log_stream(logGroupName=group, logStreamName=instance)
        return cls(group, instance, logs)

    def write(self, at: int, text: str) -> None:
        with convert_sdk_errors(f"write into the log {self.group}"):
            self.logs.put_log_events(
                logGroupName=self.group,
                logStreamName=self.instance,
                logEvents=[{"timestamp": at, "message": text}],
            )


def watch(
    monitor: str,
    period: int,
    dimensions: dict[str, str],
    log: FleetLog,
    compilers: Compilers,
    say: Callable[[str], None],
) -> None:
    """Runs until the monitor exits, which is an error. An invalid report, or one that AWS did not accept, is printed
    and dropped: the next one is newer.
    """
    with _reports(monitor, period) as reports:
        for report in reports:
            at = int(time.time() * 1000)
            try:
                sent = fleet_metrics(read_figures(report), compilers.begun())
                log.write(at, log_event(at, dimensions, log.instance, sent))
            except ReportInvalid as wrong:
                say(f"invalid report of {monitor} ({wrong}); dropped")
            except AwsError as lost:
                say(f"{lost}; continuing")


@contextmanager
def _reports(monitor: str, period: int) -> Iterator[Iterator[dict[str, Any]]]:
    with TemporaryDirectory() as folder:
        settings = Path(folder, "monitor.json")
        kinds = [{"type": kind} for kind in _RUNTIME]
        document = {"period": f"{period}s", "neuron_runtimes": [{"tag_filter": ".*", "metrics": kinds}]}
        settings.write_text(json.dumps({**document, "system_metrics": []}))
        command = [monitor, "-c", str(settings)]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        except OSError as missing:
            raise NotReady(
                f"{monitor} cannot be started ({missing.strerror}); install aws-neuronx-tools in the AMI, or name the "
                "program with --monitor"
            ) from missing
        try:
            yield _documents(process, monitor)
        finally:
            _end(process)


def _documents(process: "subprocess.Popen[bytes]", monitor: str) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    while line := process.stdout.readline(_MAX_BYTES + 1):
        if len(line) > _MAX_BYTES:
            raise NotReady(f"{monitor} wrote a line of more than {_MAX_BYTES} bytes, which is not a report")
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as broken:
            raise NotReady(f"{monitor} wrote no valid report ({broken}): {line[:80]!r}") from broken
        if not isinstance(document, dict):
            raise NotReady(f"{monitor} wrote no valid report: {line[:80]!r}")
        yield document
    raise NotReady(f"{monitor} exited with {process.wait()}; see its output above, and restart it")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _compiles(process: Path) -> bool:
    """Matched by argument: the compiler is a script, so its program is an interpreter."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")[:2]
    except OSError:
        return False  # it has exited since
    return any(Path(word.decode(errors="replace")).name in COMPILERS for word in words if word)
