"""One host function runs on every rank of every implementation, and no rank waits for ever."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.run.devices.environment import RankPlacement, visible_cores
from nxpipe.emulator.run.devices.faults import DeviceTimeout, NoDevice, RankCrashed, RankFailed, RankHung
from nxpipe.emulator.run.devices.ranks import Rank, run_ranks
from nxpipe.emulator.run.devices.session import RankProgram, RankSession
from nxpipe.emulator.run.status import (
    BadInput,
    CoresUnavailable,
    DeviceMemoryExhausted,
    InvalidLoad,
    LookupOutOfBounds,
    WrongGeneration,
)
from tests.conftest import ROOT
from tests.runtime.devices import neff
from tests.runtime.devices.conftest import Machine, Opener
from tests.runtime.devices.programs import KINDS, accumulator, addition, lookup

pytestmark = pytest.mark.sample(2, "stand-in of libnrt")

HOSTS = "tests.runtime.devices.hosts"
kinds = pytest.mark.parametrize("kind", KINDS)

RunHost = Callable[..., list[Any]]


@pytest.fixture
def run(machine: Machine, tmp_path: Path) -> RunHost:
    """Run a host function on ranks of a kind; the libraries are found as on an instance."""

    def run_host(
        kind: str, host: str, argument: Any = None, *, world: int = 1, limit: float = 60.0, **settings: Any
    ) -> Any:
        options = {"name": "trn1.2xlarge", "limit": settings.pop("wait", 60.0)} if kind == "emulated" else {}
        placement = settings.pop("placement", None)
        machine(folder=tmp_path, **{"timeout_ms": 60_000, **settings})
        return run_ranks(
            f"{HOSTS}:{host}", argument, world=world, implementation=kind, options=options, limit=limit,  # type: ignore[arg-type]
            placement=placement,
        )  # fmt: skip

    return run_host


# The same host function everywhere


@kinds
def test_the_ranks_of_one_program_compute_together(kind: str, run: RunHost, tmp_path: Path) -> None:
    argument = {"program": str(addition(kind, tmp_path, 2)), "inputs": [0, 1, 10], "time": kind == "emulated"}
    results = run(kind, "addition", argument, world=2)
    assert [result["outputs"] for result in results] == [[[3.0] * 4, [5.0] * 4, [23.0] * 4]] * 2
    assert all(result["used"] >= 3 * 16 for result in results)


@kinds
def test_programs_of_a_session_share_their_states(kind: str, opened: Opener, tmp_path: Path) -> None:
    from tests.runtime.devices import hosts

    for folder in ("prefill", "decode"):
        (tmp_path / folder).mkdir()
    programs = {name: str(accumulator(kind, tmp_path / name)) for name in ("prefill", "decode")}
    steps: list[Any] = []
    result = hosts.model(Rank(0, 1, 0, opened(kind), steps.append), programs)
    x = np.arange(4, dtype=np.float32)
    assert result == {"values": [*((n * x).tolist() for n in (1, 2, 3)), [1.0] * 4], "total": [1.0] * 4}
    assert [step["step"] for step in steps] == [
        *("load decode", "load prefill", "allocate tensors"),
        *("execute prefill", "execute decode", "execute decode", "execute decode"),
    ]


@pytest.mark.sample(3)
@kinds
def test_the_fault_of_a_rank_is_raised_by_its_type(kind: str, run: RunHost, tmp_path: Path) -> None:
    argument = {"program": str(lookup(kind, tmp_path)), "ids": [0, 9]}
    with pytest.raises(LookupOutOfBounds):
        run(kind, "lookup", argument)


@pytest.mark.sample(3)
@kinds
def test_an_error_of_the_host_function_ends_all_ranks(kind: str, run: RunHost, tmp_path: Path) -> None:
    argument = {"program": str(addition(kind, tmp_path, 2)), "inputs": [0], "rank": 1}
    with pytest.raises(RankFailed, match=r"rank 1 of 2, at '[a-z ]+': ValueError: not today"):
        run(kind, "faulty", argument, world=2)


# Processes


def test_a_rank_process_sees_its_core_and_the_address_of_rank_0(run: RunHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    monkeypatch.setenv("NEURON_RT_DISABLE_EXECUTION_BARRIER", "1")
    placement = RankPlacement(2, "127.0.0.1:61239", first_core=2, physical_cores=2)
    results = run("libnrt", "environment", world=2, cores=4, placement=placement)
    common = {
        "NEURON_RT_ROOT_COMM_ID": "127.0.0.1:61239",
        "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_RT_EXEC_TIMEOUT": "600",
        "cores": 1,
    }
    assert results == [common | {"NEURON_RT_VISIBLE_CORES": core} for core in ("2", "3")]


def test_a_single_rank_needs_no_address_and_keeps_the_users_timeout() -> None:
    inherited = {"NEURON_RT_EXEC_TIMEOUT": "5", "NEURON_RT_ROOT_COMM_ID": "other:1", "LD_LIBRARY_PATH": "/mine"}
    variables = RankPlacement(1, "127.0.0.1:1").variables(0, inherited)
    assert variables["NEURON_RT_EXEC_TIMEOUT"] == "5"
    assert "NEURON_RT_ROOT_COMM_ID" not in variables
    assert variables["LD_LIBRARY_PATH"] == "/mine:/opt/aws/neuron/lib"


def test_a_killed_rank_ends_the_others_with_its_signal_and_log(run: RunHost, tmp_path: Path) -> None:
    argument = {"program": str(addition("libnrt", tmp_path, 2)), "inputs": [0], "rank": 1}
    with pytest.raises(
        RankCrashed, match=r"^rank 1 of 2, at 'last words': its process ended by SIGKILL; NRT something went wrong$"
    ):
        run("libnrt", "killed", argument, world=2)


def test_the_watchdog_ends_ranks_that_wait_for_one_that_never_comes(run: RunHost, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    argument = {"program": str(addition("libnrt", tmp_path, 2)), "inputs": [0], "rank": 1, "pids": str(pids)}
    with pytest.raises(
        RankHung,
        match=r"^no progress within the limit of 2 s: rank [01] since it began to '(load addition|wait for ever)'",
    ):
        run("libnrt", "absent", argument, world=2, limit=2.0, timeout_ms=0)
    assert [ends(int(pid)) for pid in pids.read_text().split()] == [True, True]


def test_the_watchdog_ends_a_rank_that_hangs_in_the_library(run: RunHost, tmp_path: Path) -> None:
    program = neff.Neff({"x": (4,), "w": (4,)}, {"y": (4,)}, ["add y x w", "hang 0"]).write(tmp_path / "hang.neff")
    with pytest.raises(RankHung, match="rank 0 since it began to 'execute addition'"):
        run("nrtpy", "addition", {"program": str(program), "inputs": [0]}, limit=3.0)


def test_emulated_ranks_that_wait_for_one_that_never_comes_end_with_the_missing_rank(
    run: RunHost, tmp_path: Path
) -> None:
    (tmp_path / "sum").mkdir()
    programs = [str(addition("emulated", tmp_path, 2)), str(addition("emulated", tmp_path / "sum", 1))]
    with pytest.raises(DeviceTimeout, match=r"waited 0\.3 s for ranks [01] to load the program"):
        run("emulated", "reversed_order", {"programs": programs}, world=2, wait=0.3)


@pytest.mark.parametrize("kind", ["emulated", "libnrt"])
def test_the_watchdog_sees_a_silent_rank_beside_one_that_reports(kind: str, run: RunHost) -> None:
    with pytest.raises(RankHung, match=r"limit of 1 s: rank 1 since it began to 'begin'; all ranks were ended"):
        run(kind, "silent", {"rank": 1}, world=2, limit=1.0)


def test_a_thread_of_an_emulated_rank_that_hangs_is_reported(run: RunHost, tmp_path: Path) -> None:
    argument = {"ready": str(tmp_path / "ready"), "done": str(tmp_path / "done")}
    try:
        with pytest.raises(RankHung, match=r"no progress within the limit of 0\.2 s: rank 0 since it began to 'start'"):
            run("emulated", "opened", argument, limit=0.2)
    finally:
        (tmp_path / "done").touch()


def test_ranks_that_load_in_different_orders_are_refused_by_the_runtime(run: RunHost, tmp_path: Path) -> None:
    programs = [neff.addition(2, scratch=size).write(tmp_path / f"{size}.neff") for size in (1, 2)]
    with pytest.raises(DeviceTimeout, match=r"rank [01] of 2, at 'load [12]': loading"):
        run("libnrt", "reversed_order", {"programs": list(map(str, programs))}, world=2, timeout_ms=200)


def test_a_core_of_another_process_is_unavailable(run: RunHost, tmp_path: Path, machine: Machine) -> None:
    files = {"ready": str(tmp_path / "ready"), "done": str(tmp_path / "done")}
    machine(folder=tmp_path)
    other = threading.Thread(
        target=run_ranks, args=(f"{HOSTS}:opened", files), kwargs={"world": 1, "implementation": "libnrt"}
    )
    other.start()
    try:
        while not (tmp_path / "ready").exists():
            assert other.is_alive()
            time.sleep(0.01)
        with pytest.raises(CoresUnavailable, match=r"LOAD_NOT_ENOUGH_NC \(9\): another process has the cores"):
            run_ranks(f"{HOSTS}:environment", None, world=1, implementation="libnrt")
    finally:
        (tmp_path / "done").touch()
        other.join()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("program", "settings", "fault"),
    [
        (neff.addition(scratch=1 << 21), {}, DeviceMemoryExhausted),
        (neff.addition(arch="inf2"), {}, WrongGeneration),
        (neff.addition(), {"family": ""}, NoDevice),
    ],
    ids=["memory", "target", "no device"],
)
def test_a_rank_process_reports_faults_of_the_device(
    program: neff.Neff, settings: Any, fault: type[CompileError], run: RunHost, tmp_path: Path
) -> None:
    argument = {"program": str(program.write(tmp_path / "addition.neff")), "inputs": [0]}
    with pytest.raises(fault):
        run("libnrt", "addition", argument, **settings)


def test_rank_processes_end_with_their_launcher(machine: Machine, tmp_path: Path) -> None:
    machine(folder=tmp_path)
    pids = tmp_path / "pids"
    job = {"rank": 0, "pids": str(pids)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n"
         "from nxpipe.emulator.run.devices.ranks import run_ranks\n"
         f"run_ranks('{HOSTS}:absent', json.loads(sys.argv[2]), world=1, implementation='libnrt')",
         json.dumps([str(ROOT)]), json.dumps(job)],
    )  # fmt: skip
    while not pids.exists() or not pids.read_text():
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.kill()
    launcher.wait()
    rank, child = map(int, pids.read_text().split())
    try:
        assert ends(rank)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def ends(pid: int) -> bool:
    """True once a process that was killed has ended, whether or not it was waited for."""
    for _ in range(3000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(("text", "cores"), [("0", [0]), ("3-5,6", [3, 4, 5, 6]), ("0,1", [0, 1])])
def test_a_list_of_cores_is_read_as_the_runtime_reads_it(text: str, cores: list[int]) -> None:
    assert visible_cores(text) == cores


def test_no_ranks_are_refused() -> None:
    with pytest.raises(InvalidLoad, match="0 ranks were requested"):
        run_ranks(f"{HOSTS}:addition", None, world=0)


# Sessions


def session(opened: Opener, tmp_path: Path, **changes: Any) -> RankSession:
    four = TensorType((4,), DType.FLOAT32)
    program = RankProgram(
        addition("libnrt", tmp_path), **{"inputs": {"x": four, "w": four}, "outputs": {"y": four}, **changes}
    )
    return RankSession(Rank(0, 1, 0, opened("libnrt"), lambda report: None), {"addition": program})


def test_a_weight_that_was_not_written_is_an_error(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="w were not written"):
        session(opened, tmp_path).run("addition", {"x": np.zeros(4, np.float32)})


def test_a_tensor_of_another_shape_or_name_is_an_error(opened: Opener, tmp_path: Path) -> None:
    own = session(opened, tmp_path)
    with pytest.raises(BadInput, match=r"'x' was written as \[3\], and it is f32\[4\]"):
        own.write("x", np.zeros(3, np.float32))
    with pytest.raises(BadInput, match=r"'z' was written as \[4\], and it is no input of a program"):
        own.write("z", np.zeros(4, np.float32))
    with pytest.raises(BadInput, match="no program has an input 'z'"):
        own.read("z")


def test_an_unused_input_and_an_empty_output_may_be_absent_from_the_program(opened: Opener, tmp_path: Path) -> None:
    four, empty = TensorType((4,), DType.FLOAT32), TensorType((0, 3), DType.FLOAT32)
    changes = {"inputs": {"x": four, "w": four, "unused": four}, "outputs": {"y": four, "none": empty}}
    own = session(opened, tmp_path, **changes)
    for name in ("w", "unused"):
        own.write(name, np.ones(4, np.float32))
    outputs = own.run("addition", {"x": np.zeros(4, np.float32)})
    assert (outputs["y"].tolist(), outputs["none"].shape) == ([1.0] * 4, (0, 3))


def test_a_number_beyond_the_devices_32_bits_is_refused(run: RunHost, tmp_path: Path) -> None:
    argument = {"program": str(lookup("emulated", tmp_path)), "ids": [0, 2**40]}
    with pytest.raises(BadInput, match="'ids' holds a number beyond the range of int32"):
        run("emulated", "lookup", argument)


def test_programs_that_differ_in_a_state_are_refused(opened: Opener, tmp_path: Path) -> None:
    programs = {}
    for name, size in (("decode", 4), ("prefill", 8)):
        path = neff.Neff({"s": (size,)}, {"s": (size,)}, ["scale s s 2"]).write(tmp_path / f"{name}.neff")
        type_ = TensorType((size,), DType.FLOAT32)
        programs[name] = RankProgram(path, {"s": type_}, {"s": type_})
    with pytest.raises(InvalidLoad, match=r"state 's' is f32\[4\] in one program and f32\[8\] in another"):
        RankSession(Rank(0, 1, 0, opened("libnrt"), lambda report: None), programs)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.INT32, DType.BOOL, DType.FLOAT32])
def test_values_of_every_type_return_as_they_were_written(dtype: DType, opened: Opener, tmp_path: Path) -> None:
    type_ = TensorType((2, 3), dtype)
    nbytes = type_.nbytes
    path = neff.Neff(
        {"x": (nbytes,)}, {"y": (nbytes,)}, ["copy y x"], dtypes={"x": "uint8", "y": "uint8"}
    ).write(tmp_path / "copy.neff")  # fmt: skip
    own = RankSession(
        Rank(0, 1, 0, opened("libnrt"), lambda report: None),
        {"copy": RankProgram(path, {"x": type_}, {"y": type_})},
    )
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.held)
    result = own.run("copy", {"x": values})["y"]
    assert result.dtype == dtype.held
    assert np.array_equal(result, values)
    assert np.array_equal(own.run("copy", {"x": values.astype(dtype.stored)})["y"], values)
