"""What neuron-monitor reports about an instance, as the few figures that are watched of a fleet."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """None where a report says nothing of it, as it does of an instance whose server has not begun."""

    utilisation: float | None  # of all cores' time, those included that nobody uses
    fullest_core: int | None  # bytes
    hardware_failures: int


def figures(report: Report) -> Figures:
    """A group that could not be measured says so in its `error`, and counts as absent."""
    return Figures(
        utilisation=_utilisation(report),
        fullest_core=max(_memory(report).values(), default=None),
        hardware_failures=sum(
            _count(group, "error_summary", "hardware") for group in _groups(report, "execution_stats")
        ),
    )


def _groups(report: Report, kind: str) -> Iterator[Mapping[str, Any]]:
    for runtime in report.get("neuron_runtime_data") or ():
        group = (runtime.get("report") or {}).get(kind) or {}
        if group and not group.get("error"):
            yield group


def _utilisation(report: Report) -> float | None:
    hardware = report.get("neuron_hardware_info") or {}
    cores = _count(hardware, "neuron_device_count") * _count(hardware, "neuroncore_per_device_count")
    used = [
        float(core.get("neuroncore_utilization") or 0)
        for group in _groups(report, "neuroncore_counters")
        for core in (group.get("neuroncores_in_use") or {}).values()
    ]
    return sum(used) / 100 / cores if used and cores else None


def _memory(report: Report) -> Counter[str]:
    """Of each core, whichever processes share it."""
    held: Counter[str] = Counter()
    for group in _groups(report, "memory_used"):
        shares = (group.get("neuron_runtime_used_bytes") or {}).get("usage_breakdown") or {}
        for core, parts in (shares.get("neuroncore_memory_usage") or {}).items():
            held[core] += sum(int(size or 0) for size in parts.values())
    return held


def _count(group: Mapping[str, Any], *path: str) -> int:
    found: Any = group
    for name in path:
        found = (found or {}).get(name)
    return int(found or 0)
