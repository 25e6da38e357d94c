"""`nxpipe agent warm`: an artifact that computes other answers on an instance, or none, does not serve from it."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store.evidence import DEVICE
from nxpipe.pipeline.util.console import reported_error
from nxpipe.pipeline.util.exit_codes import EXECUTABLE, NOT_READY, OK, VERIFICATION
from nxpipe.pipeline.verify import prove, warm
from nxpipe.pipeline.verify.execution import RunnableProgram
from nxpipe.pipeline.verify.warm import require_software
from tests.pipeline.conftest import World
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

pytestmark = pytest.mark.sample(24, "warm gate")

WARM = ("agent", "warm", "served", "--device", "--cores", "2", "--json", "-q")


@pytest.fixture
def fetched(nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]) -> World:
    """An artifact of two ranks in the folder `served`, on an instance with two cores."""
    made = world("decoder", 2)
    assert nxpipe("store", "fetch", made[1].name, "--to", "served").code == OK.number
    device()
    return made


def test_golden_inputs_run_on_every_core_and_leave_the_folder_as_it_is(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None], tmp_path: Path
) -> None:
    _, published = world("encoder", 1)
    assert nxpipe("store", "fetch", published.name, "--to", "served").code == OK.number
    before = {path: path.read_bytes() for path in Path("served").rglob("*") if path.is_file()}
    device()
    answer = nxpipe(*WARM)
    assert answer.code == OK.number, answer.err
    assert json.loads(answer.out)["copies"] == 2
    assert {path: path.read_bytes() for path in Path("served").rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob("nxpipe-warm-*"))


@pytest.mark.parametrize(
    ("defect", "rank", "code", "said"),
    [
        ("zeros", None, VERIFICATION, "everywhere"),
        ("zeros", 1, VERIFICATION, "on rank 1"),
        ("wrong", None, VERIFICATION, "verification failed"),
        ("stale", None, VERIFICATION, "left the state"),
        ("hang", None, NOT_READY, "rank"),
        ("hang", 1, NOT_READY, "rank 1"),
        ("crash", 1, NOT_READY, "rank 1"),
        ("hardware", 0, NOT_READY, "rank 0"),
    ],
)
def test_a_defect_of_a_core_stops_the_artifact_in_one_sentence(
    nxpipe: InProcess,
    fetched: World,
    device: Callable[..., None],
    defect: str,
    rank: int | None,
    code: object,
    said: str,
) -> None:
    device(defect=defect, **({} if rank is None else {"defect_rank": rank}))
    answer = nxpipe(*WARM, "--limit", "3")
    (sentence,) = filter(None, map(reported_error, answer.err.splitlines()))
    assert (answer.code, said in sentence) == (getattr(code, "number", None), True), answer.err


def test_an_instance_with_too_few_cores_or_another_device_or_none_does_not_serve(
    nxpipe: InProcess, fetched: World, device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = nxpipe("agent", "warm", "served", "--device", "--cores", "1")
    assert (few.code, "needs 2 cores, and this instance has 1" in few.err) == (NOT_READY.number, True)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    assert nxpipe(*WARM).code == NOT_READY.number
    device(family="trn1")
    other = nxpipe(*WARM)
    assert (other.code, "this machine has trn1" in other.err) == (NOT_READY.number, True)
    device(fault="nrt_init=6")
    assert nxpipe(*WARM).code == NOT_READY.number


def test_a_file_that_is_missing_or_changed_does_not_serve(nxpipe: InProcess, fetched: World) -> None:
    (program, *_) = sorted(Path("served/executables").glob("*.neff"))
    whole = program.read_bytes()
    os.truncate(program, len(whole) // 2)
    assert nxpipe(*WARM).code == EXECUTABLE.number
    program.unlink()
    answer = nxpipe(*WARM)
    assert answer.code
    assert program.name in answer.err or program.stem in answer.err


@pytest.mark.parametrize("rank", [None, 1])
def test_a_device_slower_than_its_proof_does_not_serve(
    nxpipe: InProcess, fetched: World, device: Callable[..., None], rank: int | None
) -> None:
    _, published = fetched
    assert nxpipe("prove", published.name, "--runs", "20").code == OK.number
    device(defect="slow", **({} if rank is None else {"defect_rank": rank}))
    answer = nxpipe(*WARM)
    assert (answer.code, "of its proof are the limit" in answer.err) == (NOT_READY.number, True), answer.err


def test_an_older_driver_than_that_of_the_proof_does_not_serve(
    nxpipe: InProcess, fetched: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, published = fetched
    version = tmp_path / "sys/module/neuron/version"
    version.parent.mkdir(parents=True)
    for module in (prove, warm):
        monkeypatch.setattr(module, "DRIVER_VERSION", version)
    version.write_text("2.26.5.0\n")
    assert nxpipe("prove", published.name, "--runs", "20").code == OK.number
    version.write_text("2.25.10.0\n")
    answer = nxpipe(*WARM)
    said = "the Neuron driver is 2.25.10.0, and the artifact was proved with 2.26.5.0; update the AMI"
    assert (answer.code, said in answer.err) == (NOT_READY.number, True), answer.err
    monkeypatch.setattr(warm, "SLOWEST", 1e9)  # the durations of this machine are not the subject
    for present in ("2.26.5.0", "2.27.0.0"):
        version.write_text(f"{present}\n")
        assert nxpipe(*WARM).code == OK.number, present


def test_a_runtime_older_than_that_of_the_proof_does_not_serve(nxpipe: InProcess, fetched: World) -> None:
    store, published = fetched
    assert nxpipe("prove", published.name, "--runs", "20").code == OK.number
    (proof,) = [each for each in store.evidence(published.manifest_digest) if each.kind == DEVICE]
    name, _, version = proof.programs[0].surroundings["runtime"].rpartition(" ")
    newer = {"implementation": name, "version": f"{version}.1"}
    require_software(newer, proof)
    major = int(version.split(".")[0])
    with pytest.raises(Exception, match="the artifact was proved with"):
        require_software({"implementation": name, "version": f"{major - 1}.99"}, proof)


def test_programs_of_the_emulator_are_checked_on_the_emulator(
    nxpipe: InProcess, world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, published = world("decoder", 2)
    assert nxpipe("store", "fetch", published.name, "--to", "served", "--programs", "emulator").code == OK.number
    answer = nxpipe("agent", "warm", "served")
    assert (answer.code, "2 programs agree with their golden answers" in answer.out) == (OK.number, True), answer.err
    assert nxpipe(*WARM).code == NOT_READY.number, "there is no device"
    run = RunnableProgram.run
    spoiled = (lambda values: 0 * values, "everywhere"), (lambda values: values[..., ::-1], "cosine")
    for spoil, said in spoiled:
        change = partial(_changed, run, spoil)
        monkeypatch.setattr(RunnableProgram, "run", lambda *given, change=change: change(*given))
        answer = nxpipe("agent", "warm", "served")
        assert (answer.code, said in answer.err) == (VERIFICATION.number, True), answer.err


def _changed(run: Any, spoil: Any, program: Any, inputs: Any) -> dict[str, Any]:
    return {name: spoil(values) for name, values in run(program, inputs).items()}


def test_an_artifact_without_evidence_says_that_nothing_was_checked(
    nxpipe: InProcess, world: Callable[..., World]
) -> None:
    _, published = world("encoder", 1)
    assert nxpipe("store", "fetch", published.name, "--to", "served", "--programs", "emulator").code == OK.number
    for document in Path("store").rglob("evidence/**/*"):
        if document.is_file():
            document.unlink()
    answer = nxpipe("agent", "warm", "served", "--json")
    assert (answer.code, json.loads(answer.out)["programs"]) == (OK.number, 0), answer.err
    assert "has no golden inputs" in answer.out
