"""`nxpipe device` and `nxpipe monitor`, from their arguments to their output, on the emulator and with AWS's tools."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from nxpipe.emulator.compile import CompiledGraph
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ops import Binary
from nxpipe.emulator.run import counters
from nxpipe.emulator.run.counters import ProcessCounters, ProgramCounters, in_use
from nxpipe.pipeline.verify.execution import FAST, Runner
from tests.agent.project import CONFIG
from tests.agent.test_agent_watch import BUSY
from tests.monitor import documents
from tests.monitor.documents import differences
from tests.pipeline.command import NXPIPE
from tests.pipeline.in_process import InProcess, nxpipe
from tests.runtime.devices.programs import FOUR

__all__ = ["nxpipe"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project on a machine without devices."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NXPIPE_COUNTERS", str(tmp_path / "counters"))
    (tmp_path / "dev").mkdir()
    return tmp_path


def _written(place: Path, own: ProgramCounters) -> ProgramCounters:
    counters = ProcessCounters(place / "counters")
    counters._thread = object()  # type: ignore[assignment]
    counters._command = "serve\x1b[2J"
    counters.load(own)
    counters.write()
    return own


def _tool(place: Path, name: str, text: str) -> Path:
    path = place / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _monitor(place: Path, *lines: str, then: str = "exec sleep 60") -> str:
    echoes = "\n".join(f"echo '{line}'" for line in lines)
    return str(_tool(place, "neuron-monitor", f"{echoes}\n{then}"))


def test_ls_shows_the_processes_of_the_emulated_instance(nxpipe: InProcess, place: Path) -> None:
    _written(place, ProgramCounters("decode", "0" * 32, range(1), {}))
    done = nxpipe("device", "ls", "--json")
    (device,) = json.loads(done.out)
    assert differences([device], documents.LS) == []
    assert [process["pid"] for process in device["neuron_processes"]] == [os.getpid()]
    table = nxpipe("device", "ls")
    assert f"| {os.getpid()} " in table.out
    assert "\x1b" not in table.out


def test_the_instance_is_the_one_named_then_the_one_that_runs_then_the_project_s(
    nxpipe: InProcess, place: Path
) -> None:
    def shown(*words: str) -> str:
        return str(json.loads(nxpipe("device", "ls", "--json", *words).out)[0]["instance_type"])

    assert shown() == "inf2.xlarge"
    (place / "nxpipe.toml").write_text(CONFIG.replace("inf2.xlarge", "inf2.8xlarge"))
    assert shown() == "inf2.8xlarge"
    own = ProcessCounters(place / "counters")
    own.instance = "trn1.2xlarge"
    own.write()
    assert shown() == "trn1.2xlarge"
    assert shown("--instance", "inf2.24xlarge") == "inf2.24xlarge"


def test_a_process_with_more_cores_than_the_instance_is_said(nxpipe: InProcess, place: Path) -> None:
    _written(place, ProgramCounters("decode", "0" * 32, range(4, 8), {}))
    done = nxpipe("device", "ls")
    assert (done.code, f"process {os.getpid()} uses core 7, and inf2.xlarge has 2" in done.err) == (0, True)


def test_without_a_driver_it_ends_as_aws_s_tools_do(nxpipe: InProcess) -> None:
    for words in (("ls",), ("ls", "--json"), ("monitor",), ("top",)):
        done = nxpipe("device", *words, "--hardware", "--devices", "dev")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert 'level=fatal msg="Failed to load MLA system information"' in done.err
        assert done.err.startswith('time="')
        assert 'error="failed to discover Neuron devices"' in done.err


def test_on_a_machine_with_devices_aws_s_neuron_ls_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "dev" / "neuron0").touch()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    _tool(place, "neuron-ls", f"[ \"$1\" = -j ] && echo '{json.dumps(documents.TRN1_2XLARGE)}'\nexit 3")
    done = subprocess.run(
        [str(NXPIPE), "device", "ls", "--json", "--devices", "dev"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (3, documents.TRN1_2XLARGE)


def test_an_absent_tool_is_one_sentence(nxpipe: InProcess, place: Path) -> None:
    (place / "dev" / "neuron0").touch()
    for words in (("device", "ls"), ("device", "monitor"), ("device", "top"), ("monitor",)):
        done = nxpipe(*words, "--devices", "dev")
        assert (done.code, done.out, done.err.count("\n")) == (31, "", 1)
        assert "aws-neuronx-tools" in done.err


def test_monitor_prints_a_document_a_line(nxpipe: InProcess, place: Path) -> None:
    _written(place, ProgramCounters("decode", "0" * 32, range(1), {}))
    (place / "monitor.conf").write_text(
        '{"period": "50ms", "neuron_runtimes": [{"metrics": [{"type": "memory_used"}]}]}'
    )
    done = nxpipe("device", "monitor", "--once", "-c", "monitor.conf")
    (line,) = done.out.splitlines()
    assert differences(json.loads(line), documents.MONITOR) == []


def test_a_real_monitor_gets_the_configuration_and_its_reports_pass_unchanged(nxpipe: InProcess, place: Path) -> None:
    monitor = _tool(
        place,
        "neuron-monitor",
        f'[ "$1" = -c ] && cp "$2" given\necho \'{json.dumps(documents.INF2_XLARGE)}\'\nsleep 60',
    )
    (place / "monitor.conf").write_text('{"period": "3s", "system_metrics": [{"type": "memory_info"}]}')
    done = nxpipe("device", "monitor", "--once", "-c", "monitor.conf", "--monitor", str(monitor))
    assert json.loads(done.out) == documents.INF2_XLARGE
    given = json.loads((place / "given").read_text())
    assert given["system_metrics"] == [{"type": "memory_info", "period": "3s"}]


@pytest.mark.parametrize("line", ["no JSON", "[1]", "\x1b]0;x\x07"])
@pytest.mark.parametrize("words", [("device", "monitor"), ("device", "top"), ("monitor",)])
def test_garbage_is_one_sentence(nxpipe: InProcess, place: Path, words: tuple[str, ...], line: str) -> None:
    done = nxpipe(*words, "--monitor", _monitor(place, line))
    assert (done.code, done.out, done.err.count("\n")) == (31, "", 1)
    assert "wrote no valid report" in done.err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("device", "ls", "--instance", "inf9.xlarge"), "unknown Neuron instance 'inf9.xlarge'"),
        (("device", "ls", "--instance", "inf2.xlarge", "--hardware"), "cannot be combined with --hardware"),
        (("device", "monitor", "-c", "absent.conf"), "absent.conf is no configuration of neuron-monitor"),
        (("monitor", "--to", "cloudwatch"), "--to cloudwatch and --fleet belong together"),
        (("monitor", "--fleet", "search"), "--to cloudwatch and --fleet belong together"),
        (("monitor", "--log", "/group"), "--log requires --to cloudwatch"),
        (("monitor", "--to", "cloudwatch", "--fleet", "x", "--server", "x"), "--server requires"),
        (("monitor", "--once", "--period", "0.1", "--server", "ftp://x"), "is no address of a server"),
    ],
)
def test_what_cannot_be_is_one_sentence(nxpipe: InProcess, words: tuple[str, ...], wrong: str) -> None:
    done = nxpipe(*words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert wrong in done.err


def test_a_run_is_counted_while_it_lasts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = GraphBuilder()
    builder.output("y", builder.add(Binary("add"), builder.input("x", FOUR), builder.parameter("w", FOUR)))
    graph, own = builder.build(), ProcessCounters(place / "counters")
    own._thread = object()  # type: ignore[assignment]
    monkeypatch.setattr(counters, "_current", own)
    numbers = np.ones(4, np.float32)
    running = Runner(FAST, "v2").load(CompiledGraph(graph, graph, 1, {}, {}), {"w": numbers})
    with running.counted("addition") as counted:
        assert counted.run(running.run, {"x": numbers})["y"].tolist() == [2.0] * 4
        assert list(in_use(own.document())) == [0]
    document = own.document()
    assert (document["executions"], document["programs"], list(in_use(document))) == (1, [], [])


def test_top_shows_each_core_of_each_process(nxpipe: InProcess, place: Path) -> None:
    done = nxpipe("device", "top", "--once", "--monitor", _monitor(place, json.dumps(documents.INF2_XLARGE)))
    head, titles, *rows = done.out.splitlines()
    assert head.startswith("inf2.xlarge: devices 1")
    assert titles.split() == ["CORE", "PROCESS", "UTILIZATION", "TFLOPS", "MEMORY", "P50", "P99"]
    assert [row.split()[:4] for row in rows] == [["0", "2199", "89.4%", "0.876"], ["1", "2199", "0.0%", "0"]]
    idle = nxpipe("device", "top", "--once", "--period", "0.1")
    assert idle.out.splitlines()[1:] == ["no process uses a core"]


def test_top_ends_quietly_by_ctrl_c(place: Path) -> None:
    top = subprocess.Popen(
        [str(NXPIPE), "device", "top", "--period", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert top.stdout is not None
    assert top.stdout.readline().startswith(b"inf2.xlarge")
    top.send_signal(signal.SIGINT)
    _, err = top.communicate(timeout=30)
    assert (top.returncode, err.strip()) == (130, b"Interrupted; no partial files remain.")


def test_stdout_has_every_figure_of_the_table_with_its_unit(nxpipe: InProcess, place: Path) -> None:
    _written(place, ProgramCounters("decode", "0" * 32, range(1), {}))
    done = nxpipe("monitor", "--once", "--period", "0.1", "--json")
    document = json.loads(done.out)
    units = {metric["name"]: metric["unit"] for metric in document["metrics"]}
    assert document["instance"]["instance_type"] == "inf2.xlarge"
    assert units["neuroncore_memory_usage_tensors"] == "bytes"
    assert units["nxpipe_cost_dollars"] == "US dollars"
    assert units["nxpipe_compile_events_total"] == "count"
    lines = nxpipe("monitor", "--once", "--period", "0.1").out.splitlines()
    assert lines[0].split() == ["METRIC", "OF", "VALUE", "UNIT"]


def test_prometheus_s_text_is_printed_once(nxpipe: InProcess, place: Path) -> None:
    monitor = _monitor(place, json.dumps(documents.INF2_XLARGE))
    done = nxpipe("monitor", "--to", "prometheus", "--once", "--monitor", monitor)
    assert 'status_type="completed",subnet_id="subnet-0123456789abcdef0"} 816.0' in done.out


def test_cloudwatch_gets_the_events_that_the_agent_writes(nxpipe: InProcess, place: Path) -> None:
    (place / "nxpipe.toml").write_text(CONFIG)
    words = ("monitor", "--to", "cloudwatch", "--fleet", "search", "--monitor", _monitor(place, json.dumps(BUSY)))
    event = json.loads(nxpipe(*words, "--once").out)
    assert (event["Project"], event["Fleet"]) == ("demo", "search")
    assert event["neuroncore_memory_usage_bytes"] == 1000
    assert event["_aws"]["Timestamp"] <= time.time() * 1000
    unknown = nxpipe("monitor", "--to", "cloudwatch", "--fleet", "other", "--once")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)


def test_an_invalid_report_is_dropped_and_said(nxpipe: InProcess, place: Path) -> None:
    wrong = {"neuron_runtime_data": [{"report": {"execution_stats": {"error_summary": {"model": -1}}}}]}
    for words in (("monitor",), ("device", "top"), ("monitor", "--to", "prometheus", "--port", "0")):
        done = nxpipe(*words, "--monitor", _monitor(place, json.dumps(wrong), then="exit 0"))
        assert done.code == 31  # the monitor has ended
        assert "invalid report ('errors' is not a number" in done.err
