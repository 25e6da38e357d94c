"""The stand-in for neuronx-cc: it refuses what the documentation does not have, and leaves the documented files."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import pytest

from nxpipe.emulator.executable.neff import NeffVariable, open_neff
from nxpipe.emulator.hlo.schema import InstructionField as Field
from nxpipe.emulator.hlo.wire import Message
from tests.hlo.modules import SAMPLES, good, written
from tests.hlo.test_constraints import find, parameter, set_groups, set_shape, set_type
from tests.neuronx import stand_in

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def compile_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the stand-in in the folder of the test, in this process unless it is to be killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(stand_in.FAILURE, raising=False)

    def run(data: bytes, *flags: str, target: str = "trn2", failure: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "graph.pb").write_bytes(data)
        program = stand_in.install(tmp_path)
        command = [str(program), "compile", "graph.pb", "--framework", "XLA", "--target", target, *flags]
        environment = {**os.environ, stand_in.FAILURE: failure}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)

    return run


@pytest.fixture
def compile_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The same in the process of the test; the log has the errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(stand_in.FAILURE, raising=False)

    def run(data: bytes, *flags: str, target: str = "trn2") -> int:
        (tmp_path / "graph.pb").write_bytes(data)
        return stand_in.main(["compile", "graph.pb", "--framework", "XLA", "--target", target, *flags])

    return run


def log() -> str:
    return Path("log-neuron-cc.txt").read_text()


@pytest.mark.parametrize("name", SAMPLES)
def test_every_good_module_compiles_to_a_neff_with_its_names_and_sizes(
    name: str, compile_here: Callable[..., int]
) -> None:
    assert compile_here(good(name), target="trn1" if name == "sort" else "trn2") == 0
    found = open_neff(Path("file.neff"))
    assert {each.name for each in found.inputs} == {each for each, _ in SAMPLES[name].inputs}
    assert {each.name for each in found.outputs} == {each for each, _ in SAMPLES[name].outputs}
    assert all(each.nbytes > 0 for each in (*found.inputs, *found.outputs))


def test_the_compiler_leaves_the_documented_files(compile_module: Run) -> None:
    result = compile_module(good("decode step"), "--output", "out.neff", "--lnc=1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Compiler status PASS\n", "")
    assert "--lnc=1" in Path("command.txt").read_text()
    assert all(Path(each).exists() for each in ("log-neuron-cc.txt", "global_metric_store.json", "hlo_metrics.json"))
    found = open_neff(Path("out.neff"))
    assert found.inputs == (
        NeffVariable("cache", 256, "input"),
        NeffVariable("position", 4, "input"),
        NeffVariable("w", 512, "input"),
        NeffVariable("x", 32, "input"),
    )
    assert found.header.name == "out.neff"


def test_two_compilations_differ_in_their_uuid(compile_here: Callable[..., int]) -> None:
    uuids: set[UUID] = set()
    for _ in range(2):
        assert compile_here(good("attention")) == 0
        uuids.add(open_neff(Path("file.neff")).header.uuid)
    assert len(uuids) == 2


def test_inputs_and_outputs_without_names_have_the_default_ones(compile_here: Callable[..., int]) -> None:
    module = Message.parse(good("two caches"))
    for each in (parameter(module, 0), parameter(module, 1), find(module, "tuple")):
        each.remove(Field.FRONTEND_ATTRIBUTES)
    assert compile_here(module.encode()) == 0
    found = open_neff(Path("file.neff"))
    assert [each.name for each in found.inputs] == ["input0", "input1"]
    assert [each.name for each in found.outputs] == ["output0", "output1"]


@pytest.mark.parametrize(("target", "lnc", "cores"), [("trn2", "2", 2), ("trn2", "1", 1), ("trn1", "1", 1)])
def test_a_logical_core_of_two_has_two_subgraphs(
    target: str, lnc: str, cores: int, compile_here: Callable[..., int]
) -> None:
    assert compile_here(good("attention"), "-lnc", lnc, target=target) == 0
    found = open_neff(Path("file.neff"))
    assert (len(found.subgraphs), found.header.lnc_size) == (cores, cores)


@pytest.mark.parametrize(
    "flags",
    [
        ["--auto-cast", "none", "--model-type", "transformer", "-O1", "--logical-nc-config", "1"],
        ["--auto-cast=none", "--tensorizer-options=--enable-ccop-compute-overlap --vectorize-strided-dma ", "-O", "2"],
        ["--native-int64=disabled", "--implicit-integer-downcast=all", "--num-parallel-jobs", "2"],
        ["--enable-fast-loading-neuron-binaries", "--verbose=35", "--optlevel=3"],
        ["--pipeline", "compile", "SaveTemps", "--internal-tensorizer-opt-level=2"],
        ["--internal-hlo2tensorizer-options= --modular-flow-mac-threshold=10  --verify-hlo=true"],
    ],
)
def test_documented_flags_are_accepted(flags: Sequence[str], compile_here: Callable[..., int]) -> None:
    assert compile_here(good("attention"), *flags) == 0
    assert open_neff(Path("file.neff")).inputs


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "graph.pb", "--framework", "XLA"],
        ["compile", "graph.pb", "--target", "trn2"],
        ["compile", "graph.pb", "--framework", "XLA", "--target", "inf1"],
        ["compile", "graph.pb", "--framework", "XLA", "--target", "trn2", "--cache_dir=x"],
        ["compile", "graph.pb", "--framework", "XLA", "--target", "trn2", "--retry_failed_compilation"],
        ["compile", "graph.pb", "--framework", "XLA", "--targ", "trn2"],
        ["compile", "graph.pb", "--framework", "XLA", "--target", "trn2", "--layer-unroll-factor=2"],
        ["compile", "graph.pb", "--framework", "XLA", "--target", "trn2", "-O4"],
        ["run", "graph.pb"],
    ],
)
def test_other_flags_and_a_missing_target_are_refused(arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stand_in.main(arguments)
    assert ended.value.code == 2


def test_its_version_and_its_operators_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stand_in.main(["--version"])
    assert capsys.readouterr().out.startswith("NeuronX Compiler version 2.27.5334.0")
    assert stand_in.main(["list-operators", "--framework", "XLA"]) == 0
    assert {"add", "dot", "all-reduce"} < set(capsys.readouterr().out.split())


def _groups(module: Message) -> None:
    set_groups(find(module, "all-reduce"), [[rank] for rank in range(17)])


@pytest.mark.parametrize(
    ("name", "change", "target", "code"),
    [
        ("sort", lambda module: None, "trn2", "NCC_EVRF029"),
        ("attention", lambda module: find(module, "exponential").set(Field.OPCODE, "fft"), "trn2", "NCC_EVRF001"),
        ("greedy sampling", lambda module: find(module, "custom-call").set(28, "TopK"), "trn2", "NCC_EVRF015"),
        ("row-parallel layer", _groups, "trn2", "NCC_EVRF064"),
        ("attention", lambda module: set_shape(parameter(module, 0), 1 << 17, 1 << 16), "trn1", "NCC_EOOM001"),
    ],
)
def test_a_violation_ends_with_its_code_and_status_70(
    name: str, change: Callable[[Message], object], target: str, code: str, compile_here: Callable[..., int]
) -> None:
    module = Message.parse(good(name))
    change(module)
    assert compile_here(module.encode(), target=target) == 70
    assert f"[{code}]" in log()
    assert not Path("file.neff").exists()


def test_what_jaxlib_writes_is_refused_until_it_is_canonical(compile_here: Callable[..., int]) -> None:
    assert compile_here(written("row-parallel layer")) == 70
    assert "is not within 0 and 2147483647" in log()
    assert compile_here(good("row-parallel layer")) == 0


def test_a_file_that_is_no_module_is_refused(compile_here: Callable[..., int]) -> None:
    assert compile_here(b"HloModule m") == 70
    assert "[NCC_EVRF064] the HLO module is invalid" in log()


def test_two_cores_are_refused_where_the_target_has_no_logical_ones(compile_here: Callable[..., int]) -> None:
    assert compile_here(good("attention"), "--lnc", "2", target="inf2") == 70
    assert "[NCC_EARG001]" in log()


def test_permissions_of_documented_flags_are_honoured(compile_here: Callable[..., int]) -> None:
    integers = Message.parse(good("row-parallel layer"))
    set_type(find(integers, "all-reduce"), "s32")
    assert compile_here(integers.encode()) == 70
    assert compile_here(integers.encode(), "--implicit-integer-downcast=dot,all_reduce") == 0
    fp8 = Message.parse(good("causal mask"))
    set_type(find(fp8, "select"), "f8e4m3fn")
    assert compile_here(fp8.encode()) == 70
    assert compile_here(fp8.encode(), "--internal-hlo2tensorizer-options=" + stand_in._UNSAFE_FP8) == 0
    assert compile_here(good("attention"), "--internal-max-instruction-limit=5") == 70


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        ("killed", -9, ""),
        ("F137", 70, "[F137] neuronx-cc was forcibly killed"),
        ("crash", 1, "Segmentation fault"),
        ("NCC_EOOM002 too much", 70, "[NCC_EOOM002] too much"),
    ],
)
def test_failures_are_played(failure: str, status: int, text: str, compile_module: Run) -> None:
    result = compile_module(good("attention"), failure=failure)
    assert result.returncode == status
    assert text in result.stderr
    assert not Path("file.neff").exists()


def test_a_compilation_without_end_is_played(compile_module: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    monkeypatch.setattr("signal.pause", lambda: reached.append(True))
    monkeypatch.setenv(stand_in.FAILURE, "timeout")
    Path("graph.pb").write_bytes(good("attention"))
    stand_in.main(["compile", "graph.pb", "--framework", "XLA", "--target", "trn2"])
    assert reached


@pytest.mark.parametrize("failure", ["no-output", "truncated"])
def test_a_success_without_a_whole_neff_is_played(failure: str, compile_module: Run) -> None:
    assert compile_module(good("attention"), failure=failure).returncode == 0
    assert Path("file.neff").exists() == (failure == "truncated")


def test_unused_inputs_may_vanish(compile_here: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Message.parse(good("two caches"))
    double = find(module, "multiply")
    double.set_numbers(Field.OPERAND_IDS, [])
    monkeypatch.setenv(stand_in.FAILURE, "drop-unused")
    assert compile_here(module.encode()) == 0
    assert [each.name for each in open_neff(Path("file.neff")).inputs] == ["a"]
