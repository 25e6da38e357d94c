"""Reports of an instance: of AWS's neuron-monitor on a machine with devices, or of the emulated instance.

Both have the document that neuron-monitor prints; docs/reference/device-tools.md describes it.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.artifacts.contract import COMPILERS
from nxpipe.pipeline.config.device_measures import RUNTIME_GROUPS, SYSTEM_GROUPS
from nxpipe.pipeline.fleet.monitor.report import MonitorReport
from nxpipe.pipeline.util.errors import InputInvalid, NotReady
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file
from nxpipe.pipeline.util.process import signals_deferred

TOOLS: Final = "/opt/aws/neuron/bin"
_MAX_BYTES: Final = 2**20  # of one report; that of a trn2.48xlarge has some hundred thousand
_GRACE: Final = 5  # seconds for the monitor to exit
_DEFAULT: Final = 5.0  # seconds
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_SETTINGS: Final = 1 << 20

Periods: TypeAlias = Mapping[str, float]  # seconds by group


def has_devices(folder: Path) -> bool:
    """True if this machine has a Neuron device."""
    return any(folder.glob("neuron[0-9]*"))


def tool(name: str) -> str:
    """A program of aws-neuronx-tools: the one on PATH, else the one where the package installs it."""
    return shutil.which(name) or str(Path(TOOLS, name))


@dataclass(frozen=True)
class RuntimeSettings:
    """Groups that are reported of the processes whose tag matches."""

    tag: re.Pattern[str]
    groups: Periods


@dataclass(frozen=True)
class MonitorSettings:
    """A configuration of neuron-monitor."""

    runtimes: Sequence[RuntimeSettings]
    system: Periods

    @classmethod
    def every(
        cls,
        period: float = _DEFAULT,
        runtime: Sequence[str] = RUNTIME_GROUPS,
        system: Sequence[str] = SYSTEM_GROUPS,
    ) -> "MonitorSettings":
        """Groups of all processes and of the system."""
        runtimes = (RuntimeSettings(re.compile(".*"), dict.fromkeys(runtime, period)),)
        return cls(runtimes, dict.fromkeys(system, period))

    @classmethod
    def read(cls, path: Path) -> "MonitorSettings":
        """The settings of a file; InputInvalid if neuron-monitor would refuse it."""
        try:
            document = json_of(read_file(path, limit=_LONGEST_SETTINGS))
        except (OSError, DocumentInvalid) as fault:
            reason = getattr(fault, "strerror", None) or fault
            raise InputInvalid(f"{path} is no configuration of neuron-monitor ({reason}); pass a JSON file") from fault
        try:
            return cls._of(document)
        except _Wrong as wrong:
            raise InputInvalid(f"{path}: {wrong}; see docs/reference/device-tools.md") from wrong

    @classmethod
    def _of(cls, document: Any) -> "MonitorSettings":
        table = _members(document, "the configuration", ("period", "neuron_runtimes", "system_metrics"))
        period = _period(table, _DEFAULT)
        runtimes = []
        for runtime in _list(table, "neuron_runtimes"):
            own = _members(runtime, "an element of neuron_runtimes", ("tag_filter", "period", "metrics"))
            tag = own.get("tag_filter", ".*")
            try:
                pattern = re.compile(tag)
            except (re.error, TypeError, RecursionError) as fault:
                raise _Wrong(f"tag_filter {tag!r:.40} is not a regular expression") from fault
            groups = _periods(_list(own, "metrics"), RUNTIME_GROUPS, _period(own, period))
            runtimes.append(RuntimeSettings(pattern, groups))
        return cls(tuple(runtimes), _periods(_list(table, "system_metrics"), SYSTEM_GROUPS, period))

    @property
    def periods(self) -> tuple[float, ...]:
        """All periods that occur, the shortest first."""
        groups = [*(runtime.groups for runtime in self.runtimes), self.system]
        return tuple(sorted({period for each in groups for period in each.values()})) or (_DEFAULT,)

    def document(self) -> dict[str, Any]:
        """The configuration as neuron-monitor reads it."""
        return {
            "period": f"{self.periods[0]:g}s",
            "neuron_runtimes": [
                {"tag_filter": runtime.tag.pattern, "metrics": _metrics(runtime.groups)} for runtime in self.runtimes
            ],
            "system_metrics": _metrics(self.system),
        }


class _Wrong(Exception):
    """What is wrong with a configuration."""


def _members(document: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise _Wrong(f"{where} is not a table")
    unknown = sorted(document.keys() - set(known))
    if unknown:
        raise _Wrong(f"{where} has {unknown[0]!r:.40}, and takes {', '.join(known)}")
    return document


def _list(table: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = table.get(name) or ()
    if not isinstance(value, list | tuple):
        raise _Wrong(f"{name} is not a list")
    return value


def _period(table: Mapping[str, Any], otherwise: float) -> float:
    value = table.get("period")
    if value is None:
        return otherwise
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0.01 <= seconds <= 86_400:
        raise _Wrong(f"the period {value!r:.40} is not a duration from 10ms to 24h, such as 5s")
    return seconds


def _periods(metrics: Sequence[Any], known: Sequence[str], otherwise: float) -> Periods:
    periods: dict[str, float] = {}
    for metric in metrics:
        own = _members(metric, "a metric", ("type", "period"))
        kind = own.get("type")
        if not isinstance(kind, str) or kind not in known:
            raise _Wrong(f"there is no metric {kind!r:.40} here; known are {', '.join(known)}")
        periods[kind] = _period(own, otherwise)
    return periods


def _metrics(groups: Periods) -> list[dict[str, str]]:
    return [{"type": group, "period": f"{period:g}s"} for group, period in groups.items()]


@contextmanager
def monitor_reports(monitor: str, settings: MonitorSettings) -> Iterator[Iterator[dict[str, Any]]]:
    """The reports of a neuron-monitor, which ends with this context. If it exits first, NotReady."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "monitor.json")
        file.write_text(json.dumps(settings.document()))
        process = None
        try:
            with signals_deferred():
                process = _started([monitor, "-c", str(file)])
            yield _documents(process, monitor)
        finally:
            if process is not None:
                _end(process)


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    except OSError as missing:
        raise NotReady(
            f"{command[0]} cannot be started ({missing.strerror}); install aws-neuronx-tools in the AMI, or name the "
            "program with --monitor"
        ) from missing


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


def _compiles(process: Path) -> bool:
    """Matched by argument: the compiler is a script, so its program is an interpreter."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")[:2]
    except OSError:
        return False  # it has exited since
    return any(Path(word.decode(errors="replace")).name in COMPILERS for word in words if word)


@dataclass(frozen=True)
class Costs:
    """What an instance has cost: list prices, and the seconds that it has run at the start of the monitor."""

    region: str  # unless the report names one
    uptime: float
    _began: float = field(default_factory=time.monotonic)

    def so_far(self, report: MonitorReport) -> float | None:
        """US dollars; None without a list price."""
        from nxpipe.pipeline.config.prices import load_prices

        info = report.get("instance_info")
        own = info if isinstance(info, dict) else {}
        price = load_prices().of(own.get("instance_region") or self.region, str(own.get("instance_type")))
        hours = (self.uptime + time.monotonic() - self._began) / 3600
        return None if price is None else price * hours


def uptime() -> float:
    """Seconds since this machine was started; 0 where the kernel does not say."""
    try:
        return float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0


def annotated(report: MonitorReport, compiled: int, costs: Costs) -> dict[str, Any]:
    """The report with what neuron-monitor does not know: compile events of the period, and the cost so far."""
    cost = costs.so_far(report)
    return {**report, "nxpipe": {"compile_events": compiled} | ({} if cost is None else {"cost_dollars": cost})}
