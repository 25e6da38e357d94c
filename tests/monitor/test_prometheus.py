"""Prometheus reads what neuron-monitor's own exporter would show: its names, its labels, its counters."""

import copy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nxpipe.emulator.hardware import instance
from nxpipe.emulator.run.counters import ProcessCounters, ProgramCounters
from nxpipe.pipeline.fleet.monitor.emulated_instance import EmulatedMonitor
from nxpipe.pipeline.fleet.monitor.prometheus import DeviceExporter, server_metrics
from nxpipe.pipeline.fleet.monitor.report import ReportInvalid, samples
from nxpipe.pipeline.fleet.monitor.source import Costs, MonitorSettings, annotated
from nxpipe.pipeline.util.errors import InputInvalid, NotReady
from tests.monitor.documents import INF2_XLARGE

EVERYWHERE = {"instance_name", "instance_id", "instance_type", "availability_zone", "region", "subnet_id"}
_CORE = {"runtime_tag", "neuroncore", "memory_location"}
# All names of the exporter, with the labels that are not everywhere.
LABELS: dict[str, set[str]] = {
    "neuroncore_utilization_ratio": {"runtime_tag", "neuroncore"},
    "neuroncore_memory_usage_constants": _CORE,
    "neuroncore_memory_usage_model_code": _CORE,
    "neuroncore_memory_usage_model_shared_scratchpad": _CORE,
    "neuroncore_memory_usage_runtime_memory": _CORE,
    "neuroncore_memory_usage_tensors": _CORE,
    "neuron_runtime_memory_used_bytes": {"runtime_tag", "memory_location"},
    "neuron_runtime_vcpu_usage_ratio": {"runtime_tag", "usage_type"},
    "execution_errors_total": {"runtime_tag", "error_type"},
    "execution_errors_created": {"runtime_tag", "error_type"},
    "execution_status_total": {"runtime_tag", "status_type"},
    "execution_status_created": {"runtime_tag", "status_type"},
    "execution_latency_seconds": {"runtime_tag", "percentile"},
    "hardware_ecc_events_total": {"event_type", "neuron_device_index"},
    "hardware_ecc_events_created": {"event_type", "neuron_device_index"},
    "system_memory_total_bytes": set(),
    "system_memory_used_bytes": set(),
    "system_swap_total_bytes": set(),
    "system_swap_used_bytes": set(),
    "system_vcpu_count": set(),
    "system_vcpu_usage_ratio": {"usage_type"},
    "instance_info": set(),
    "neuron_hardware_info": {"neuron_device_count", "neuron_device_memory_size", "neuroncore_per_device_count"},
}
_OF_CLIENT = ("python_", "process_")


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def _value(exporter: DeviceExporter, name: str, **labels: str) -> float:
    (found,) = (
        value
        for own, given, value in _samples(exporter.exposition().decode())
        if own == name and labels.items() <= given.items()
    )
    return found


def test_names_and_labels_are_those_of_neuron_monitor_s_exporter(tmp_path: Any) -> None:
    own = ProcessCounters(tmp_path)
    own._thread = object()  # type: ignore[assignment]  # the test writes
    program = own.load(ProgramCounters("decode", "0" * 32, range(2), {}))
    own.write()
    monitor = EmulatedMonitor(instance("inf2.xlarge"), MonitorSettings.every(0.01), tmp_path)
    program.complete(0.1)
    own.write()
    exporter = DeviceExporter()
    exporter.update(next(iter(monitor.reports())))
    found: dict[str, set[str]] = {}
    for name, labels, _ in _samples(exporter.exposition().decode()):
        if not name.startswith(_OF_CLIENT):
            found.setdefault(name, set()).update(labels)
    documented = {name: labels for name, labels in found.items() if not name.startswith("nxpipe_")}
    assert documented == {name: labels | EVERYWHERE for name, labels in LABELS.items()}
    assert {name.partition("_")[0] for name in found.keys() - LABELS.keys()} == {"nxpipe"}


def test_a_capture_of_a_real_machine_has_its_figures() -> None:
    exporter = DeviceExporter()
    exporter.update(INF2_XLARGE)
    assert _value(exporter, "neuroncore_utilization_ratio", neuroncore="0") == pytest.approx(0.894)
    assert _value(exporter, "neuron_runtime_memory_used_bytes", memory_location="neuron_device") == 141649980
    assert _value(exporter, "execution_status_total", status_type="completed", runtime_tag="2199") == 816
    assert _value(exporter, "instance_info", instance_type="inf2.xlarge", availability_zone="us-east-1d") == 1
    assert _value(exporter, "neuron_hardware_info", neuroncore_per_device_count="2") == 1


def test_counters_are_sums_of_reports_and_gauges_are_of_the_last_one() -> None:
    exporter = DeviceExporter()
    exporter.update(INF2_XLARGE)
    exporter.update(INF2_XLARGE)
    assert _value(exporter, "execution_status_total", status_type="completed") == 2 * 816
    exporter.update({**INF2_XLARGE, "neuron_runtime_data": None})
    assert _value(exporter, "execution_status_total", status_type="completed") == 2 * 816
    names = {name for name, _, _ in _samples(exporter.exposition().decode())}
    assert "neuroncore_utilization_ratio" not in names  # the process has ended


def test_vcpu_time_is_of_the_user_with_nice_and_of_the_system_with_waits_at_most_one() -> None:
    usage = {"user": 30.0, "nice": 10.0, "system": 60.0, "idle": 0.0, "io_wait": 30.0, "irq": 20.0, "soft_irq": 5.0}
    group = {"average_usage": usage, "usage_data": {"0": usage, "1": usage}, "context_switch_count": 1, "error": ""}
    exporter = DeviceExporter()
    exporter.update({**INF2_XLARGE, "system_data": {"vcpu_usage": group}})
    assert _value(exporter, "system_vcpu_usage_ratio", usage_type="user") == pytest.approx(0.4)
    assert _value(exporter, "system_vcpu_usage_ratio", usage_type="system") == 1.0
    assert _value(exporter, "system_vcpu_count") == 2


def test_the_documents_name_for_flops_is_read_too() -> None:
    report = copy.deepcopy(INF2_XLARGE)
    core = report["neuron_runtime_data"][0]["report"]["neuroncore_counters"]["neuroncores_in_use"]["0"]
    core["flops"] = core.pop("effective_flops")
    found = [sample.value for sample in samples(report) if sample.measure.key == "flops"]
    assert found == [875590474948, 0]


def test_a_group_with_an_error_is_absent() -> None:
    report = copy.deepcopy(INF2_XLARGE)
    report["neuron_runtime_data"][0]["report"]["execution_stats"]["error"] = "no permission"
    assert not any(sample.measure.source.startswith("execution_stats") for sample in samples(report))


@pytest.mark.parametrize("value", [-1, float("nan"), "1", True, [1], 1e30])
def test_a_figure_that_no_device_can_have_changes_nothing(value: Any) -> None:
    exporter = DeviceExporter()
    report = copy.deepcopy(INF2_XLARGE)
    report["neuron_runtime_data"][0]["report"]["execution_stats"]["error_summary"]["runtime"] = value
    with pytest.raises(ReportInvalid, match="'errors' is not a number"):
        exporter.update(report)
    assert "execution_status_total{" not in exporter.exposition().decode()


def test_the_cost_is_the_list_price_of_the_time_since_the_instance_was_started() -> None:
    costs = Costs("eu-west-1", 7200.0)
    report = annotated(INF2_XLARGE, 3, costs)
    assert report["nxpipe"]["cost_dollars"] == pytest.approx(2 * 0.7582, rel=1e-3)
    assert report["nxpipe"]["compile_events"] == 3
    unknown = {**INF2_XLARGE, "instance_info": {"instance_type": "trn9.metal"}, "nxpipe": {"cost_dollars": 1}}
    assert annotated(unknown, 0, costs)["nxpipe"] == {"compile_events": 0}


def test_metrics_are_served_until_the_exporter_ends() -> None:
    exporter = DeviceExporter()
    exporter.update(INF2_XLARGE)
    with exporter.serve("127.0.0.1", 0) as url:
        with urlopen(url) as answer:
            assert "neuroncore_utilization_ratio{" in answer.read().decode()
        port = url.split(":")[-1].split("/")[0]
        with pytest.raises(NotReady, match="pass another --port"), DeviceExporter().serve("127.0.0.1", int(port)):
            pass
    with pytest.raises(OSError, match="refused"):
        urlopen(url)


VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 7.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{model_name="m"} 2.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.5
# TYPE vllm_neuron:neff_execution_count_total counter
vllm_neuron:neff_execution_count_total{bucket_name="b",rank_id="0"} 5.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16"} 1.0
"""


@pytest.fixture
def vllm() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(VLLM.encode() if self.path == "/metrics" else b"\xff<html>")

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_metrics_of_vllm_get_the_names_of_our_server(vllm: str) -> None:
    exporter = DeviceExporter()
    exporter.server = server_metrics(vllm)
    assert _value(exporter, "serving_requests_running", model="m") == 3
    assert _value(exporter, "serving_kv_cache_usage_ratio") == 0.25
    assert _value(exporter, "serving_requests_finished_total", reason="length") == 7
    assert _value(exporter, "serving_time_to_first_token_seconds_sum") == 0.5
    assert _value(exporter, "serving_program_executions_total", program="b", rank="0") == 5
    assert "vllm" not in exporter.exposition().decode()


def test_a_server_that_has_no_metrics_is_one_sentence(vllm: str) -> None:
    with pytest.raises(NotReady, match="does not answer"):
        server_metrics("http://127.0.0.1:1")
    with pytest.raises(NotReady, match="Prometheus's text format"):
        server_metrics(f"http://{vllm}/other?/metrics")
    with pytest.raises(InputInvalid, match="is no address of a server"):
        server_metrics("file:///etc/passwd")
