"""AWS's compiler behind `nxpipe build`, with fakes of the documented signatures; never on hardware."""

import gzip
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.cli import doctor
from nxpipe.pipeline.compile.backend import PROGRAM
from nxpipe.pipeline.compile.neuronx.backend import ProcessLimits, compile_neff
from nxpipe.pipeline.compile.neuronx.cache_entry import entries_of
from nxpipe.pipeline.compile.neuronx.toolchain import compiler_environment, compiler_flags
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, MissingSoftware
from nxpipe.pipeline.util.exit_codes import exit_code_of
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.neuronx_fakes import RELEASES, Toolchain, toolchain
from tests.pipeline.walk import build

pytestmark = pytest.mark.sample(12)

__all__ = ["nxpipe", "toolchain"]

FORWARD = Shape("forward", 1, 32)
ROOM = ProcessLimits(seconds=200, memory=1 << 36)


def asked(model: Path, *shapes: Shape, target: str = "inf2.xlarge") -> BuildSpec:
    source = resolve(str(model))
    spec = BuildSpec(source, RandomWeights(0), shapes or (FORWARD,), instance(target))
    return replace(spec, backend="neuronx", verified=False)


def carry_out(request: BuildSpec, store: Store) -> bool:
    """Build the request; whether it was a cache hit."""
    console = Console(quiet=True)
    return build(request, store, console.step, console.say, thresholds=Thresholds(0.999, 0.02)).cached


def key_of(request: BuildSpec) -> str:
    return sha256_hex(canonical_json(request.key_inputs()))


def inside(neff: bytes) -> tuple[list[str], dict[str, Any]]:
    """The arguments of the fake compiler, and its module."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(neff[1024:]))) as archive:
        member = archive.extractfile("sg00/def.json")
        assert member is not None
        words, module = json.loads(member.read())
    return words, module


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def test_the_command_publishes_a_neff_in_the_layout_of_every_artifact(
    tmp_path: Path, toolchain: Toolchain, bert: Path, store: Store, nxpipe: InProcess
) -> None:
    words = ["build", "--model-id", str(bert), "--buckets", "32", "--weights", "random:0", "--backend", "neuronx"]
    words += ["--store", f"file://{tmp_path}/store", "--json"]
    toolchain.play("[NCC_IXLV002] internal compiler error")
    failed = nxpipe(*words)
    assert failed.code == 11
    assert "status 70 and NCC_IXLV002" in failed.err
    toolchain.play("")
    toolchain.cache()
    answer = nxpipe(*words)  # what may pass was not remembered
    assert answer.code == 0, answer.err
    (built,) = json.loads(answer.out)
    manifest = store.resolve(built["request_key"]).manifest
    assert (manifest.backend, manifest.target) == ("neuronx", "inf2")
    assert manifest.weights
    (program,) = manifest.executables
    assert (program.name, program.tensor_parallel) == ("forward-b1-s32", 1)
    called_with, module = inside(store.read_blob(program.blob))
    assert called_with[-10:] == list(compiler_flags(asked(bert)))
    files = {file.path: file.blob for file in manifest.files}
    ports = json.loads(store.read_blob(files["ports/forward-b1-s32.json"]))
    assert [[f"torch.{port['dtype']}", port["shape"]] for port in ports["inputs"]] == module["inputs"]
    answers = truth(asked(bert))
    assert [port["name"] for port in ports["outputs"]] == list(answers)
    assert [shape for shape, _ in module["outputs"]] == [list(array.shape) for array in answers.values()]
    expected = [float(np.abs(array).sum()) for array in answers.values()]
    np.testing.assert_allclose([total for _, total in module["outputs"]], expected, rtol=1e-5)
    (cached,) = entries_of(manifest)  # of what the compiler cached, the lock alone stays behind
    assert set(cached.files) == {"compile_flags.json", "model.done", "model.hlo_module.pb", "model.neff"}
    assert (cached.program, cached.files["model.neff"]) == (program.name, program.blob)
    refused = nxpipe("verify", built["request_key"], "--store", f"file://{tmp_path}/store")
    assert refused.code == 11
    assert "which the emulator cannot run" in refused.err


def truth(request: BuildSpec) -> dict[str, Any]:
    """PyTorch's outputs for the weights and the example, in the order of the program's outputs."""
    graph = request.capture(FORWARD)
    inputs = example_inputs(graph, request.source.config, seed=0)
    answers = request.outputs(FORWARD, dict(request.tensors()), inputs)
    return {name: answers[name] for name in graph.outputs}


@pytest.mark.usefixtures("toolchain")
def test_a_decode_takes_and_gives_its_cache(llama: Path) -> None:
    shape = Shape("decode", 1, 32)
    request = asked(llama, shape)
    graph = request.capture(shape)
    _, module = inside(compile_neff(request, shape, graph, request.tensors(), ROOM)[PROGRAM])
    cache = ["torch.bfloat16", [1, 2, 32, 8]]
    assert module["inputs"][:2] == [["torch.int64", [1, 1]], ["torch.int64", [1]]]
    assert module["inputs"][2:] == [cache] * 4
    assert len(module["outputs"]) == 5


def test_what_the_compiler_refuses_is_remembered_with_its_finding(
    toolchain: Toolchain, bert: Path, store: Store
) -> None:
    toolchain.play("[NCC_EVRF009] The tensors need 40 GB, and the target has 16 GB.")
    with pytest.raises(DoesNotFit, match=r"NCC_EVRF009: The tensors need 40 GB.*NXC-401") as refused:
        carry_out(asked(bert), store)
    assert "[neuronx-cc]" in "".join(refused.value.__notes__)
    toolchain.play("")
    with pytest.raises(DoesNotFit, match="known failure") as again:
        carry_out(asked(bert), store)
    row = exit_code_of(again.value)
    assert row is not None
    assert row.number == 13


FLAGS = [
    ({}, "--target inf2 --model-type transformer --auto-cast matmult --auto-cast-type bf16 --logical-nc-config 1"),
    ({"autocast": "none"}, "--target inf2 --model-type transformer --auto-cast none --logical-nc-config 1"),
    (
        {"target": instance("trn2.48xlarge"), "autocast": "all", "autocast_type": "fp8_e4m3"},
        "--target trn2 --model-type transformer --auto-cast all --auto-cast-type fp8_e4m3 --logical-nc-config 2",
    ),
]


@pytest.mark.parametrize(("changed", "flags"), FLAGS)
def test_every_option_of_a_request_is_said_to_the_compiler(changed: dict[str, Any], flags: str, bert: Path) -> None:
    assert " ".join(compiler_flags(replace(asked(bert), **changed))) == flags


def test_the_key_is_of_the_backend_and_of_each_release_of_the_toolchain(toolchain: Toolchain, bert: Path) -> None:
    request = asked(bert)
    emulated = BuildSpec(request.source, request.weights, request.shapes, request.target)
    keys = {key_of(request), key_of(emulated)}
    for name in RELEASES:
        toolchain.release(name, "99.0")
        keys.add(key_of(request))
    assert len(keys) == 2 + len(RELEASES)


def test_the_environment_keeps_the_users_cache_and_drops_what_misleads(bert: Path) -> None:
    given = {"HOME": "/home/me", "XLA_DOWNCAST_BF16": "1", "NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    assert compiler_environment(asked(bert), given, Path("/job/cache")) == {
        "HOME": "/home/me",
        "NEURON_COMPILE_CACHE_URL": "/job/cache",
        "NEURON_CC_FLAGS": "--retry_failed_compilation",
        "NEURON_LOGICAL_NC_CONFIG": "1",
    }
    given = {"NEURON_COMPILE_CACHE_URL": "s3://cache/here", "NEURON_CC_FLAGS": "--cache_dir=/c --no_cache"}
    found = compiler_environment(asked(bert), given, Path("/job/cache"))
    assert found["NEURON_COMPILE_CACHE_URL"] == "s3://cache/here"
    assert found["NEURON_CC_FLAGS"] == "--cache_dir=/c --no_cache --retry_failed_compilation"


@pytest.mark.usefixtures("toolchain")
def test_the_file_says_whose_compiler_and_the_command_line_may_say_otherwise(
    tmp_path: Path, bert: Path, store: Store, nxpipe: InProcess
) -> None:
    model = f'name = "it"\npath = "{bert}"\ntask = "feature-extraction"\ntarget = "inf2.xlarge"\nbuckets = [32]\n'
    config = tmp_path / "nxpipe.toml"
    config.write_text(f'[project]\nname = "p"\n[build]\nbackend = "neuronx"\n[[models]]\n{model}weights = "random:0"\n')
    words = ["build", "--config", str(config), "--store", f"file://{tmp_path}/store", "--json"]
    for more, backend in (([], "neuronx"), (["--backend", "emulator", "--no-verify"], "emulator")):
        answer = nxpipe(*words, *more)
        assert answer.code == 0, answer.err
        (built,) = json.loads(answer.out)
        assert store.resolve(built["request_key"]).manifest.backend == backend


@pytest.mark.usefixtures("toolchain")
def test_what_this_backend_cannot_do_is_refused_before_any_work(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(bert)
    with pytest.raises(BuildRefused, match=r"compiles for one core, .* pass --tp 1 where the model fits one core"):
        replace(request, tensor_parallel=2).check()
    with pytest.raises(BuildRefused, match="its targets are inf2, trn1, trn1n, trn2"):
        asked(bert, target="trn3_gen1").check()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/c -O1")
    with pytest.raises(BuildRefused, match="NEURON_CC_FLAGS holds '-O1'"):
        request.check()


@pytest.mark.sample(12)
@pytest.mark.parametrize("missing", ["neuronx-cc", "torch-neuronx", "the program neuronx-cc on the PATH"])
def test_what_is_missing_is_named_by_doctor_and_build(missing: str, toolchain: Toolchain, bert: Path) -> None:
    def state() -> str:
        return next(entry.state for entry in doctor.examine() if entry.need.needed_for.endswith("--backend neuronx"))

    asked(bert).check()
    assert state() == "ok"
    if missing in RELEASES:
        (toolchain.packages / f"{missing.replace('-', '_')}.dist-info" / "METADATA").unlink()
        (toolchain.packages / f"{missing.replace('-', '_')}.dist-info").rmdir()
    else:
        (toolchain.programs / "neuronx-cc").unlink()
    assert state() == "optional"
    with pytest.raises(MissingSoftware, match=missing):
        asked(bert).check()
