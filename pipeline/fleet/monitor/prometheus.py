"""Metrics in Prometheus's format: those of devices, and those of a server under names that no runtime owns.

Metrics of devices have the names, labels and meanings of neuron-monitor's own exporter. Gauges are those of the last
report; a counter grows by the increment of each report. Metrics that neuron-monitor does not have begin with `nxpipe_`.
Metrics of a server have the names of `nxpipe serve`, which those of vLLM are translated to.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

from nxpipe.pipeline.config.device_measures import (
    DEVICE_MEASURES,
    INSTANCE_LABELS,
    RUNTIME_LABEL,
    DeviceMeasure,
)
from nxpipe.pipeline.fleet.monitor.report import MonitorReport, hardware_labels, instance_labels, samples
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware, NotReady

if TYPE_CHECKING:
    from prometheus_client import Counter
    from prometheus_client.metrics_core import Metric

_INSTANCE: Final = tuple(INSTANCE_LABELS)
_INFO: Final = ("instance_info", "EC2 instance information")
_HARDWARE: Final = ("neuron_hardware_info", "Neuron hardware information")
_Labelled = dict[tuple[str, ...], float]


def require_client() -> None:
    if find_spec("prometheus_client") is None:
        raise MissingSoftware("prometheus_client", "Prometheus's format", "run: pip install 'nxpipe[serve]'")


class DeviceExporter:
    """The metrics of the reports that it has been given; a collector of Prometheus's client."""

    def __init__(self) -> None:
        require_client()
        from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

        self.registry: CollectorRegistry = CollectorRegistry()
        for collector in (GCCollector, PlatformCollector, ProcessCollector):
            collector(registry=self.registry)
        self._counters = dict(self._of_rows())
        self._gauges: Mapping[str, _Labelled] = {}
        self._infos: Sequence[tuple[tuple[str, str], dict[str, str]]] = ()
        self.server: Sequence[Metric] = ()  # what was last read of the server, if there is one
        self.registry.register(self)

    def update(self, report: MonitorReport) -> None:
        """Take the figures of a report; ReportInvalid if no device can have them."""
        instance = instance_labels(report)
        found = [(measure, _values(measure, instance, labels), value) for measure, labels, value in samples(report)]
        infos = ((_INFO, instance), (_HARDWARE, instance | hardware_labels(report)))
        gauges: dict[str, _Labelled] = {}
        for measure, values, value in found:
            if measure.is_counter:
                self._counters[measure.key].labels(*values).inc(value)
            else:
                gauges.setdefault(measure.key, {})[values] = value
        self._gauges, self._infos = gauges, infos  # a scrape on another thread sees one report

    def collect(self) -> "Iterator[Metric]":
        """The gauges of the last report."""
        from prometheus_client.core import GaugeMetricFamily

        for key, labelled in self._gauges.items():
            measure = DEVICE_MEASURES[key]
            family = GaugeMetricFamily(measure.prometheus, measure.title, labels=_labels(measure))
            for values, value in labelled.items():
                family.add_metric(values, value)
            yield family
        for (name, title), labels in self._infos:
            family = GaugeMetricFamily(name, title, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), 1.0)
            yield family
        yield from self.server

    def describe(self) -> "list[Metric]":
        return []

    def exposition(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    @contextmanager
    def serve(self, host: str, port: int) -> Iterator[str]:
        """Serve /metrics while the context is open; the URL."""
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as fault:
            raise NotReady(f"{host}:{port} cannot be listened on ({fault.strerror}); pass another --port") from fault
        try:
            yield f"http://{host}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _of_rows(self) -> "Iterator[tuple[str, Counter]]":
        from prometheus_client import Counter

        for key, measure in DEVICE_MEASURES.items():
            if measure.is_counter:
                yield key, Counter(measure.prometheus, measure.title, _labels(measure), registry=self.registry)


def _labels(measure: DeviceMeasure) -> tuple[str, ...]:
    runtime = (RUNTIME_LABEL,) if measure.is_of_runtime else ()
    return (*_INSTANCE, *runtime, *measure.varying, *measure.labels)


def _values(measure: DeviceMeasure, instance: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
    known: dict[str, Any] = {**instance, **labels, **measure.labels}
    return tuple(known[name] for name in _labels(measure))


# Metrics of vLLM, by several releases, and the name of each in `nxpipe serve`.
_OF_VLLM: Final[Mapping[str, str]] = {
    "vllm:num_requests_running": "serving_requests_running",
    "vllm:num_requests_waiting": "serving_requests_waiting",
    "vllm:kv_cache_usage_perc": "serving_kv_cache_usage_ratio",
    "vllm:gpu_cache_usage_perc": "serving_kv_cache_usage_ratio",
    "vllm:prompt_tokens": "serving_prompt_tokens",
    "vllm:generation_tokens": "serving_generation_tokens",
    "vllm:prefix_cache_hits": "serving_prefix_reused_tokens",
    "vllm:request_success": "serving_requests_finished",
    "vllm:time_to_first_token_seconds": "serving_time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds": "serving_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds": "serving_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "serving_request_duration_seconds",
    "vllm_neuron:neff_execution_count": "serving_program_executions",
    "vllm_neuron:compilation_time_seconds": "serving_compilation_time_seconds",
    "vllm_neuron:startup_time_seconds": "serving_startup_time_seconds",
    "vllm_neuron:model_load_time_seconds": "serving_load_time_seconds",
}
_LABELS: Final = {"finished_reason": "reason", "model_name": "model", "bucket_name": "program", "rank_id": "rank"}
_OWN: Final = "serving_"
_LARGEST: Final = 8 << 20  # bytes of one answer
_SECONDS: Final = 5.0  # until a server has to answer


def server_metrics(url: str) -> "list[Metric]":
    """The metrics of a server under the names of `nxpipe serve`; NotReady if it does not answer with any."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise InputInvalid(f"{url!r} is no address of a server; pass one such as http://localhost:8000")
    address = address if address.endswith("/metrics") else f"{address.rstrip('/')}/metrics"
    try:
        with urlopen(address, timeout=_SECONDS) as answer:  # noqa: S310 - the scheme is http or https
            text = answer.read(_LARGEST + 1)
    except (OSError, HTTPException, ValueError) as fault:
        raise NotReady(f"{address} does not answer ({getattr(fault, 'reason', fault)}); start the server") from fault
    if len(text) > _LARGEST:
        raise NotReady(f"{address} answers with more than {_LARGEST:,} bytes, which are no metrics")
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text.decode()))
    except (ValueError, IndexError, KeyError) as fault:
        raise NotReady(f"{address} does not answer in Prometheus's text format ({fault})") from fault
    return list(_neutral(families))


def _neutral(families: "Iterable[Metric]") -> "Iterator[Metric]":
    """Families of a server by neutral names, each once; what has none is left out."""
    from prometheus_client.metrics_core import Metric

    seen: set[str] = set()
    for family in families:
        name = family.name if family.name.startswith(_OWN) else _OF_VLLM.get(family.name)
        if name is None or name in seen:
            continue
        seen.add(name)
        neutral = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            neutral.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        yield neutral
