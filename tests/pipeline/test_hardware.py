"""`nxpipe doctor --hardware`: what a compiler and a device get wrong is reported by the assumptions that it breaks."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.hlo.corpus import corpus, matching
from nxpipe.pipeline.check import hardware
from nxpipe.pipeline.check.hardware import DeviceRun, for_target, native_target, survey, try_all, try_probe
from nxpipe.pipeline.check.hardware_report import (
    FORMAT,
    HardwareReport,
    Surroundings,
    anonymous,
    broken_assumptions,
    last_lines,
    read_report,
)
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid
from nxpipe.pipeline.util.exit_codes import FINDINGS, INTERRUPTED, OK, SOFTWARE, USAGE
from tests.neuronx.installed import InstalledCompiler, compiler
from tests.pipeline.command import NXPIPE
from tests.pipeline.device_artifacts import install_device
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.probe_machine import (
    Defects,
    ProbeMachine,
    refuses,
    refuses_combination,
    refuses_type,
    uses,
    without_names,
)
from tests.runtime.devices.conftest import stand_in

__all__ = ["compiler", "nxpipe", "stand_in"]


def _swapped(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs of one size in each other's place."""
    sizes = {array.nbytes for array in arrays}
    return arrays[::-1] if len(sizes) == 1 else arrays


def _by_columns(array: np.ndarray) -> np.ndarray:
    return np.asfortranarray(array).reshape(-1, order="A").reshape(array.shape) if array.ndim > 1 else array


def _through_f32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(array.dtype) if array.dtype == np.int32 else array


def _truncated_bf16(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Float32 results keep the upper half of their bits."""
    masked = [
        (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if array.dtype == np.float32 else array
        for array in arrays
    ]
    return [array.reshape(old.shape) for array, old in zip(masked, arrays, strict=True)]


FAULTS: dict[str, tuple[Defects, set[str]]] = {
    "none": (Defects(), set()),
    "an unused input is dropped": (Defects(drops_unused=True), set()),
    "tanh is refused": (Defects(refused=refuses("tanh")), {"opcode/tanh"}),
    "gather is refused": (Defects(refused=refuses("gather")), {"opcode/gather"}),
    "dynamic-slice is refused": (Defects(refused=refuses("dynamic-slice")), {"opcode/dynamic-slice"}),
    "select is refused": (Defects(refused=refuses("select")), {"opcode/select"}),
    "bf16 is refused": (Defects(refused=refuses_type("bf16")), {"type/bf16"}),
    "booleans are refused": (Defects(refused=refuses_type("pred")), {"opcode/compare"}),
    "all modules are refused": (Defects(refused=lambda module: "Segmentation fault"), {"form/canonical"}),
    "names of inputs are lost": (Defects(change=without_names("parameter")), {"name/inputs"}),
    "all names are lost": (Defects(change=without_names("parameter", "tuple")), {"name/inputs", "name/outputs"}),
    "states keep their values": (Defects(keeps_states=True), {"alias/in-place"}),
    "outputs are exchanged": (Defects(outputs=_swapped), {"output/several"}),
    "ranks are reversed": (Defects(ranks=lambda ranks: ranks[::-1]), {"rank/all-gather", "rank/reduce-scatter"}),
    "all-reduce hangs": (Defects(hangs=uses("all-reduce")), {"rank/all-reduce"}),
    "inputs are read by columns": (Defects(inputs=_by_columns), {"form/canonical"}),
    "integers have 24 bits": (Defects(inputs=_through_f32), {"type/s32"}),
    "a NEFF is always for one core": (Defects(cores=1), {"core/two"}),
    "the runtime ignores its setting": (Defects(setting=1), {"core/two"}),
    "floats are not combined": (
        Defects(refused=refuses_combination("f32")),
        {f"opcode/scatter-{opcode}" for opcode in ("add", "maximum", "minimum", "multiply")},
    ),
    "f32 is truncated to bf16": (Defects(outputs=_truncated_bf16), {"form/canonical"}),
}


def report_of(machine: ProbeMachine, probes: Sequence[Any], run: bool = True) -> HardwareReport:
    report = HardwareReport(Surroundings(compiler="2.27"))
    launched = DeviceRun(machine.launch) if run else None
    for _ in try_all(report, probes, "trn3", machine.compile, launched):
        pass
    return report


@pytest.mark.sample(42)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_by_exactly_the_assumptions_that_it_breaks(fault: str, tmp_path: Path) -> None:
    defects, expected = FAULTS[fault]
    report = report_of(ProbeMachine(tmp_path, defects), corpus())
    broken = broken_assumptions(corpus(), report.trials["trn3"])
    assert {each.name for each in broken} == expected
    failed = {
        probe.name for probe in corpus() if not probe.is_question and report.trials["trn3"][probe.name].has_failed
    }
    assert failed == {name for each in broken for name in (each.name, *each.consequences)}


def test_a_probe_that_failed_for_another_one_is_its_consequence(tmp_path: Path) -> None:
    probes = matching("alias")
    trials = report_of(ProbeMachine(tmp_path, Defects(keeps_states=True)), probes).trials["trn3"]
    (broken,) = broken_assumptions(probes, trials)
    assert broken.name == "alias/in-place"
    assert "alias/steps" in broken.consequences
    assert broken.fallback == "copy each state on the host"


def test_a_question_breaks_no_assumption(tmp_path: Path) -> None:
    probes = matching("form")
    trials = report_of(ProbeMachine(tmp_path), probes).trials["trn3"]
    assert trials["form/composite-ids"].compiled is False
    assert broken_assumptions(probes, trials) == []


def test_a_hang_and_a_crash_are_the_result_of_one_probe(tmp_path: Path) -> None:
    machine = ProbeMachine(tmp_path, Defects(hangs=uses("all-reduce")))
    report = report_of(machine, matching("rank"))
    trial = report.trials["trn3"]["rank/all-reduce"]
    assert (trial.compiled, trial.ran, trial.agrees, trial.code) == (True, False, None, "NRT_TIMEOUT")
    assert report.trials["trn3"]["rank/all-gather"].agrees


def test_two_physical_cores_are_requested_of_the_compiler_and_set_for_the_runtime(tmp_path: Path) -> None:
    trials = report_of(ProbeMachine(tmp_path), matching("core")).trials["trn3"]
    assert all(trials[probe.name].agrees for probe in matching("core") if not probe.is_question)
    other = trials["core/other-setting"]
    assert (other.compiled, other.ran) == (True, False)
    assert "for 2 physical cores, and the runtime has 1" in other.message
    wrong = report_of(ProbeMachine(tmp_path, Defects(cores=1)), matching("core/two")).trials["trn3"]["core/two"]
    assert "the NEFF is for 1 physical cores of a logical one, and 2 were requested" in wrong.message


def test_targets_without_such_logical_cores_have_no_probe_of_them() -> None:
    assert for_target(corpus(), "trn2") == list(corpus())
    names = {probe.name for probe in for_target(corpus(), "inf2")}
    assert {probe.name for probe in corpus()} - names == {probe.name for probe in matching("core")}
    with pytest.raises(InputInvalid, match="inf2 has no logical cores of two physical ones"):
        for_target(matching("core"), "inf2")


def test_custom_calls_are_questions_that_a_machine_answers(tmp_path: Path) -> None:
    trials = report_of(ProbeMachine(tmp_path), matching("call")).trials["trn3"]
    assert {name: trial.code for name, trial in trials.items() if trial.has_failed} == {
        "call/top-k-odd-row": "NCC_EVRF064",  # the stand-in's, for a rule that has none
        "call/unlisted": "NCC_EVRF015",
    }
    assert trials["call/top-k"].agrees


# Resuming


def test_a_second_run_repeats_only_what_is_not_finished(tmp_path: Path) -> None:
    machine, path, probes = ProbeMachine(tmp_path), tmp_path / "report.json", matching("name")
    report_of(machine, probes[:3]).write(path)
    again = HardwareReport(Surroundings(compiler="2.27"))
    again.resume(path)
    list(try_all(again, probes, "trn3", machine.compile, DeviceRun(machine.launch)))
    assert machine.compilations == [probe.name for probe in probes]
    list(try_all(again, probes, "trn3", machine.compile, DeviceRun(machine.launch), force=True))
    assert len(machine.compilations) == 2 * len(probes)


def test_another_compiler_begins_anew(tmp_path: Path) -> None:
    report_of(ProbeMachine(tmp_path), matching("name/dots")).write(tmp_path / "report.json")
    other = HardwareReport(Surroundings(compiler="2.28"))
    other.resume(tmp_path / "report.json")
    assert other.trials == {}


def test_what_only_compiled_runs_once_there_is_a_device(tmp_path: Path) -> None:
    machine, (probe,) = ProbeMachine(tmp_path), matching("name/dots")
    report = report_of(machine, [probe], run=False)
    assert report.trials["trn3"][probe.name].ran is None
    list(try_all(report, [probe], "trn3", machine.compile, DeviceRun(machine.launch)))
    assert report.trials["trn3"][probe.name].agrees


def test_what_may_end_differently_is_tried_again(tmp_path: Path) -> None:
    class Killed(BuildRefused):
        deterministic = False

    def killed(probe: Any, target: str) -> bytes:
        raise Killed("the compiler was killed")

    (probe,), machine = matching("name/dots"), ProbeMachine(tmp_path)
    report = HardwareReport(Surroundings())
    for compile_neff in (killed, machine.compile):
        list(try_all(report, [probe], "trn3", compile_neff, None))
    assert report.trials["trn3"][probe.name].compiled


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    report = report_of(ProbeMachine(tmp_path, Defects(refused=refuses("add"))), matching("name"))
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    assert json.loads((tmp_path / "report.json").read_text())["format"] == FORMAT


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "nxpipe.hardware-report/2"}', '{"format": "nxpipe.hardware-report/1", "targets": 3}'],
)
def test_another_file_is_not_overwritten_but_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(InputInvalid, match="pass another file"):
        read_report(tmp_path / "report.json")


# What a report may contain


def test_texts_have_no_path_address_name_or_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    line = f"/home/ann/x.hlo at 10.0.3.7:5000 on {socket.gethostname()}, wJalrXUtnFEMI/K7MDENG \x1b[2J ~/.aws/config"
    text = anonymous(line)
    assert text == "<path> at <address> on <name>, <secret> \\x1b[2J <path>"
    assert last_lines("a\n\n/tmp/b\n") == ("a", "<path>")


def test_a_report_has_nothing_of_the_machine(tmp_path: Path) -> None:
    def refused(probe: Any, target: str) -> bytes:
        error = BuildRefused(f"{probe.name}: {tmp_path}/module.pb is refused on {socket.gethostname()}")
        error.add_note(f'File "{tmp_path}/x.py", line 3\n[NCC_EVRF001] no')
        raise error

    trial = try_probe(matching("name/dots")[0], "trn1", refused, None)
    report = HardwareReport(Surroundings(), trials={"trn1": {"name/dots": trial}})
    text = json.dumps(report.document())
    assert trial.code == "NCC_EVRF001"
    for word in (str(tmp_path), tmp_path.name, socket.gethostname()):
        assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)


def test_the_machine_is_described_by_files_of_the_kernel(compiler: InstalledCompiler, tmp_path: Path) -> None:
    for name, text in {
        "sys/module/neuron/version": "2.21.37.0\n",
        "sys/devices/virtual/dmi/id/product_name": "inf2.8xlarge\n",
        "sys/devices/virtual/dmi/id/sys_vendor": "Amazon EC2\n",
        "dev/neuron0": "",
        "dev/neuron_daemon": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = survey(tmp_path)
    assert (found.driver, found.instance, found.devices) == ("2.21.37.0", "inf2.8xlarge", 1)
    assert found.compiler.startswith("2.27")
    assert native_target(found) == "inf2"
    assert native_target(Surroundings(instance="trn1n.32xlarge")) == "trn1n"
    assert native_target(Surroundings()) is None


# The command


def test_the_command_reports_what_the_compiler_refuses(
    compiler: InstalledCompiler, nxpipe: InProcess, tmp_path: Path
) -> None:
    report = str(tmp_path / "report.json")
    arguments = ("doctor", "--hardware", "--only", "name/dots", "--targets", "trn2,inf2", "--report", report)
    answer = nxpipe(*arguments)
    assert answer.code == OK.number, answer.err
    assert "nothing ran" in answer.err
    compiler.fail("NCC_EVRF001 Operator add is not supported")
    assert nxpipe(*arguments).code == OK.number  # finished
    failed = nxpipe(*arguments, "--force", "--json")
    assert failed.code == FINDINGS.number
    document = json.loads(failed.out)
    assert [each["name"] for each in document["broken"]["trn2"]] == ["name/dots"]
    assert document["targets"]["inf2"]["name/dots"]["code"] == "NCC_EVRF001"
    assert len(compiler.calls) == 4
    compiler.fail("")
    assert nxpipe("doctor", "--hardware", "--only", "core/two", "--targets", "trn2").code == OK.number
    assert [call[call.index("--lnc") + 1] for call in compiler.calls] == ["1"] * 4 + ["2"]


def test_the_command_needs_the_compiler_and_a_known_name(compiler: InstalledCompiler, nxpipe: InProcess) -> None:
    assert nxpipe("doctor", "--hardware", "--only", "nothing").code == USAGE.number
    assert nxpipe("doctor", "--hardware", "--targets", "inf1").code == USAGE.number
    assert nxpipe("doctor", "--hardware", "--only", "core", "--targets", "trn2,inf2").code == USAGE.number
    assert nxpipe("doctor", "--force").code == USAGE.number
    compiler.remove()
    answer = nxpipe("doctor", "--hardware")
    assert answer.code == SOFTWARE.number
    assert "requires neuronx-cc on the PATH" in answer.err


@pytest.mark.sample(3)
def test_an_interrupted_run_leaves_a_valid_report(compiler: InstalledCompiler, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [str(NXPIPE), "doctor", "--hardware", "--only", "name", "--report", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        _wait(lambda: path.exists())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED.number
    done = read_report(path).trials["inf2"]
    assert 0 < len(done) < len(matching("name"))
    assert not any(trial.has_failed for trial in done.values())


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.sample(2, "stand-in of libnrt")
def test_ranks_run_in_processes_on_a_stand_in_device(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_device(stand_in, tmp_path, monkeypatch)
    machine = ProbeMachine(tmp_path)
    for name in ("form/canonical", "alias/old-value", "rank/own-rank"):
        trial = try_probe(matching(name)[0], "inf2", machine.compile, DeviceRun(limit=60))
        assert trial.agrees, trial
    assert hardware.with_runtime(Surroundings()).implementation == "nrtpy"
    install_device(stand_in, tmp_path, monkeypatch, defect="crash")
    crashed = try_probe(matching("form/canonical")[0], "inf2", machine.compile, DeviceRun(limit=60))
    assert (crashed.compiled, crashed.ran) == (True, False)
    assert "SIGSEGV" in crashed.message
