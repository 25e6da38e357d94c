"""`nxpipe agent watch`: the devices' metrics have the names that alarms and dashboard of the stacks use."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.config.device_measures import NAMESPACE
from nxpipe.pipeline.fleet.agent.watch import fleet_metrics, log_event
from nxpipe.pipeline.fleet.monitor.report import Figures, read_figures
from nxpipe.pipeline.fleet.monitor.source import Compilers, MonitorSettings, monitor_reports
from nxpipe.stacks import measures as watched
from tests.agent.metadata import Metadata, metadata_service
from tests.agent.project import CONFIG
from tests.pipeline.command import NXPIPE, Answer, nxpipe
from tests.tiers import examples

GROUP = "/nxpipe/demo/search"
sampled = pytest.mark.sample(3, "agent watch")  # each starts the command on the local AWS
BUSY: dict[str, Any] = {
    "neuron_runtime_data": [
        {
            "pid": 4711,
            "report": {
                "neuroncore_counters": {
                    "period": 30.0,
                    "neuroncores_in_use": {
                        "0": {"neuroncore_utilization": 80.0},
                        "1": {"neuroncore_utilization": 40.0},
                    },
                    "error": "",
                },
                "execution_stats": {"period": 30.0, "error_summary": {"generic": 7, "hardware": 2}, "error": ""},
                "memory_used": {
                    "period": 30.0,
                    "neuron_runtime_used_bytes": {
                        "usage_breakdown": {
                            "neuroncore_memory_usage": {
                                "0": {"constants": 100, "tensors": 23},
                                "1": {"constants": 1000, "model_code": 0},
                            }
                        }
                    },
                    "error": "",
                },
            },
        }
    ],
    "neuron_hardware_info": {"neuron_device_count": 2, "neuroncore_per_device_count": 2, "error": ""},
}


def test_all_cores_count_those_too_that_nobody_uses() -> None:
    assert read_figures(BUSY) == Figures(utilisation=0.3, fullest_core=1000, hardware_failures=2)


def test_processes_that_share_a_core_fill_it_together() -> None:
    both = {**BUSY, "neuron_runtime_data": BUSY["neuron_runtime_data"] * 2}
    assert read_figures(both).fullest_core == 2000


def test_what_could_not_be_measured_is_absent_and_no_zero() -> None:
    failed = {"error": "no permission", "neuroncores_in_use": {"0": {"neuroncore_utilization": 80.0}}}
    report = {**BUSY, "neuron_runtime_data": [{"pid": 1, "report": {"neuroncore_counters": failed}}]}
    assert read_figures(report) == Figures(utilisation=None, fullest_core=None, hardware_failures=0)
    assert {fleet_metric.name for fleet_metric in fleet_metrics(read_figures(report), 0)} == {
        "execution_status_total",
        "compile_events_total",
    }


_GROUPS = ("neuroncore_counters", "memory_used", "execution_stats")
_JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.just(""), lambda each: st.dictionaries(st.text(max_size=3), each)
)
_MAPS = st.none() | st.dictionaries(st.text(max_size=3), _JSON)


@settings(max_examples=examples(40))
@given(
    st.none()
    | st.lists(st.fixed_dictionaries({"report": st.none() | st.dictionaries(st.sampled_from(_GROUPS), _MAPS)}))
)
def test_a_report_that_lacks_anything_is_read_all_the_same(runtimes: Any) -> None:
    assert read_figures({"neuron_runtime_data": runtimes}).hardware_failures == 0


def test_the_stacks_watch_exactly_what_is_sent() -> None:
    sent = fleet_metrics(read_figures(BUSY), 1)
    series = [
        entry
        for measure in watched.MEASURES
        for entry in measure.series.values()
        if entry.namespace == NAMESPACE and measure.scope != "updates"  # sent by the agent itself
    ]
    assert {(entry.name, tuple(entry.only.items())) for entry in series} == {(entry.name, entry.only) for entry in sent}


def test_an_event_declares_each_metric_with_the_dimensions_of_its_series() -> None:
    sent = fleet_metrics(read_figures(BUSY), 1)
    document = json.loads(log_event(1_700_000_000_000, {"Project": "demo", "Fleet": "search"}, "i-1", sent))
    declared = {
        metric["Name"]: tuple(tuple(names) for names in cloud_watch_metric["Dimensions"])
        for cloud_watch_metric in document["_aws"]["CloudWatchMetrics"]
        for metric in cloud_watch_metric["Metrics"]
    }
    assert declared["neuroncore_utilization_ratio"] == (("Project", "Fleet"),)
    assert declared["execution_status_total"] == (("Project", "Fleet", "status_type"),)
    assert all(name in document for name in {*declared, "Project", "Fleet", "status_type"})


def test_a_compiler_is_counted_when_it_begins_and_not_again(tmp_path: Path) -> None:
    compilers = Compilers(tmp_path)

    def start(pid: int, *words: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))

    start(10, "/usr/bin/python3", "/opt/venv/bin/neuronx-cc", "compile", "--target", "trn1")
    start(11, "/usr/bin/vim", "notes about neuronx-cc")
    assert [compilers.begun(), compilers.begun()] == [1, 0]
    start(12, "neuronx-cc", "compile")
    assert compilers.begun() == 1


@dataclass
class Place:
    root: Path
    metadata: Metadata
    logs: Any

    def monitor(self, *lines: str, then: str = "exit 3") -> Path:
        """A fake neuron-monitor that requires a configuration."""
        program = self.root / "neuron-monitor"
        result = "\n".join(f"echo '{line}'" for line in lines)
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && [ -s "$2" ] || exit 9\n{result}\n{then}\n')
        program.chmod(0o755)
        return program

    def watch(self, monitor: Path, *more: str) -> Answer:
        words = ("agent", "watch", "--fleet", "search", "--log", GROUP, "--monitor", str(monitor))
        return nxpipe(*words, *more, cwd=self.root)

    def events(self) -> list[dict[str, Any]]:
        events = self.logs.get_log_events(logGroupName=GROUP, logStreamName="i-0a1b", startFromHead=True)["events"]
        return [json.loads(event["message"]) for event in events]


@pytest.fixture
def place(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "nxpipe.toml").write_text(CONFIG)
    logs = boto3.client("logs", region_name="us-east-2")
    logs.create_log_group(logGroupName=GROUP)
    with metadata_service() as metadata:
        metadata.values |= {
            "instance-id": "i-0a1b",
            "instance-type": "inf2.xlarge",
            "placement/region": "us-east-2",
        }
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        yield Place(tmp_path, metadata, logs)
    logs.delete_log_group(logGroupName=GROUP)


@sampled
def test_each_report_is_an_event_of_the_fleet_s_log(place: Place) -> None:
    done = place.watch(place.monitor(json.dumps(BUSY), json.dumps(BUSY)))
    assert done.code == 31  # the monitor ended; the unit starts both anew
    assert "exited with 3" in done.err
    assert [event["neuroncore_memory_usage_bytes"] for event in place.events()] == [1000, 1000]
    assert place.events()[0]["Fleet"] == "search"


@sampled
def test_it_goes_on_in_the_same_stream_after_a_restart(place: Place) -> None:
    for _ in range(2):
        place.watch(place.monitor(json.dumps(BUSY)))
    assert len(place.events()) == 2


@sampled
@pytest.mark.parametrize("line", ["[1, 2]", "no JSON"])
def test_what_is_no_report_is_said(place: Place, line: str) -> None:
    done = place.watch(place.monitor(line))
    assert (done.code, done.err.count("\n")) == (31, 1)
    assert "wrote no valid report" in done.err


def test_a_monitor_that_is_not_there_is_one_sentence(place: Place) -> None:
    done = place.watch(place.root / "absent")
    assert (done.code, done.err.count("\n")) == (31, 1)
    assert "aws-neuronx-tools" in done.err


def test_a_log_that_is_not_there_is_one_sentence(place: Place) -> None:
    done = place.watch(place.monitor(json.dumps(BUSY)), "--log", "/nxpipe/demo/other")
    assert (done.code, done.err.count("\n")) == (32, 1)
    assert "/nxpipe/demo/other" in done.err


def test_the_monitor_ends_with_the_watcher(place: Place) -> None:
    monitor = place.monitor(json.dumps(BUSY), then="exec sleep 61")
    words = [str(NXPIPE), "agent", "watch", "--fleet", "search", "--log", GROUP]
    watcher = subprocess.Popen([*words, "--monitor", str(monitor)], cwd=place.root, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not _sleeping(watcher.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = _sleeping(watcher.pid)
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(20) == 143
    deadline = time.monotonic() + 30  # init takes its time to see them off
    while any(Path("/proc", child).exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_while_the_monitor_starts_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "neuron-monitor"
    program.write_text("#!/bin/sh\nexec sleep 61\n")
    program.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        """The signal comes when the process exists and nobody knows it yet."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit), monitor_reports(str(program), MonitorSettings.every(5, (), ())):
            pass
        assert callable(signal.getsignal(signal.SIGTERM)), "the handler is there again"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def _sleeping(parent: int) -> list[str]:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    found = children.read_text().split() if children.exists() else []
    return [entry for entry in found if b"sleep" in Path("/proc", entry, "cmdline").read_bytes()]
