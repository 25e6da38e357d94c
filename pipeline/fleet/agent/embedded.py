"""Metrics as lines of a log, from which CloudWatch takes them (its embedded metric format).

So an instance needs the right to write into one log and no other: the call that takes metrics knows no resource that a
permission could be for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.pipeline.fleet.agent.report import Figures

NAMESPACE: Final = "nxpipe"
_OF_HARDWARE: Final = {"status_type": "hardware"}


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    value: float
    only: tuple[tuple[str, str], ...] = ()  # more dimensions than project and fleet


def metrics(found: Figures, compiled: int) -> list[Metric]:
    """What is not known is not sent: an absent figure is not a zero."""
    always = [
        Metric("execution_status_total", "Count", found.hardware_failures, tuple(_OF_HARDWARE.items())),
        Metric("compile_events_total", "Count", compiled),
    ]
    if found.utilisation is not None:
        always.append(Metric("neuroncore_utilization_ratio", "None", found.utilisation))
    if found.fullest_core is not None:
        always.append(Metric("neuroncore_memory_usage_bytes", "Bytes", found.fullest_core))
    return always


def event(at: int, dimensions: Mapping[str, str], instance: str, sent: Sequence[Metric]) -> str:
    """`at` is in milliseconds. The instance is told in the log, and is no dimension: a series is a fleet's."""
    more = {name: value for each in sent for name, value in each.only}
    directives = [
        {
            "Namespace": NAMESPACE,
            "Dimensions": [[*dimensions, *(name for name, _ in only)]],
            "Metrics": [{"Name": each.name, "Unit": each.unit} for each in sent if each.only == only],
        }
        for only in dict.fromkeys(each.only for each in sent)
    ]
    document: dict[str, Any] = {
        "_aws": {"Timestamp": at, "CloudWatchMetrics": directives},
        **dimensions,
        **more,
        "instance": instance,
        **{each.name: each.value for each in sent},
    }
    return json.dumps(document, separators=(",", ":"))
