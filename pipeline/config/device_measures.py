"""The table of what is measured on devices: the field of neuron-monitor's report that a figure is read from, and its
names in Prometheus and CloudWatch.

`nxpipe monitor`, `nxpipe agent watch`, the alarms and the dashboard draw from it. The names in Prometheus are those of
neuron-monitor's own exporter; the ones that it does not have begin with `nxpipe_`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

NAMESPACE: Final = "nxpipe"  # of CloudWatch
UPDATES_REFUSED: Final = "updates_refused_total"  # of a fleet whose instances follow its channel

# What a fleet has served, and for how long its instances ran, from which `nxpipe cost` follows.
GENERATED_TOKENS: Final = "generated_tokens_total"
PROMPT_TOKENS: Final = "prompt_tokens_total"
INSTANCE_SECONDS: Final = "instance_seconds_total"
INSTANCE_TYPE: Final = "InstanceType"  # the further dimension of INSTANCE_SECONDS


@dataclass(frozen=True)
class FleetSeries:
    """A metric of a fleet in CloudWatch. Its dimensions are project, fleet and `only`."""

    name: str
    unit: Literal["None", "Bytes", "Count"]
    statistic: Literal["Average", "Maximum", "Sum"]
    only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceMeasure:
    """One row. `source` is a path in a report: `{label}` stands for any key and names it, `[label]` for the elements of
    a list with the member `label`. Paths of a runtime begin below its `report`, others with the name of a table."""

    key: str
    title: str
    unit: str
    source: str
    prometheus: str = ""  # empty: the figure is of the fleet only
    is_counter: bool = False  # each report has an increment
    scale: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)  # labels with one value
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of labels that other members have too
    series: FleetSeries | None = None
    use: Literal["", "dashboard", "alarm"] = ""

    @property
    def is_of_runtime(self) -> bool:
        return self.source.split("/")[0] in RUNTIME_GROUPS

    @property
    def shown_unit(self) -> str:
        """The unit of one figure: a rate of the dashboard is a count in a report."""
        return "count" if self.is_counter else self.unit

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.source.split("/"))

    @property
    def varying(self) -> tuple[str, ...]:
        """The labels that the path names."""
        return tuple(part[1:-1] for part in self.path if part[0] in "{[")


RUNTIME_GROUPS: Final = ("neuroncore_counters", "memory_used", "neuron_runtime_vcpu_usage", "execution_stats")
SYSTEM_GROUPS: Final = ("vcpu_usage", "memory_info", "neuron_hw_counters")
INSTANCE_LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "instance_name": "instance_name",
        "instance_id": "instance_id",
        "instance_type": "instance_type",
        "availability_zone": "instance_availability_zone",
        "region": "instance_region",
        "subnet_id": "subnet_id",
    }
)  # by label of every metric: the field of the report's instance_info
RUNTIME_LABEL: Final = "runtime_tag"
CORE_MEMORY: Final = ("constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors")
HARDWARE_LABELS: Final = ("neuron_device_count", "neuron_device_memory_size", "neuroncore_per_device_count")

_CORES: Final = "neuroncore_counters/neuroncores_in_use/{neuroncore}"
_USED: Final = "memory_used/neuron_runtime_used_bytes"
_OF_CORES: Final = f"{_USED}/usage_breakdown/neuroncore_memory_usage/{{neuroncore}}"
_ECC: Final = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")

_ROWS: Final = (
    DeviceMeasure(
        "utilisation",
        "Tensor engine utilization",
        "share of time",
        f"{_CORES}/neuroncore_utilization",
        "neuroncore_utilization_ratio",
        scale=0.01,
        series=FleetSeries("neuroncore_utilization_ratio", "None", "Average"),
        use="dashboard",
    ),
    DeviceMeasure(
        "engines",
        "Utilization by engine",
        "share of time",
        f"{_CORES}/engines/{{engine}}",
        "nxpipe_engine_utilization_ratio",
        scale=0.01,
    ),
    DeviceMeasure(
        "flops", "Effective FLOPs", "a second", f"{_CORES}/effective_flops", "nxpipe_neuroncore_effective_flops"
    ),
    *(
        DeviceMeasure(
            f"core-{part.replace('_', '-')}",
            f"Memory of a core: {part}",
            "bytes",
            f"{_OF_CORES}/{part}",
            f"neuroncore_memory_usage_{part}",
            labels={"memory_location": "None"},
        )
        for part in CORE_MEMORY
    ),
    DeviceMeasure(
        "core-memory",
        "Memory of the core that uses most",
        "bytes",
        _OF_CORES,
        series=FleetSeries("neuroncore_memory_usage_bytes", "Bytes", "Maximum"),
        use="dashboard",
    ),
    DeviceMeasure(
        "runtime-memory",
        "Memory of a runtime",
        "bytes",
        f"{_USED}/{{memory_location}}",
        "neuron_runtime_memory_used_bytes",
        values={"memory_location": ("host", "neuron_device")},
    ),
    DeviceMeasure(
        "runtime-vcpu",
        "vCPU time of a runtime",
        "share of time",
        "neuron_runtime_vcpu_usage/vcpu_usage/{usage_type}",
        "neuron_runtime_vcpu_usage_ratio",
        scale=0.01,
    ),
    DeviceMeasure(
        "latency",
        "Latency of executions",
        "seconds",
        "execution_stats/latency_stats/total_latency/{percentile}",
        "execution_latency_seconds",
    ),
    DeviceMeasure(
        "executions",
        "Executions",
        "count",
        "execution_stats/execution_summary/{status_type}",
        "execution_status_total",
        is_counter=True,
    ),
    DeviceMeasure(
        "errors",
        "Errors of executions",
        "count",
        "execution_stats/error_summary/{error_type}",
        "execution_errors_total",
        is_counter=True,
    ),
    DeviceMeasure(
        "execution-errors",
        "Failed executions",
        "a minute",
        "execution_stats/error_summary/hardware",
        series=FleetSeries("execution_status_total", "Count", "Sum", {"status_type": "hardware"}),
        use="alarm",
    ),
    DeviceMeasure(
        "ecc",
        "ECC events",
        "count",
        "neuron_hw_counters/neuron_devices/[neuron_device_index]/{event_type}",
        "hardware_ecc_events_total",
        is_counter=True,
        values={"event_type": _ECC},
    ),
    DeviceMeasure(
        "compile-events",
        "Programs compiled on instances",
        "a minute",
        "nxpipe/compile_events",
        "nxpipe_compile_events_total",
        is_counter=True,
        series=FleetSeries("compile_events_total", "Count", "Sum"),
        use="alarm",
    ),
    DeviceMeasure("cost", "Cost so far", "US dollars", "nxpipe/cost_dollars", "nxpipe_cost_dollars"),
    *(
        DeviceMeasure(
            name.replace("_", "-"),
            f"Memory of the host: {name}",
            "bytes",
            f"memory_info/{name}",
            f"system_{name}",
        )
        for name in ("memory_total_bytes", "memory_used_bytes", "swap_total_bytes", "swap_used_bytes")
    ),
    DeviceMeasure("vcpus", "vCPUs of the host", "count", "vcpu_usage/count", "system_vcpu_count"),
    DeviceMeasure(
        "vcpu",
        "vCPU time of the host",
        "share of time",
        "vcpu_usage/ratios/{usage_type}",
        "system_vcpu_usage_ratio",
        scale=0.01,
    ),
)

DEVICE_MEASURES: Final[Mapping[str, DeviceMeasure]] = MappingProxyType({row.key: row for row in _ROWS})
