"""Counters of emulated cores: what a process publishes is what it has executed, as long as it runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import utilisation
from nxpipe.emulator.executable.executable import from_bytes
from nxpipe.emulator.run import counters
from nxpipe.emulator.run.counters import (
    ERRORS,
    SAMPLES,
    SUMMARIES,
    Prediction,
    ProcessCounters,
    ProgramCounters,
    SessionCounters,
    counters_folder,
    in_use,
    outcome_of,
    process_counters,
    published,
)
from nxpipe.emulator.run.devices.emulated_runtime import EmulatedRuntime
from nxpipe.emulator.run.devices.faults import DeviceTimeout, HardwareFault
from nxpipe.emulator.run.isa import Isa
from nxpipe.emulator.run.status import BadInput, CoreBusy, ExecutionFailed, LookupOutOfBounds, RuntimeFault
from nxpipe.emulator.schedule.timeline import latency_ns
from tests.runtime.devices.programs import addition
from tests.tiers import examples


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessCounters:
    """The counters of this process, in a folder of the test."""
    fresh = ProcessCounters(tmp_path / "counters")
    monkeypatch.setattr(counters, "_current", fresh)
    return fresh


def _core(document: dict[str, Any], number: int = 0) -> dict[str, Any]:
    (core,) = (core for core in document["cores"] if core["core"] == number)
    return dict(core)


def test_a_runtime_counts_what_it_executes_and_what_fails(own: ProcessCounters, tmp_path: Path) -> None:
    path = addition("emulated", tmp_path)
    with EmulatedRuntime("inf2.xlarge") as runtime:
        model = runtime.load(path, core=1)
        tensors = {name: runtime.allocate(16, core=1, name=name) for name in "xwy"}
        for tensor in tensors.values():
            tensor.write(np.zeros(4, np.float32))
        inputs = {name: tensors[name] for name in "xw"}
        for _ in range(5):
            model.execute(inputs, {"y": tensors["y"]})
        with pytest.raises(BadInput):
            model.execute({}, {})
        document = own.document()
    program = from_bytes(path.read_bytes()).program
    seconds = (latency_ns(program) or 0) / 1e9
    assert (document["instance"], document["executions"], document["loads"]) == ("inf2.xlarge", 5, 1)
    assert (document["summary"]["completed"], document["summary"]["incorrect_input"]) == (5, 1)
    assert document["errors"]["generic"] == 1
    assert _core(document, 1)["busy"] == pytest.approx(5 * seconds)
    assert _core(document, 1)["memory"]["tensors"] == 3 * 16
    assert _core(document, 1)["memory"]["model_code"] > 0
    assert [predicted for _, predicted in document["latencies"]] == [pytest.approx(seconds)] * 5
    closed = own.document()
    assert list(in_use(closed)) == []
    assert (closed["programs"], closed["executions"], closed["summary"]) == ([], 5, document["summary"])


def test_a_session_counts_each_core_and_shared_weights_once(own: ProcessCounters, tmp_path: Path) -> None:
    code = Isa(from_bytes(addition("emulated", tmp_path, 2).read_bytes()))
    weights = sum(code.weights.values())
    session = SessionCounters({"a": code, "b": code}, range(2, 4), lambda _: Prediction(0.5, {"vector": 0.25}, 8))
    session.programs["a"].run(lambda: None)
    document = own.document()
    assert list(in_use(document)) == [2, 3]
    assert document["summary"]["completed"] == 2  # on two cores
    assert document["executions"] == len(document["latencies"]) == 1
    core = _core(document, 3)
    assert (core["busy"], core["engines"], core["flops"]) == (0.5, {"vector": 0.25}, 8)
    assert core["memory"]["constants"] == weights
    session.close()
    session.close()
    assert not any(sum(core["memory"].values()) for core in own.document()["cores"])


@pytest.mark.parametrize(
    ("fault", "summary", "error"),
    [
        (BadInput(""), "incorrect_input", "generic"),
        (LookupOutOfBounds(""), "completed_with_err", "model"),
        (ExecutionFailed(""), "completed_with_err", "model"),
        (CoreBusy(""), "failed_to_queue", "runtime"),
        (DeviceTimeout(""), "timed_out", "runtime"),
        (HardwareFault(""), "completed_with_err", "hardware"),
        (KeyboardInterrupt(), "completed_with_err", "generic"),
    ],
)
def test_a_failure_has_neuron_monitor_s_classes(fault: BaseException, summary: str, error: str) -> None:
    assert outcome_of(fault) == (summary, error)


def test_every_status_of_a_fault_is_of_a_class() -> None:
    kinds, found = [RuntimeFault], list[type[RuntimeFault]]()
    while kinds:
        kinds += (derived := kinds.pop().__subclasses__())
        found += derived
    for kind in found:
        outcome = outcome_of(kind(""))
        assert outcome.summary in SUMMARIES
        assert outcome.error in ERRORS


def test_a_prediction_is_the_one_that_a_build_has_stored(tmp_path: Path) -> None:
    program = from_bytes(addition("emulated", tmp_path).read_bytes()).program
    stored, computed = Prediction.read(utilisation(program).document()), Prediction.of(program)
    assert stored is not None
    assert stored.seconds == pytest.approx(computed.seconds, abs=1e-9)
    assert stored.engines == pytest.approx(dict(computed.engines), abs=1e-9)
    assert stored.flops == computed.flops


@pytest.mark.parametrize(
    "time_",
    [
        *(None, [], {}),
        {"latency_ns": "1", "busy_ns": 1},
        {"latency_ns": -1, "busy_ns": {}},
        {"latency_ns": 1, "busy_ns": {"tensor": float("nan")}},
        {"latency_ns": 1, "busy_ns": {"tensor": "x"}},
    ],
)
def test_figures_of_another_form_are_no_prediction(time_: Any) -> None:
    assert Prediction.read({"time": time_, "tensor_engine": {"multiply_adds": 0}}) is None
    assert Prediction.read(time_) is None


_STEPS = st.lists(st.tuples(st.sampled_from(["load", "unload", "run", "fail"]), st.integers(0, 3)), max_size=40)


@settings(max_examples=examples(60))
@given(_STEPS)
def test_sums_do_not_depend_on_when_programs_are_unloaded(steps: list[tuple[str, int]]) -> None:
    own = ProcessCounters(Path("unused"))
    own._thread = object()  # type: ignore[assignment]  # nothing is published
    programs = [ProgramCounters(str(core), "", range(core, core + 1), {}, lambda: Prediction(2.0)) for core in range(4)]
    expected = Counter[str]()
    for step, number in steps:
        program = programs[number]
        if step == "load":
            own.unload(program)
            programs[number] = own.load(ProgramCounters(str(number), "", program.cores, {}, lambda: Prediction(2.0)))
        elif step == "unload":
            own.unload(program)
        elif program in own._programs:
            if step == "run":
                program.run(lambda: None)
            else:
                program.fail(ExecutionFailed(""))
            expected[step] += 1
    document = own.document()
    assert document["executions"] == document["summary"]["completed"] == expected["run"]
    assert document["summary"]["completed_with_err"] == expected["fail"]
    assert sum(core["busy"] for core in document["cores"]) == 2.0 * expected["run"]


def test_only_the_last_latencies_are_kept(own: ProcessCounters) -> None:
    program = own.load(ProgramCounters("p", "", range(1), {}))
    for number in range(SAMPLES + 5):
        program.complete(float(number))
    kept = [seconds for seconds, _ in own.document()["latencies"]]
    assert (len(kept), kept[-1], own.document()["executions"]) == (SAMPLES, SAMPLES + 4, SAMPLES + 5)


_PROCESS = """
import sys, time
from nxpipe.emulator.run.counters import ProgramCounters, process_counters
process_counters().load(ProgramCounters("program", "", range(1), {})).complete(0.1)
time.sleep(60) if sys.argv[1] == "stay" else time.sleep(0.2)
"""


def _published_by(process: "subprocess.Popen[bytes]", folder: Path) -> list[dict[str, Any]]:
    ends = time.monotonic() + 30
    while not (found := published(folder)):
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


@pytest.fixture
def staying(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, "NXPIPE_COUNTERS": str(tmp_path / "counters"), "NEURON_PROCESS_TAG": "search"}
    process = subprocess.Popen([sys.executable, "-c", _PROCESS, "stay"], env=environment)
    yield process
    process.kill()
    process.wait()


def test_a_killed_process_leaves_nothing_that_is_shown(staying: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    (document,) = _published_by(staying, folder)
    assert (document["pid"], document["tag"]) == (staying.pid, "search")
    assert folder.stat().st_mode & 0o077 == 0  # command lines are nobody else's
    staying.send_signal(signal.SIGKILL)
    staying.wait()
    assert published(folder) == []
    assert list(folder.iterdir()) == []


def test_a_process_that_ends_removes_its_file(tmp_path: Path) -> None:
    environment = {**os.environ, "NXPIPE_COUNTERS": str(tmp_path / "counters")}
    subprocess.run([sys.executable, "-c", _PROCESS, "end"], env=environment, check=True)
    assert list((tmp_path / "counters").iterdir()) == []


def test_a_number_that_another_process_has_now_is_not_taken_for_it(own: ProcessCounters, tmp_path: Path) -> None:
    own.write()
    path = tmp_path / "counters" / f"{os.getpid()}.json"
    assert len(published(path.parent)) == 1
    path.write_text(json.dumps({**json.loads(path.read_text()), "born": "1"}))
    assert published(path.parent) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "born": ""}', "\x00"])
def test_a_file_of_another_form_is_skipped(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    assert published(tmp_path) == []


def test_a_folder_that_cannot_be_written_costs_no_execution(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    own = ProcessCounters(tmp_path / "file" / "counters")
    own.write()
    assert published(tmp_path / "file" / "counters") == []


def test_a_fork_has_counters_of_its_own(own: ProcessCounters) -> None:
    assert process_counters() is own
    if (child := os.fork()) == 0:
        os._exit(0 if process_counters() is not own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_folder_is_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NXPIPE_COUNTERS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert counters_folder() == tmp_path / f"nxpipe-counters-{os.getuid()}"
    monkeypatch.setenv("NXPIPE_COUNTERS", str(tmp_path / "own"))
    assert counters_folder() == tmp_path / "own"
