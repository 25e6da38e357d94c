"""The process that reads untrusted models: its knowledge, its permissions, its end, and the checks of its outputs."""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from nxpipe.emulator.capture import capture_file, example_inputs, file_outputs, file_parameters
from nxpipe.emulator.confinement import Limits, active_limits, client, confined, wire
from nxpipe.emulator.confinement.calls import CALLS
from nxpipe.emulator.confinement.faults import ReaderFailed, deserialize_error, serialize_error
from nxpipe.emulator.errors import CaptureError, Finding, LimitExceeded, UnsupportedOperators
from nxpipe.emulator.ir.decoding import decode
from tests.pipeline.saved_programs import write_onnx, write_pt2
from tests.security.saved_entries import WEIGHTS, Saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="models are confined on Linux alone")

ALLOWED: Final = {"read the model", "read numpy", "write into its folder"}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_pt2(tmp_path / "m.pt2")


def reader() -> int:
    """The process that responded last."""
    assert client._server is not None
    assert client._server._session is not None
    return client._server._session._pid


def status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:"))


def test_the_kernel_stops_what_a_model_would_do(tmp_path: Path) -> None:
    for name in ("scratch", "model", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "m").write_text("m")
    (tmp_path / "secret" / "credentials").write_text("aws_secret_access_key = 1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = [tmp_path / "scratch", tmp_path / "model" / "m", tmp_path / "secret" / "credentials"]
        command = [sys.executable, "-m", "tests.security.misdeeds", *map(str, paths), str(server.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout)
    assert not found["write a huge file"]
    assert not found["dump core"]
    if not found.pop(""):
        pytest.skip("this kernel has no Landlock")
    assert {name for name, worked in found.items() if worked} <= ALLOWED | {"end the parent"}  # of Linux 6.12 on
    assert {name for name, worked in found.items() if worked} >= ALLOWED
    assert not (tmp_path / "model" / "y").exists()


@pytest.mark.sample(4)
def test_the_reader_knows_no_credentials_and_holds_no_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.close()
    for name in ("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "SSH_AUTH_SOCK", "ACTIONS_ID_TOKEN_REQUEST_URL"):
        monkeypatch.setenv(name, "mystery")
    with confined(), (model.parent / "open").open("w"):
        capture_file(model)
        pid = reader()
        environment = Path(f"/proc/{pid}/environ").read_text()
        held = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert "mystery" not in environment
    assert str(Path.home()) not in environment
    assert all(name == os.devnull or name.startswith(("socket:", "anon_inode:")) for name in held)
    assert len([name for name in held if name.startswith("socket:")]) == 1
    assert status(pid, "NoNewPrivs") == "1"
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    assert next(line for line in limits if line.startswith("Max core")).split()[4:6] == ["0", "0"]


def test_the_answers_are_those_of_this_process(model: Path, tmp_path: Path) -> None:
    """PyTorch's arithmetic too, which after a fork is no matter of course; and an ONNX file with its data."""
    for path in (model, write_onnx(tmp_path / "m.onnx", data="m.bin")):
        sizes = {"batch": 2} if path.suffix == ".onnx" else None
        here = capture_file(path, sizes)
        inputs = example_inputs(here, {}, seed=0)
        expected = (file_parameters(path), file_outputs(path, here, inputs))
        with confined():
            graph = capture_file(path, sizes)
            found = (file_parameters(path), file_outputs(path, graph, inputs))
        assert graph.key == here.key
        assert decode(graph.to_bytes()).to_bytes() == graph.to_bytes()
        for ours, theirs in zip(expected, found, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_each_model_has_a_process_of_its_own_and_questions_about_one_share_it(model: Path, tmp_path: Path) -> None:
    other = write_pt2(tmp_path / "other.pt2")
    with confined():
        pids = []
        for path in (model, model, other, model):
            capture_file(path)
            pids.append(reader())
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in set(pids) - {pids[-1]})


def test_outside_of_a_command_a_library_captures_in_its_own_process(model: Path) -> None:
    client.close()
    assert active_limits() is None
    capture_file(model)
    assert client._server is None


@pytest.mark.sample(4)
def test_refusals_arrive_as_what_they_are(model: Path) -> None:
    refusals = []
    for enter in (confined, contextlib.nullcontext):
        with enter(), pytest.raises(CaptureError) as caught:
            capture_file(model.with_name("gone.pt2"))
        refusals.append((str(caught.value), isinstance(caught.value.__cause__, OSError)))
    assert refusals[0] == refusals[1]
    found = deserialize_error(
        json.loads(json.dumps(serialize_error(UnsupportedOperators([Finding("a.b", "m", "s:1", 2, "c")]))))
    )
    assert isinstance(found, UnsupportedOperators)
    assert found.findings == (Finding("a.b", "m", "s:1", 2, "c"),)


@pytest.mark.attempt("L01")
def test_what_takes_too_long_is_ended(model: Path) -> None:
    with confined(Limits(seconds=0.001)), pytest.raises(LimitExceeded, match=r"not read after 0\.001 s; allow more"):
        capture_file(model)
    with confined():
        assert capture_file(model).nodes  # and the next is answered


@pytest.mark.sample(4)
@pytest.mark.attempt("L02", "L03", "L04")
def test_what_takes_too_much_memory_is_ended(tmp_path: Path, model: Path) -> None:
    changed = Saved.of(model)
    changed.entries["data/weights/weight_0"] = bytes(2**30)
    listing = changed.json(WEIGHTS)
    listing["config"]["0.weight"]["tensor_meta"].update(sizes=[{"as_int": 2**28}], strides=[{"as_int": 1}])
    changed.put(WEIGHTS, listing)
    path = changed.write(tmp_path / "large.pt2")
    with confined(Limits(memory=2**30)), pytest.raises(LimitExceeded, match=r"more than 1\.0 GiB of memory"):
        file_parameters(path)


def test_a_reader_that_is_killed_is_a_sentence_and_the_next_one_answers(model: Path) -> None:
    with confined():
        capture_file(model)
        os.kill(reader(), signal.SIGKILL)
        with pytest.raises(LimitExceeded, match="was ended by SIGKILL"):
            capture_file(model)
        assert capture_file(model).nodes


_ASKS: Final = """
import sys, time
from pathlib import Path
from nxpipe.emulator.capture import capture_file
from nxpipe.emulator.confinement import confined, client
with confined():
    capture_file(Path(sys.argv[1]))
    print(client._server._process.pid, client._server._session._pid, client._server._folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_readers_end_with_whoever_asked(model: Path, how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _ASKS, str(model)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server, session, folder = process.stdout.readline().split()
        process.send_signal(how)
        process.wait()
    left = [Path(f"/proc/{server}"), Path(f"/proc/{session}"), Path(folder)]
    for _ in range(600):
        if not any(path.exists() for path in left):
            break
        time.sleep(0.05)
    assert not [path for path in left if path.exists()]


# --- What is believed. ---


def message(document: Any, *buffers: bytes) -> bytes:
    text = json.dumps(document).encode()
    lengths = [len(text), len(buffers), *map(len, buffers)]
    return struct.pack(f"<{len(lengths)}Q", *lengths) + text + b"".join(buffers)


@pytest.mark.parametrize(
    "said",
    [
        message({"is": "os.system", "of": "true"}),
        message({"is": "array", "of": ["object", [1], 0]}, bytes(8)),
        message({"is": "array", "of": ["float32", [-1], 0]}, bytes(8)),
        message({"is": "array", "of": ["float32", [2**40], 0]}, bytes(8)),
        message({"is": "array", "of": ["float32", [2], 7]}, bytes(8)),
        message({"is": "graph", "of": 0}),
        message({"is": "dict", "of": [[1, 2]]}),
        message({"is": "type", "of": [[1], "os"]}),
        message({"__enum__": True}),
        message({"is": []}),
        struct.pack("<2Q", 2**60, 0),
        struct.pack("<2Q", 2, 2**60),
        struct.pack("<3Q", 2, 1, 2**60),
        struct.pack("<2Q", 3, 0) + b"\xff\xfe\xfd",
        struct.pack("<2Q", 200_000, 0) + b"[" * 200_000,
    ],
)
def test_nonsense_of_the_other_side_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(said)
        with pytest.raises(wire.BadMessage):
            wire.receive(ours, 2**20)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("answer", [None, 1, "x", {"a": "b"}, [["x"]], (("a",),), np.zeros(2)])
def test_an_answer_of_another_kind_is_not_taken(name: str, answer: Any) -> None:
    assert not CALLS[name].is_valid(answer)


def test_an_error_that_no_reader_has_is_a_failure_of_the_reader() -> None:
    document = serialize_error(ValueError("x")) | {"kind": "SystemExit"}
    assert isinstance(deserialize_error(document), ReaderFailed)
    with pytest.raises(TypeError):
        deserialize_error(serialize_error(CaptureError("x")) | {"message": ["x"]})


def test_limits_of_this_process_are_its_own(model: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_DATA)
    with confined(Limits(memory=2**30)):
        capture_file(model)
    assert before == (resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_DATA))
