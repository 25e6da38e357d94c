"""`nxpipe run`, `verify` and `bench` with --device, on a stand-in device whose programs XLA computes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nxpipe.artifact_store.evidence import DEVICE
from nxpipe.pipeline.cli.options import DEVICES
from nxpipe.pipeline.util.exit_codes import COMPILE, INTERRUPTED, NOT_READY, OK, USAGE, VERIFICATION
from nxpipe.pipeline.verify import device as module
from tests.pipeline.command import NXPIPE
from tests.pipeline.conftest import World
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def left(folder: Path) -> list[Path]:
    """What runs on devices have left there; PyTorch has files of its own."""
    return sorted(folder.glob("nxpipe-device-*")) + sorted(folder.glob("nxpipe-ranks-*"))


def test_the_command_line_and_the_devices_know_the_same_libraries() -> None:
    assert DEVICES == module.DEVICES


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "degree"), [("encoder", 1), ("decoder", 2)])
def test_a_run_on_devices_has_the_outputs_of_a_run_on_the_emulator(
    kind: str, degree: int, nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], temporary: Path
) -> None:
    _, published = world(kind, degree)
    device()
    emulated = nxpipe("run", published.name, "--output", "emulated")
    assert emulated.code == OK.number, emulated.err
    answer = nxpipe("run", published.name, "--device", "--output", "device", "--json")
    assert answer.code == OK.number, answer.err
    programs = [executable.name for executable in published.manifest.executables]
    assert [(each["program"], each["mode"]) for each in json.loads(answer.out)] == [
        (name, "device") for name in programs
    ]
    for name in programs:
        here, there = (load_file(f"{folder}/{name}.safetensors") for folder in ("emulated", "device"))
        assert here.keys() == there.keys()
        for output, array in here.items():
            assert there[output].dtype == array.dtype
            np.testing.assert_allclose(
                there[output].astype(np.float64), array.astype(np.float64), rtol=0.05, atol=0.05, err_msg=output
            )
    assert left(temporary) == []


@pytest.mark.sample(8)
def test_a_run_on_devices_takes_inputs_and_refuses_wrong_ones_before_a_device_is_opened(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    _, published = world()
    device()
    words = ("run", published.name, "--device")
    texts = nxpipe(*words, "--text", "[5, 6, 7]", "--text", "[8, 9]", "--json")
    assert texts.code == OK.number, texts.err
    assert json.loads(texts.out) != json.loads(nxpipe(*words, "--json").out)
    save_file({"input_ids": np.zeros((1, 3), np.int64)}, "short.safetensors")
    refused = nxpipe(*words, "--input", "short.safetensors")
    assert refused.code not in (OK.number, NOT_READY.number)
    assert "input_ids" in refused.err


@pytest.mark.sample(8)
def test_verification_on_devices_compares_every_rank_and_stores_nothing(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], temporary: Path
) -> None:
    store, published = world("encoder", 2)
    device()
    before = {path for path in Path("store").rglob("*") if path.is_file()}
    good = nxpipe("verify", published.name, "--device", "--json")
    assert good.code == OK.number, good.err
    assert {(each["mode"], each["passed"], *each["device"]) for each in json.loads(good.out)} == {
        ("device", True, "as stored")
    }
    device(defect="wrong", defect_rank=1)
    bad = nxpipe("verify", published.name, "--device")
    assert bad.code == VERIFICATION.number, bad.err
    assert "rank 1" in bad.err.splitlines()[-1]
    assert "device, rank 1" in bad.out
    assert "emulate " not in bad.err
    device(defect="zeros")
    dead = nxpipe("verify", published.name, "--device", "--quiet")
    assert dead.code == VERIFICATION.number
    assert "is 0.0 everywhere" in dead.err
    assert {path for path in Path("store").rglob("*") if path.is_file()} == before
    assert all(each.kind != DEVICE for each in store.evidence(published.manifest_digest))
    assert left(temporary) == []


@pytest.mark.sample(16)
def test_a_bench_on_devices_shows_p50_p99_clock_and_the_ratio_to_the_prediction(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], temporary: Path
) -> None:
    _, published = world()
    device()
    answer = nxpipe("bench", published.name, "--device", "--json")
    assert answer.code == OK.number, answer.err
    for line in json.loads(answer.out):
        measured = line["measured"]
        assert (measured["clock"], measured["runs"]) == ("device", 100)
        assert 0 < measured["p50_ms"] <= measured["p99_ms"]
        assert line["measured_ratio"] == pytest.approx(measured["p50_ms"] * 1e6 / line["predicted_ns"])
    device(trace="none")
    table = nxpipe("bench", published.name, "--device").out
    assert all(word in table for word in ("P50", "P99", "P50/PREDICTED", "CLOCK"))
    assert "host" in table  # the runtime traced nothing
    assert left(temporary) == []


@pytest.mark.sample(8)
def test_without_a_device_and_with_options_that_contradict_it_nothing_runs(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], temporary: Path
) -> None:
    _, published = world()
    for command in ("run", "verify", "bench"):
        absent = nxpipe(command, published.name, "--device", "libnrt")
        assert absent.code == NOT_READY.number, absent.err
        assert "no Neuron device: the runtime's library cannot be loaded" in absent.err
        assert nxpipe(command, published.name, "--device", "emulated").code == USAGE.number
        lone = nxpipe(command, published.name, "--limit", "5")
        assert (lone.code, "--limit is of the ranks on devices; pass --device too" in lone.err) == (USAGE.number, True)
    for command in ("run", "verify"):
        refused = nxpipe(command, published.name, "--device", "--mode", "isa")
        assert (refused.code, "--mode is of the emulator" in refused.err) == (USAGE.number, True)
        model = nxpipe(command, "--model-id", "./model", "--device")
        assert (model.code, "--device runs the NEFFs of an artifact" in model.err) == (USAGE.number, True)
    attest = nxpipe("verify", published.name, "--device", "--attest")
    assert (attest.code, "`nxpipe prove` stores such evidence" in attest.err) == (USAGE.number, True)
    both = nxpipe("bench", published.name, "--device", "--measured")
    assert (both.code, "--measured and --device cannot be combined" in both.err) == (USAGE.number, True)
    device(defect="hang")
    hung = nxpipe("run", published.name, "--device", "--limit", "5")
    assert (hung.code, "no progress within the limit of 5 s" in hung.err) == (NOT_READY.number, True)
    assert left(temporary) == []


@pytest.mark.sample(8)
def test_an_artifact_of_the_emulator_runs_on_no_device(nxpipe: InProcess, world: Callable[..., World]) -> None:
    store, published = world()
    fields = [each.model_copy(update={"device": None}) for each in published.manifest.executables]
    inputs = store.put_blob(b'{"backend":"emulator"}')
    update = {"executables": tuple(fields), "backend": "emulator", "key_inputs": inputs}
    emulated = store.publish(published.manifest.model_copy(update=update))
    for evidence in store.evidence(published.manifest_digest):
        store.attest(evidence.model_copy(update={"manifest": emulated.manifest_digest}))
    for command in ("run", "verify", "bench"):
        refused = nxpipe(command, emulated.name, "--device")
        assert refused.code == COMPILE.number, refused.err
        assert "has no programs for Neuron devices; build it with --backend neuronx" in refused.err


@pytest.mark.sample(8)
def test_an_interrupted_run_on_devices_leaves_no_file_and_no_rank(
    world: Callable[..., World], device: Callable[..., None], temporary: Path
) -> None:
    _, published = world()
    device(defect="hang")
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    words = [str(NXPIPE), "verify", published.name, "--device"]
    command = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any("session:replay" in job.read_text() for job in temporary.glob("nxpipe-ranks-*/rank-0.json")):
        assert command.poll() is None
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == INTERRUPTED.number
    assert left(temporary) == []
