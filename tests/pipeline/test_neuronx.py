"""AWS's compiler behind `nxpipe build`, with a stand-in that has its documented command line; never on hardware."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.errors import OutputLost
from nxpipe.artifact_store.layout import action_path, blob_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.emulator.executable.interface import interface_from
from nxpipe.emulator.executable.neff import Neff, read_neff
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.hlo.constraints import TARGETS
from nxpipe.emulator.isa.program import Role
from nxpipe.pipeline.cli import doctor
from nxpipe.pipeline.compile.neuronx.compiler import compiler_environment
from nxpipe.pipeline.compile.neuronx.toolchain import Compilation, compiler_flags
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, MissingSoftware
from nxpipe.pipeline.util.exit_codes import exit_code_of
from tests.neuronx.installed import InstalledCompiler, compiler
from tests.neuronx.neff_files import BUILD
from tests.pipeline.conftest import LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.saved_programs import write_onnx, write_pt2
from tests.pipeline.walk import build

sampled = pytest.mark.sample(12)

__all__ = ["compiler", "nxpipe"]

FORWARD, PREFILL, DECODE = Shape("forward", 1, 32), Shape("prefill", 1, 32), Shape("decode", 1, 32)


def asked(model: Path, *shapes: Shape, target: str = "inf2.xlarge", seed: int = 0, **options: Any) -> BuildSpec:
    source = resolve(str(model))
    spec = BuildSpec(source, RandomWeights(seed), shapes or (FORWARD,), instance(target))
    return replace(spec, **{"backend": "neuronx", "verified": False, **options})


def carry_out(request: BuildSpec, store: Store, **options: Any) -> Manifest:
    """Build the request; the manifest of its artifact."""
    console = Console(quiet=True)
    build(request, store, console.step, console.say, thresholds=Thresholds(0.999, 0.02), **options)
    return store.resolve(request.request_key).manifest


def neff_of(store: Store, manifest: Manifest, number: int = 0) -> Neff:
    device = manifest.executables[number].device
    assert device is not None
    return read_neff(BytesIO(store.read_blob(device.neff)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


# Artifacts


@sampled
def test_the_command_publishes_both_programs_of_a_graph_with_evidence_of_the_emulators(
    tmp_path: Path, compiler: InstalledCompiler, bert: Path, store: Store, nxpipe: InProcess
) -> None:
    url = f"file://{tmp_path}/store"
    words = ["build", "--model-id", str(bert), "--buckets", "32", "--weights", "random:0", "--store", url, "--json"]
    compiler.fail("NCC_IXLV002 internal compiler error")
    failed = nxpipe(*words, "--backend", "neuronx")
    assert failed.code == 11
    assert "status 70 and NCC_IXLV002" in failed.err
    compiler.fail("")
    answer = nxpipe(*words, "--backend", "neuronx")  # what may pass was not remembered
    assert answer.code == 0, answer.err
    (built,) = json.loads(answer.out)
    published = store.resolve(built["request_key"])
    manifest = published.manifest
    assert (manifest.backend, manifest.target, manifest.runs_on_devices) == ("neuronx", "inf2", True)
    assert {"emulated", "xla"} <= {evidence.kind for evidence in store.evidence(published.manifest_digest)}
    assert not any("device" in file.path for file in manifest.files)
    verified = nxpipe("verify", built["request_key"], "--store", url)
    assert verified.code == 0, verified.err
    assert "NEFF" in nxpipe("store", "show", built["request_key"], "--store", url).out
    emulated = nxpipe(*words, "--backend", "emulator", "--no-verify")
    assert emulated.code == 0, emulated.err
    other = store.resolve(json.loads(emulated.out)[0]["request_key"]).manifest
    ours, theirs = manifest.executables[0], other.executables[0]
    assert (ours.blob, ours.graph_key) == (theirs.blob, theirs.graph_key)
    assert theirs.device is None


BUILDS = [
    ("llama", "inf2.xlarge", 1, (PREFILL, DECODE)),
    ("llama", "inf2.xlarge", 2, (DECODE,)),
    ("llama", "trn1.32xlarge", 8, (PREFILL,)),
    ("llama", "trn2.48xlarge", 2, (PREFILL, DECODE)),
    ("wide_llama", "trn2.48xlarge", 64, (DECODE,)),
    ("llama", "trn3_gen2", 4, (DECODE,)),
    ("bert", "inf2.xlarge", 1, (FORWARD,)),
    ("bert", "trn1n.32xlarge", 2, (FORWARD,)),
    ("bert", "trn2.48xlarge", 4, (FORWARD,)),
    ("bert", "trn3_gen1", 1, (FORWARD,)),
]


@pytest.fixture
def wide_llama(tmp_path: Path) -> Path:
    heads = {"hidden_size": 256, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 256}
    return write_model(tmp_path / "models" / "wide-llama", {**LLAMA, **heads, "num_hidden_layers": 1})


@sampled
@pytest.mark.parametrize(("model", "target", "degree", "shapes"), BUILDS)
def test_encoders_and_decoders_compile_for_each_target_and_degree(
    model: str,
    target: str,
    degree: int,
    shapes: tuple[Shape, ...],
    compiler: InstalledCompiler,
    store: Store,
    request: pytest.FixtureRequest,
) -> None:
    asking = asked(request.getfixturevalue(model), *shapes, target=target, tensor_parallel=degree)
    manifest = carry_out(asking, store)
    assert [executable.name for executable in manifest.executables] == sorted(shape.name for shape in shapes)
    for executable in manifest.executables:
        assert executable.device is not None
        assert executable.tensor_parallel == degree
        interface = interface_from(store.read_blob(executable.device.interface))
        assert interface.degree == degree
        states = {argument.name for argument in interface.of_role(Role.STATE)}
        assert bool(states) == (model != "bert")  # the KV cache
        assert set(executable.outputs) == {result.name for result in interface.results}
        neff = read_neff(BytesIO(store.read_blob(executable.device.neff)))
        assert {each.tensor for each in neff.inputs} == {argument.name for argument in interface.arguments}
        assert len(neff.subgraphs) == (2 if target.startswith(("trn2", "trn3")) else 1)
    expected = {compiler_flags(Compilation.of(asking, shape.phase)) for shape in shapes}
    assert {tuple(call[3:-2]) for call in (without_jobs(call) for call in compiler.calls)} == expected


def without_jobs(call: list[str]) -> list[str]:
    """The arguments without those of a small machine."""
    return call[: call.index("--num-parallel-jobs")] if "--num-parallel-jobs" in call else call


@sampled
@pytest.mark.parametrize(("write", "axes"), [(write_pt2, ()), (write_onnx, ("--axis", "batch=2"))], ids=["pt2", "onnx"])
def test_saved_programs_compile_too(
    write: Callable[[Path], Path],
    axes: tuple[str, ...],
    tmp_path: Path,
    compiler: InstalledCompiler,
    nxpipe: InProcess,
    store: Store,
) -> None:
    path = write(tmp_path / ("it.onnx" if axes else "it.pt2"))
    words = ["build", "--model-id", str(path), "--store", f"file://{tmp_path}/store", "--json", "--no-verify", *axes]
    answer = nxpipe(*words, "--backend", "neuronx", "--target", "trn2.48xlarge")
    assert answer.code == 0, answer.err
    (built,) = json.loads(answer.out)
    assert store.resolve(built["request_key"]).manifest.runs_on_devices
    assert len(compiler.calls) == 1


# Keys


@sampled
def test_what_is_in_the_store_is_compiled_once(
    tmp_path: Path, compiler: InstalledCompiler, llama: Path, store: Store
) -> None:
    first = carry_out(asked(llama, DECODE), store)
    assert len(compiler.calls) == 1
    assert carry_out(asked(llama, DECODE), store) == first
    same = write_model(tmp_path / "models" / "finetuned", {**LLAMA, "_name_or_path": "another"})
    for request in (asked(llama, DECODE, seed=1), asked(same, DECODE)):  # other weights; another model
        assert neff_of(store, carry_out(request, store)).header.uuid == neff_of(store, first).header.uuid
    assert len(compiler.calls) == 1
    longer = carry_out(asked(llama, DECODE, Shape("decode", 1, 64)), store)  # a bucket more
    assert len(compiler.calls) == 2
    assert neff_of(store, longer).header.uuid == neff_of(store, first).header.uuid
    carry_out(asked(llama, DECODE), store, force=True)  # is compiled, and the first NEFF stays
    assert len(compiler.calls) == 3


@sampled
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_neff_that_the_store_lost_is_compiled_again_and_the_artifact_that_names_it_is_in_conflict(
    tmp_path: Path, damage: str, compiler: InstalledCompiler, bert: Path, store: Store
) -> None:
    request = asked(bert)
    device = carry_out(request, store).executables[0].device
    assert device is not None
    path = tmp_path / "store" / blob_path(device.neff)
    path.chmod(0o600)
    path.unlink() if damage == "missing" else path.write_bytes(b"rot")
    proven = carry_out(asked(bert, seed=1, verified=True), store)  # the same program, with evidence by XLA
    assert neff_of(store, proven)
    assert len(compiler.calls) == 2
    assert {"emulated", "xla"} <= {evidence.kind for evidence in store.evidence(proven.digest)}
    with pytest.raises(OutputLost, match=f"whose blob {device.neff.sha256} .* and build again") as lost:
        carry_out(request, store, force=True)
    row = exit_code_of(lost.value)
    assert row is not None
    assert row.number == 24
    (tmp_path / "store" / action_path(request.request_key)).unlink()
    assert carry_out(request, store).executables == proven.executables
    assert len(compiler.calls) == 3  # the forced one


@sampled
@pytest.mark.usefixtures("compiler")
def test_the_emulators_program_is_emitted_once_for_both_back_ends(
    bert: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(asked(bert, backend="emulator"), store)
    monkeypatch.setattr("nxpipe.emulator.compile.emit", lambda *_, **__: pytest.fail("emitted again"))
    carry_out(asked(bert), store)


@pytest.mark.usefixtures("compiler")
def test_the_key_is_of_the_back_end_and_of_each_release(
    bert: Path, compiler: InstalledCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(bert)
    keys = {request.request_key, replace(request, backend="emulator").request_key}
    compiler.replace("echo NeuronX Compiler version 99.0.1+abc")
    keys.add(request.request_key)
    monkeypatch.setattr("nxpipe.pipeline.compile.neuronx.toolchain._installed", lambda _: "99.0")
    keys.add(request.request_key)
    assert len(keys) == 4


def test_weights_and_names_of_the_machine_are_in_no_key_of_a_program(bert: Path, compiler: InstalledCompiler) -> None:
    assert asked(bert).program_key(FORWARD) == asked(bert, seed=1).program_key(FORWARD)
    assert asked(bert).program_key(FORWARD) != asked(bert, target="trn1.2xlarge").program_key(FORWARD)


# Flags


@pytest.mark.parametrize(
    ("compilation", "flags"),
    [
        (
            Compilation("inf2", "prefill", "text-generation", "2.27.1"),
            "--target=inf2 --model-type=transformer --auto-cast=none --lnc=1 -O1 --enable-mixed-precision-accumulation "
            "--enable-saturate-infinity --implicit-integer-downcast=all",
        ),
        (
            Compilation("trn2", "decode", "text-generation", "2.27.1"),
            "--target=trn2 --model-type=transformer --auto-cast=none --lnc=2 -O2 --enable-mixed-precision-accumulation "
            "--implicit-integer-downcast=all --native-int64=disabled",
        ),
        (
            Compilation("trn1", "forward", "image-denoising", "2.21.3"),
            "--target=trn1 --model-type=unet-inference --auto-cast=none --lnc=1 -O1 "
            "--enable-mixed-precision-accumulation --enable-saturate-infinity",
        ),
        (
            Compilation("trn3"),
            "--target=trn3 --model-type=generic --auto-cast=none --lnc=2 -O1 --enable-mixed-precision-accumulation "
            "--implicit-integer-downcast=all --native-int64=disabled",
        ),
    ],
)
def test_the_flags_follow_from_target_phase_task_and_release(compilation: Compilation, flags: str) -> None:
    assert " ".join(compiler_flags(compilation)) == flags


def test_every_target_has_flags() -> None:
    assert len({compiler_flags(Compilation(target)) for target in TARGETS}) == len(TARGETS)


def test_the_compiler_reads_no_variable_of_neuron_or_xla() -> None:
    given = {"HOME": "/home/me", "XLA_USE_BF16": "1", "NEURON_CC_FLAGS": "--cache_dir=/c", "TMPDIR": "/scratch"}
    assert compiler_environment(given) == {"HOME": "/home/me", "TMPDIR": "/scratch"}


# Refusals


@pytest.mark.usefixtures("compiler")
def test_what_the_back_end_cannot_do_is_refused_before_any_work(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(bert)
    with pytest.raises(BuildRefused, match="has no tensor-parallel degree 64"):
        replace(request, tensor_parallel=64).check()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/c --no_cache")
    request.check()
    for flags, told in (("--cache_dir=/c -O1", "holds '-O1'"), ("'", "cannot be read")):
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        with pytest.raises(BuildRefused, match=f"NEURON_CC_FLAGS {told}"):
            request.check()


@sampled
def test_what_the_compiler_refuses_is_remembered_with_its_finding(
    compiler: InstalledCompiler, bert: Path, store: Store
) -> None:
    compiler.fail("NCC_EVRF009 The tensors need 40 GB, and the target has 16 GB.")
    with pytest.raises(DoesNotFit, match=r"NCC_EVRF009: The tensors need 40 GB.*NXC-401") as refused:
        carry_out(asked(bert), store)
    assert "[neuronx-cc]" in "".join(refused.value.__notes__)
    compiler.fail("")
    with pytest.raises(DoesNotFit, match="known failure") as again:
        carry_out(asked(bert), store)
    row = exit_code_of(again.value)
    assert row is not None
    assert row.number == 13


@sampled
@pytest.mark.usefixtures("compiler")
def test_the_file_says_whose_compiler_and_the_command_line_may_say_otherwise(
    tmp_path: Path, bert: Path, store: Store, nxpipe: InProcess
) -> None:
    model = f'name = "it"\npath = "{bert}"\ntask = "feature-extraction"\ntarget = "inf2.xlarge"\nbuckets = [32]\n'
    config = tmp_path / "nxpipe.toml"
    config.write_text(f'[project]\nname = "p"\n[build]\nbackend = "neuronx"\n[[models]]\n{model}weights = "random:0"\n')
    words = ["build", "--config", str(config), "--store", f"file://{tmp_path}/store", "--json", "--no-verify"]
    for more, backend in (([], "neuronx"), (["--backend", "emulator"], "emulator")):
        answer = nxpipe(*words, *more)
        assert answer.code == 0, answer.err
        (built,) = json.loads(answer.out)
        assert store.resolve(built["request_key"]).manifest.backend == backend


# The installation


def state_by_doctor() -> str:
    need = next(need for need in doctor.NEEDS if need.needed_for.endswith("--backend neuronx"))
    return doctor.Requirement(need, need.find()).state


@pytest.mark.parametrize("missing", ["neuronx-cc", "jaxlib", "release"])
def test_what_is_missing_is_named_by_doctor_and_build(
    missing: str, compiler: InstalledCompiler, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(bert).check()
    assert state_by_doctor() == "ok"
    if missing == "neuronx-cc":
        compiler.remove()
    elif missing == "release":
        compiler.replace("exit 1")
    else:
        monkeypatch.setattr("nxpipe.pipeline.compile.neuronx.toolchain._installed", lambda _: None)
    assert state_by_doctor() == "optional"
    with pytest.raises(MissingSoftware, match="jaxlib" if missing == "jaxlib" else "neuronx-cc on the PATH"):
        asked(bert).check()


@pytest.mark.usefixtures("compiler")
def test_the_compiler_may_live_in_another_environment(nxpipe: InProcess) -> None:
    assert json.loads(nxpipe("version", "--json").out)["backend neuronx"] == BUILD
