"""`nxpipe prove` on a stand-in device, whose programs XLA computes: evidence, or none and one sentence."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Evidence
from nxpipe.artifact_store.trust.policy import has_signed_evidence
from nxpipe.artifact_store.trust.signers import open_signer
from nxpipe.emulator.executable.interface import Argument, Interface, Result
from nxpipe.emulator.executable.neff import read_neff
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.pipeline.util.errors import BuildRefused
from nxpipe.pipeline.util.exit_codes import COMPILE, INTERRUPTED, NOT_READY, OK, REFUSED, USAGE, VERIFICATION
from nxpipe.pipeline.verify import prove as module
from nxpipe.pipeline.verify.device import FetchedProgram, groups, target_of, varies
from nxpipe.pipeline.verify.prove import ProveOptions
from tests.neuronx.neff_files import BUILD, archive, container, members
from tests.pipeline.command import NXPIPE, Answer, installed
from tests.pipeline.conftest import World
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.test_build import imports

__all__ = ["nxpipe"]


def prove(nxpipe: InProcess, published: Published, *more: str) -> Answer:
    return nxpipe("prove", published.name, "--runs", "20", "--limit", "60", *more)


def objects() -> set[Path]:
    return {path for path in Path("store").rglob("*") if path.is_file()}


def proofs(store: Store, published: Published) -> list[Evidence]:
    return [each for each in store.evidence(published.manifest_digest) if each.kind == DEVICE]


@pytest.mark.sample(16)
@pytest.mark.parametrize(("kind", "degree"), [("encoder", 1), ("encoder", 2), ("decoder", 1), ("decoder", 2)])
def test_a_device_that_computes_the_golden_answers_gives_one_document(
    kind: str, degree: int, nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    store, published = world(kind, degree)
    device()
    answer = prove(nxpipe, published, "--json")
    assert answer.code == OK.number, answer.err
    (evidence,) = proofs(store, published)
    shown = json.loads(answer.out)
    assert (shown["evidence"], shown["manifest_digest"]) == (evidence.digest, published.manifest.digest)
    names = [executable.name for executable in published.manifest.executables]
    assert [compared.program for compared in evidence.programs] == names
    (golden,) = [each for each in store.evidence(published.manifest_digest) if each.kind == EMULATED]
    for compared in evidence.programs:
        assert compared.yardstick == "emulated evidence"
        assert compared.timing is not None
        assert (compared.timing.clock, compared.timing.runs) == ("device", 20)
        assert 0 < compared.timing.p50_ms <= compared.timing.p99_ms
        of_program = golden.of(compared.program)
        assert of_program is not None
        assert compared.inputs == of_program.inputs
        assert {figures.output for figures in compared.outputs} == {figures.output for figures in of_program.outputs}
        assert compared.surroundings["device"] == "inf2"
        assert compared.surroundings["logical cores"] == str(degree)
        assert compared.surroundings["compiler"].endswith("stand-in")


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("kind", "degree", "settings", "code", "sentence"),
    [
        ("encoder", 1, {"defect": "zeros"}, VERIFICATION, "is 0.0 everywhere, where the golden answer varies"),
        ("encoder", 1, {"defect": "wrong"}, VERIFICATION, "of the device: cosine"),
        ("encoder", 2, {"defect": "wrong", "defect_rank": 1}, VERIFICATION, "on rank 1 of the device: cosine"),
        ("decoder", 1, {"defect": "stale"}, VERIFICATION, "left the state cache.0.key as it was"),
        ("encoder", 2, {"defect": "hang", "defect_rank": 1}, NOT_READY, "no progress within the limit of 8 s"),
        ("encoder", 1, {"defect": "crash"}, NOT_READY, "its process ended by SIGSEGV"),
        ("encoder", 1, {"defect": "hardware"}, NOT_READY, "HBM has an uncorrectable error"),
        ("encoder", 1, {"hbm": 20_000}, NOT_READY, "HBM of the core is full"),
    ],
)
def test_a_device_with_a_defect_gives_no_evidence_and_one_sentence(
    kind: str,
    degree: int,
    settings: dict[str, object],
    code: Any,
    sentence: str,
    nxpipe: InProcess,
    world: Callable[..., World],
    device: Callable[..., None],
) -> None:
    store, published = world(kind, degree)
    device(**settings)
    before = objects()
    limit = "8" if settings.get("defect") == "hang" else "60"
    answer = prove(nxpipe, published, "--quiet", "--limit", limit)
    assert (answer.code, answer.out) == (code.number, ""), answer.err
    assert sentence in answer.err
    assert len(answer.err.splitlines()) == 1
    assert proofs(store, published) == []
    assert objects() == before


@pytest.mark.sample(4, "prove")
def test_what_cannot_be_proved_here_is_refused_before_a_device_is_opened(
    nxpipe: InProcess, world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, published = world()
    fields = [each.model_copy(update={"device": None}) for each in published.manifest.executables]
    inputs = store.put_blob(b'{"backend":"emulator"}')
    update = {"executables": tuple(fields), "backend": "emulator", "key_inputs": inputs}
    emulated = store.publish(published.manifest.model_copy(update=update))
    answer = prove(nxpipe, emulated)
    assert answer.code == COMPILE.number
    assert "has no programs for Neuron devices; build it with --backend neuronx" in answer.err
    assert prove(nxpipe, published, "--device", "emulated").code == USAGE.number
    assert prove(nxpipe, published, "--runs", "19").code == USAGE.number
    shutil.rmtree(Path("store/evidence"))
    answer = prove(nxpipe, published)
    assert answer.code == REFUSED.number
    assert "it has no evidence of a verification" in answer.err


def test_the_emulator_is_no_device() -> None:
    with pytest.raises(BuildRefused, match="'emulated' is no device"):
        ProveOptions(device="emulated")


@pytest.mark.sample(4, "prove")
def test_a_machine_without_a_device_or_with_another_one_is_not_ready(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    _, published = world()
    answer = prove(nxpipe, published, "--device", "libnrt")
    assert answer.code == NOT_READY.number
    assert "no Neuron device: the runtime's library cannot be loaded" in answer.err
    device(family="trn1")
    answer = prove(nxpipe, published)
    assert answer.code == NOT_READY.number
    assert f"{published.name} is for inf2, and this machine has trn1" in answer.err


@pytest.mark.parametrize(
    ("family", "target"),
    [("inf2", "inf2"), ("inf2e", "inf2"), ("trn1", "trn1"), ("trn1n", "trn1n"), ("trn2u", "trn2"), ("inf1", None)],
)
def test_a_family_of_instances_has_the_longest_target_that_begins_its_name(family: str, target: str | None) -> None:
    assert target_of(family) == target


@pytest.mark.sample(4, "prove")
def test_only_the_new_document_is_signed(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    """Other documents are evidence of others, which this command has not seen."""
    store, published = world()
    device(trace="none")
    assert nxpipe("store", "keygen", "release.key").code == OK.number
    untrusted = prove(nxpipe, published, "--channel", "production", "--key", "file:release.key", "--json")
    assert untrusted.code == OK.number  # no policy
    signer = open_signer("file:release.key", Path())
    assert json.loads(untrusted.out)["signed_by"] == signer.public.key_id
    assert not has_signed_evidence(store, published, signer)
    (proof,) = proofs(store, published)
    assert [each.timing.clock for each in proof.programs if each.timing] == ["host"]  # the runtime traced nothing
    assert nxpipe("store", "keygen", "other.key").code == OK.number
    toml = Path("nxpipe.toml").read_text()
    Path("nxpipe.toml").write_text(f'{toml}[signing]\nkey = "file:other.key"\nrequire = ["production"]\n')
    refused = prove(nxpipe, published, "--channel", "production")
    assert refused.code == REFUSED.number
    assert "its emulated evidence has no signature that the channel trusts" in refused.err
    assert proofs(store, published) == [proof]


@pytest.mark.sample(4, "prove")
def test_the_evidence_of_a_stand_in_device_calibrates_predictions_as_a_rehearsal(
    nxpipe: InProcess, world: Callable[..., World], device: Callable[..., None]
) -> None:
    store, published = world()
    device()
    assert prove(nxpipe, published).code == OK.number
    refused = nxpipe("calibrate", published.name)
    assert refused.code == REFUSED.number
    assert "was made with a stand-in, not by AWS's compiler on a device; pass --rehearsal" in refused.err
    answer = nxpipe("calibrate", published.name, "--rehearsal", "-o", "calibration.json", "--json")
    assert answer.code == OK.number, answer.err
    (found,) = json.loads(answer.out)["calibrations"]
    (proof,) = proofs(store, published)
    assert (found["clock"], found["rehearsal"], found["evidence"]) == ("device", True, [proof.digest])
    times = {compared.program: compared.timing.p50_ms for compared in proof.programs if compared.timing}
    assert {each["program"]: each["p50_ms"] for each in found["programs"]} == times
    rows = json.loads(nxpipe("bench", published.name, "--calibration", "calibration.json", "--json").out)
    factors = [row["calibrated_ns"] / row["predicted_ns"] for row in rows]
    assert factors == pytest.approx([phase["factor"] for phase in found["phases"].values()])


@pytest.mark.sample(4, "prove")
def test_the_command_imports_neither_torch_nor_transformers_nor_jax(
    world: Callable[..., World], device: Callable[..., None], tmp_path: Path
) -> None:
    _, published = world()
    device()
    words = ("prove", published.name, "--runs", "20")
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONPROFILEIMPORTTIME": "1", "NEURON_RT_VISIBLE_CORES": "1"}
    answer = installed(*words, cwd=tmp_path, **environment)
    assert answer.code == OK.number, answer.err
    assert "numpy" in imports(answer)
    assert imports(answer) & {"torch", "transformers", "jax", "jaxlib", "nrtpy"} == set()


@pytest.mark.sample(4, "prove")
def test_an_interrupted_command_leaves_no_file_and_no_evidence(
    world: Callable[..., World], device: Callable[..., None], tmp_path: Path
) -> None:
    store, published = world()
    device(defect="hang")
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path / "tmp")}
    command = subprocess.Popen([str(NXPIPE), "prove", published.name], env=environment, stderr=subprocess.DEVNULL)
    while not any(map(_runs_programs, (tmp_path / "tmp").glob("nxpipe-ranks-*/rank-0.json"))):
        assert command.poll() is None
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == INTERRUPTED.number
    assert list((tmp_path / "tmp").iterdir()) == []
    assert proofs(store, published) == []


def _runs_programs(job: Path) -> bool:
    """True for the job of a rank that runs programs; False for the one before it, which may be gone by now."""
    with suppress(FileNotFoundError):
        return "session:replay" in job.read_text()
    return False


def test_surroundings_have_no_path_and_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance type is read where Nitro has it; another machine's product name is not."""
    for name, content in (("DRIVER_VERSION", "2.23.9.0\n"), ("_INSTANCE", "trn2.48xlarge\n")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(module, name, tmp_path / name)
    neff = read_neff(BytesIO(container(archive(members([])), lnc=2)))
    described = {"family": "trn2", "implementation": "nrtpy", "version": "2.34"}
    assert module.surroundings(neff, 4, described) == {
        "device": "trn2",
        "instance type": "trn2.48xlarge",
        "driver": "2.23.9.0",
        "runtime": "nrtpy 2.34",
        "compiler": BUILD,
        "logical cores": "4",
        "physical cores of a logical core": "2",
    }
    (tmp_path / "_INSTANCE").write_text("Jane's desk computer\n")
    assert "instance type" not in module.surroundings(neff, 4, described)


def test_programs_run_together_unless_their_states_or_ranks_differ() -> None:
    """A rank has one tensor for a state, so caches of two capacities need two sets of processes."""

    def program(name: str, capacity: int, degree: int = 1) -> FetchedProgram:
        cache = TensorType((1, capacity), DType.FLOAT32)
        interface = Interface(
            degree, (Argument("cache", Role.STATE, cache, cache, alias=0),), (Result("cache", cache),)
        )
        neff = read_neff(BytesIO(container(archive(members([])))))
        return FetchedProgram(name, Path(name), neff, interface, {})

    programs = [program("a", 8), program("b", 16), program("c", 8), program("d", 8, degree=2)]
    assert [[each.name for each in group] for group in groups(programs)] == [["a", "c"], ["b"], ["d"]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0, 0], False), ([0, 1], True), ([np.nan, np.nan], False), ([1, np.nan], True), ([], False)],
)
def test_an_answer_is_constant_if_its_elements_are_equal_or_no_numbers(values: list[float], expected: bool) -> None:
    assert varies(np.array(values, np.float32)) is expected
