"""Reports of neuron-monitor: figures of a fleet, and samples of all that the table of measures names.

Alarms and rollouts act on these figures, so a value that no device can have never becomes one: text, NaN, negative or
out of bounds. A group that was not measured has an `error` and counts as absent.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nxpipe.pipeline.config.device_measures import (
    DEVICE_MEASURES,
    HARDWARE_LABELS,
    INSTANCE_LABELS,
    RUNTIME_LABEL,
    DeviceMeasure,
)

MonitorReport = Mapping[str, Any]

_PERCENT: Final = 110  # of a core's time; rounding may exceed 100
_BYTES: Final = 2**50  # on one core
_FAILURES: Final = 10**12
_DEVICES: Final = 4096
_LONGEST_LABEL: Final = 256
_BOUNDS: Final[Mapping[str, float]] = {
    "share of time": _PERCENT,
    "bytes": _BYTES,
    "seconds": 10**6,
    "count": _FAILURES,
    "a minute": _FAILURES,
    "a second": 10**18,
    "US dollars": 10**9,
}
_VCPU: Final = ("runtime-vcpu", "vcpu")  # of all vCPUs, or of one for each thread; at most the whole is shown
_PARTS: Final = {"user": ("user", "nice"), "system": ("system", "io_wait", "irq", "soft_irq")}
_OLDER: Final = {"effective_flops": "flops"}  # as the documents name it


class ReportInvalid(Exception):
    """A report with a value that no device can have; the message names it."""


@dataclass(frozen=True)
class Figures:
    """Figures of one report; None if absent, as on an instance whose server has not started."""

    utilisation: float | None  # of all cores' time, idle cores included
    fullest_core: int | None  # bytes
    hardware_failures: int


def read_figures(report: MonitorReport) -> Figures:
    """Figures of a fleet from one report."""
    failures = [
        _number(_table(group, "error_summary"), "hardware", _FAILURES) for group in _groups(report, "execution_stats")
    ]
    return Figures(
        utilisation=_utilisation(report),
        fullest_core=max(_memory(report).values(), default=None),
        hardware_failures=int(sum(failures)),
    )


class Sample(NamedTuple):
    """One figure of a report, in the unit of its row."""

    measure: DeviceMeasure
    labels: Mapping[str, str]
    value: float


def samples(report: MonitorReport) -> Iterator[Sample]:
    """All figures of a report, by the rows of the table."""
    system = _system(report)
    for measure in DEVICE_MEASURES.values():
        if not measure.prometheus:
            continue
        if not measure.is_of_runtime:
            yield from _found(measure, system, measure.path, {})
            continue
        for runtime in _runtimes(report):
            labels = {RUNTIME_LABEL: runtime_tag(runtime)}
            yield from _found(measure, _table(runtime, "report"), measure.path, labels)


def instance_labels(report: MonitorReport) -> dict[str, str]:
    """The labels that every metric of the instance has."""
    info = _table(report, "instance_info")
    return {label: _text(info.get(name)) for label, name in INSTANCE_LABELS.items()}


def hardware_labels(report: MonitorReport) -> dict[str, str]:
    info = _table(report, "neuron_hardware_info")
    return {name: _text(info.get(name)) for name in HARDWARE_LABELS}


def runtime_tag(runtime: MonitorReport) -> str:
    """The name of a process: its tag, or its number."""
    return _text(runtime.get("neuron_runtime_tag") or runtime.get("pid"))


def _system(report: MonitorReport) -> dict[str, Any]:
    """The groups of the instance, with the time of its vCPUs as Prometheus has it."""
    system = dict(_table(report, "system_data"))
    usage = _table(system, "vcpu_usage")
    average = _table(usage, "average_usage")
    ratios = {kind: min(sum(_number(average, part, 10**6) for part in parts), 100.0) for kind, parts in _PARTS.items()}
    present = {"count": len(_table(usage, "usage_data")), "ratios": ratios} if average else {}
    return {**system, "vcpu_usage": {**present, "error": usage.get("error")}, "nxpipe": report.get("nxpipe")}


def _found(measure: DeviceMeasure, node: Any, path: Sequence[str], labels: Mapping[str, str]) -> Iterator[Sample]:
    """The figures below a node. An absent one is left out: it is not a zero."""
    if node is None:
        return
    if not path:
        most = 10**6 if measure.key in _VCPU else _BOUNDS[measure.unit]
        value = _number({measure.key: node}, measure.key, most) * measure.scale
        yield Sample(measure, labels, min(value, 1.0) if measure.key in _VCPU else value)
        return
    part, rest = path[0], path[1:]
    name = part[1:-1]
    if part[0] == "[":
        if not isinstance(node, list):
            raise ReportInvalid(f"{measure.key!r} is not in a list")
        for element in node:
            index = _table({"element": element}, "element").get(name)
            yield from _found(measure, element, rest, {**labels, name: _text(index)})
        return
    table = _table({part: node}, part)
    if table.get("error"):
        return
    if part[0] == "{":
        known = measure.values.get(name)
        for key, value in table.items():
            if known is None or key in known:
                yield from _found(measure, value, rest, {**labels, name: _text(key)})
        return
    yield from _found(measure, table.get(part, table.get(_OLDER.get(part, part))), rest, labels)


def _runtimes(report: MonitorReport) -> Iterator[MonitorReport]:
    runtimes = report.get("neuron_runtime_data") or ()
    if not isinstance(runtimes, list | tuple):
        raise ReportInvalid("neuron_runtime_data is not a list")
    for runtime in runtimes:
        yield _table({"runtime": runtime}, "runtime")


def _groups(report: MonitorReport, kind: str) -> Iterator[MonitorReport]:
    for runtime in _runtimes(report):
        group = _table(runtime, "report", kind)
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


def _number(within: MonitorReport, name: str, most: float) -> float:
    """A number; zero if absent."""
    number = within.get(name)
    if number is None:
        return 0
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most:
        raise ReportInvalid(f"{name!r:.40} is not a number from 0 to {most}")
    return number


def _text(value: Any) -> str:
    """A label. Values that are absent, or no text or number, are empty."""
    text = str(value) if isinstance(value, str | int) else ""
    if len(text) > _LONGEST_LABEL:
        raise ReportInvalid(f"{text[:40]!r}... is too long for a name")
    return text
