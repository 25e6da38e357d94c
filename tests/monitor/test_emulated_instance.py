"""The emulated instance: its documents have the form of those that neuron-ls and neuron-monitor print."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.hardware import INSTANCES, instance
from nxpipe.emulator.run.counters import ECC, Prediction, ProcessCounters, ProgramCounters
from nxpipe.emulator.run.status import ExecutionFailed
from nxpipe.pipeline.config.device_measures import CORE_MEMORY
from nxpipe.pipeline.fleet.monitor.emulated_instance import EmulatedMonitor, _percentiles, beyond, device_list
from nxpipe.pipeline.fleet.monitor.report import read_figures, samples
from nxpipe.pipeline.fleet.monitor.source import MonitorSettings
from nxpipe.pipeline.util.errors import InputInvalid
from tests.monitor import documents
from tests.monitor.documents import differences
from tests.tiers import examples

SOON = MonitorSettings.every(0.01)


@pytest.fixture
def own(tmp_path: Path) -> ProcessCounters:
    counters = ProcessCounters(tmp_path)
    counters._thread = object()  # type: ignore[assignment]  # the test writes
    return counters


def _program(core: int = 0, seconds: float | None = 1e-4, **memory: int) -> ProgramCounters:
    return ProgramCounters("decode", "0" * 32, range(core, core + 1), memory, lambda: Prediction(seconds, {}, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["TRN2_3XLARGE", "TRN2_48XLARGE_CONTAINER", "TRN1_2XLARGE"])
def test_neuron_ls_of_real_machines_has_the_form(name: str) -> None:
    assert differences(getattr(documents, name), documents.LS) == []


def test_neuron_monitor_of_a_real_machine_has_the_form() -> None:
    assert differences(documents.INF2_XLARGE, documents.MONITOR) == []
    assert differences({**documents.INF2_XLARGE, "neuron_runtime_data": None}, documents.MONITOR) == []


def test_every_instance_type_is_listed_in_the_form() -> None:
    for target in INSTANCES.values():
        devices = device_list(target, [])
        assert differences(devices, documents.LS) == []
        assert [core for device in devices for core in device["neuroncore_ids"]] == list(range(target.logical_cores))
        assert sum(device["memory_size"] for device in devices) == target.device_memory_gib << 30
        for device in devices:
            for neighbour in device["connected_to"] or ():
                assert device["neuron_device"] in devices[neighbour]["connected_to"]


def test_the_torus_has_the_documented_neighbours_and_a_single_device_none() -> None:
    devices = device_list(instance("trn2.48xlarge"), [])
    assert devices[0]["connected_to"] == [12, 3, 4, 1]
    assert devices[5]["connected_to"] == [1, 4, 9, 6]
    assert device_list(instance("trn1.2xlarge"), [])[0]["connected_to"] is None


def test_a_process_is_on_the_devices_whose_cores_it_uses(own: ProcessCounters) -> None:
    own.load(_program(core=5))
    devices = device_list(instance("inf2.24xlarge"), [own.document()])
    assert [device["neuron_device"] for device in devices if device["neuron_processes"]] == [2]
    assert differences(devices, documents.LS) == []
    assert beyond(instance("inf2.xlarge"), [own.document()]) == [(os.getpid(), 5)]


@pytest.mark.parametrize("name", ["inf2.xlarge", "trn1.32xlarge", "trn2.48xlarge"])
def test_a_report_has_the_form_and_counts_its_period(own: ProcessCounters, tmp_path: Path, name: str) -> None:
    program = own.load(_program(constants=100, tensors=20))
    own.take(0, "constants", 100)
    program.complete(9.0)  # before the monitor
    own.write()
    monitor = EmulatedMonitor(instance(name), SOON, tmp_path)
    for seconds in (0.2, 0.1, 0.3):
        program.complete(seconds)
    program.fail(ExecutionFailed(""))
    own.write()
    report = next(iter(monitor.reports()))
    assert differences(report, documents.MONITOR) == []
    assert json.loads(json.dumps(report)) == report
    (runtime,) = report["neuron_runtime_data"]
    stats = runtime["report"]["execution_stats"]
    assert (stats["execution_summary"]["completed"], stats["execution_summary"]["completed_with_err"]) == (3, 1)
    assert stats["error_summary"]["model"] == 1
    assert (stats["latency_stats"]["total_latency"]["p0"], stats["latency_stats"]["total_latency"]["p100"]) == (
        0.1,
        0.3,
    )
    assert stats["latency_stats"]["device_latency"]["p50"] == 1e-4
    cores = runtime["report"]["neuroncore_counters"]
    busy = cores["neuroncores_in_use"]["0"]["neuroncore_utilization"]
    assert busy == pytest.approx(100 * 3e-4 / cores["period"])
    assert read_figures(report).fullest_core == 100
    idle = monitor.report()["neuron_runtime_data"]
    assert all(
        each["report"]["execution_stats"]["latency_stats"]["total_latency"] is None
        for each in idle
        if "execution_stats" in each["report"]
    )


def test_without_a_process_a_report_has_no_runtime(tmp_path: Path) -> None:
    report = next(iter(EmulatedMonitor(instance("inf2.xlarge"), SOON, tmp_path).reports()))
    assert report["neuron_runtime_data"] == []
    assert differences(report, documents.MONITOR) == []
    assert {sample.measure.key for sample in samples(report)} >= {"ecc", "vcpus", "memory-total-bytes"}


def test_injected_ecc_events_and_compiled_programs_are_of_one_period(own: ProcessCounters, tmp_path: Path) -> None:
    own.load(_program())
    own.write()
    monitor = EmulatedMonitor(instance("inf2.xlarge"), SOON, tmp_path)
    own.ecc[0, "mem_ecc_uncorrected"] += 2
    own.compiled += 1
    own.write()
    # On a busy machine a report may come between two periods of the hardware's counters, and lacks them.
    reports = (report for report in monitor.reports() if "neuron_hw_counters" in report["system_data"])
    first, second = next(reports), next(reports)
    events = [sum(device[kind] for kind in ECC) for report in (first, second) for device in _devices(report)]
    assert events == [2, 0]
    assert [monitor.compiled(), monitor.compiled()] == [1, 0]


def _devices(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = report["system_data"]["neuron_hw_counters"]["neuron_devices"]
    return devices


def test_groups_and_tags_are_those_of_the_configuration(own: ProcessCounters, tmp_path: Path) -> None:
    own.load(_program())
    own.write()
    settings_file = tmp_path / "monitor.conf"
    metrics = [{"type": "memory_used"}, {"type": "execution_stats", "period": "1h"}]
    runtimes = [{"tag_filter": "^no process", "metrics": [{"type": "neuroncore_counters"}]}, {"metrics": metrics}]
    settings_file.write_text(json.dumps({"period": "10ms", "neuron_runtimes": runtimes, "system_metrics": []}))
    settings = MonitorSettings.read(settings_file)
    assert settings.periods == (0.01, 3600.0)
    report = next(iter(EmulatedMonitor(instance("inf2.xlarge"), settings, tmp_path).reports()))
    (runtime,) = report["neuron_runtime_data"]
    assert list(runtime["report"]) == ["memory_used"]
    assert report["system_data"] == {}


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ([], "the configuration is not a table"),
        ({"periode": "5s"}, "the configuration has 'periode', and takes period, neuron_runtimes, system_metrics"),
        ({"period": 5}, "the period 5 is not a duration"),
        ({"period": "5 s"}, "the period '5 s' is not a duration"),
        ({"period": "0s"}, "the period '0s' is not a duration"),
        ({"neuron_runtimes": {}, "system_metrics": {"a": 1}}, "system_metrics is not a list"),
        ({"neuron_runtimes": [{"tag_filter": "("}]}, "tag_filter '(' is not a regular expression"),
        ({"neuron_runtimes": [{"tag_filter": 7}]}, "tag_filter 7 is not a regular expression"),
        ({"neuron_runtimes": [{"metrics": [{"type": "vcpu_usage"}]}]}, "there is no metric 'vcpu_usage' here"),
        ({"system_metrics": [{"type": ["memory_info"]}]}, "there is no metric"),
        ({"system_metrics": ["memory_info"]}, "a metric is not a table"),
    ],
)
def test_a_configuration_that_neuron_monitor_refuses_is_one_sentence(tmp_path: Path, document: Any, wrong: str) -> None:
    (tmp_path / "monitor.conf").write_text(json.dumps(document))
    with pytest.raises(InputInvalid) as refused:
        MonitorSettings.read(tmp_path / "monitor.conf")
    assert wrong in str(refused.value)


def test_settings_are_written_as_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "monitor.conf").write_text(json.dumps(MonitorSettings.every(2.5).document()))
    assert MonitorSettings.read(tmp_path / "monitor.conf") == MonitorSettings.every(2.5)


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_percentiles_are_samples_in_order(seconds: list[float]) -> None:
    found = list((_percentiles(seconds) or {}).values())
    assert found == sorted(found)
    assert (found[0], found[-1]) == (min(seconds), max(seconds))
    assert set(found) <= set(seconds)


def test_memory_has_neuron_monitor_s_categories(own: ProcessCounters) -> None:
    own.load(_program())
    (core,) = own.document()["cores"]
    assert tuple(core["memory"]) == CORE_MEMORY
