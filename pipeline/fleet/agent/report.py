"""What neuron-monitor reports about an instance, as the few figures that are watched of a fleet.

Alarms and rollouts act on them, so nothing becomes a figure that no device can have: text, NaN, what is negative or
beyond all bounds.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Report = Mapping[str, Any]

_PERCENT: Final = 110  # of a core's time; rounding may leave a little more than all of it
_BYTES: Final = 2**50  # on one core
_FAILURES: Final = 10**12
_DEVICES: Final = 4096


class ReportInvalid(Exception):
    """A report that no device can have caused; the message says which part of it."""


@dataclass(frozen=True)
class Figures:
    """None where a report says nothing of it, as it does of an instance whose server has not begun."""

    utilisation: float | None  # of all cores' time, those included that nobody uses
    fullest_core: int | None  # bytes
    hardware_failures: int


def figures(report: Report) -> Figures:
    """A group that could not be measured says so in its `error`, and counts as absent."""
    failures = [
        _number(_table(group, "error_summary"), "hardware", _FAILURES) for group in _groups(report, "execution_stats")
    ]
    return Figures(
        utilisation=_utilisation(report),
        fullest_core=max(_memory(report).values(), default=None),
        hardware_failures=int(sum(failures)),
    )


def _groups(report: Report, kind: str) -> Iterator[Report]:
    runtimes = report.get("neuron_runtime_data") or ()
    if not isinstance(runtimes, list | tuple):
        raise ReportInvalid("neuron_runtime_data is no list")
    for runtime in runtimes:
        group = _table({"runtime": runtime}, "runtime", "report", kind)
        if group and not group.get("error"):
            yield group


def _utilisation(report: Report) -> float | None:
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


def _memory(report: Report) -> Counter[str]:
    """Of each core, whichever processes share it."""
    held: Counter[str] = Counter()
    for group in _groups(report, "memory_used"):
        cores = _table(group, "neuron_runtime_used_bytes", "usage_breakdown", "neuroncore_memory_usage")
        for core in cores:
            parts = _table(cores, core)
            held[core] += int(sum(_number(parts, part, _BYTES) for part in parts))
    return held


def _table(within: Report, *path: str) -> Report:
    """What is absent is empty."""
    found: Any = within
    for name in path:
        found = found.get(name) or {}
        if not isinstance(found, dict):
            raise ReportInvalid(f"{name!r:.40} is no table")
    return found  # type: ignore[no-any-return]


def _number(within: Report, name: str, most: int) -> float:
    """What is absent is zero."""
    found = within.get(name)
    if found is None:
        return 0
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= most:
        raise ReportInvalid(f"{name!r:.40} is not a number from 0 to {most}")
    return found
