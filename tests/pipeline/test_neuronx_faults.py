"""What the compiler says, and what becomes of it."""

import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from nxpipe.emulator.executable.interface import Argument, Interface, Result
from nxpipe.emulator.hlo import constraints
from nxpipe.emulator.hlo.constraints import HloLimits
from nxpipe.emulator.hlo.schema import InstructionField
from nxpipe.emulator.hlo.wire import Message
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.pipeline.compile.findings import RULES
from nxpipe.pipeline.compile.neuronx.backend import require_accepted, require_interface
from nxpipe.pipeline.compile.neuronx.compiler import (
    CompilerFailed,
    ProcessLimits,
    compile_module,
    explain,
    finding_of,
    read_compiled,
)
from nxpipe.pipeline.compile.neuronx.toolchain import Compilation, compiler_flags
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, MissingSoftware, NotEnoughMemory
from nxpipe.pipeline.util.exit_codes import exit_code_of
from tests.conftest import ROOT
from tests.hlo.modules import good
from tests.neuronx.installed import InstalledCompiler, compiler
from tests.neuronx.neff_files import Variable, archive, container, members

__all__ = ["compiler"]


def codes_of_the_page() -> list[tuple[str, str]]:
    """Every code in the table of docs/guides/neuronx.md, and the rule beside it; `A1 to A3` stands for all between."""
    rows = re.findall(r"^\| (.*) \| (NXC-\d+) ", (ROOT / "docs" / "guides" / "neuronx.md").read_text(), re.MULTILINE)
    found = []
    for codes, rule in rows:
        for family, first, last in re.findall(r"\b(E[A-Z]{3})(\d{3})(?: to E[A-Z]{3}(\d{3}))?", codes):
            found += [(f"{family}{number:03}", rule) for number in range(int(first), int(last or first) + 1)]
    return found


def test_every_code_of_the_page_is_the_finding_that_it_says() -> None:
    codes = codes_of_the_page()
    assert len(codes) == len(dict(codes)) > 50
    for code, rule in codes:
        found = finding_of(f"2026-11-21 ERROR [neuronx-cc]: [NCC_{code}] Something is wrong.", "forward-b1-s32")
        assert found is not None, code
        assert found.rule.id == rule, code
        assert found.message == f"NCC_{code}: Something is wrong"
        assert found.programs == ("forward-b1-s32",)
        assert found.advice


def test_a_code_that_is_not_the_requests_fault_is_no_finding() -> None:
    for text in ("", "NCC_IXLV002: internal", "[NCC_EVRF059] Kernel file does not exist", "[NCC_EVRF0091] no code"):
        assert finding_of(text, "forward") is None


def test_the_first_known_code_decides() -> None:
    found = finding_of("[NCC_IXXX001] internal\n[NCC_EVRF001] sort\n[NCC_EVRF009] large", "forward")
    assert found is not None
    assert (found.rule, found.message) == (RULES["NXC-203"], "NCC_EVRF001: sort")


CASES = [
    (70, "[NCC_EVRF001] Operator sort.", BuildRefused, "reports NCC_EVRF001", True),
    (70, "[NCC_EOOM001] Too large.", DoesNotFit, "NXC-401", True),
    (70, "[NCC_EVRF059] No kernel.", CompilerFailed, "status 70 and NCC_EVRF059", False),
    (70, "[F137] neuronx-cc was forcibly killed", NotEnoughMemory, "memory runs out", False),
    (-signal.SIGKILL, "", NotEnoughMemory, "memory runs out", False),
    (-signal.SIGSEGV, "", CompilerFailed, "signal 11", False),
    (1, "ImportError: libnrt.so.1: cannot open.\n\n", CompilerFailed, "status 1 .*ImportError: libnrt", False),
    (2, "neuronx-cc: error: unrecognized arguments: --lnc=2", CompilerFailed, "unrecognized arguments", False),
    (70, "", CompilerFailed, "no output", False),
]


@pytest.mark.parametrize(("status", "output", "kind", "sentence", "remembered"), CASES)
def test_each_end_of_the_compiler_has_its_error(
    status: int, output: str, kind: type[BuildRefused], sentence: str, remembered: bool
) -> None:
    error = explain("tiny-bert forward-b1-s32", status, output)
    assert type(error) is kind
    assert re.search(sentence, str(error))
    assert str(error).startswith("tiny-bert forward-b1-s32: ")
    assert error.deterministic is remembered


def compiled(seconds: float = 100, name: str = "attention") -> bytes:
    flags = compiler_flags(Compilation("trn2"))
    return compile_module("tiny-bert", good(name), flags, ProcessLimits(seconds, memory=1 << 40))


def test_a_module_becomes_a_neff_in_a_folder_that_is_gone_afterwards(
    compiler: InstalledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    neff = read_compiled("tiny-bert", compiled())
    assert neff.header.name == "module.neff"
    assert {each.name for each in neff.inputs} == {"q", "k", "v"}
    (call,) = compiler.calls
    assert call[:3] == ["module.pb", "--framework", "XLA"]
    assert not any(scratch.iterdir())
    assert not (tmp_path / "log-neuron-cc.txt").exists()


FAILURES = [
    ("killed", NotEnoughMemory, "memory runs out"),
    ("F137", NotEnoughMemory, "memory runs out"),
    ("timeout", CompilerFailed, "exceeded 1 s"),
    ("no-output", CompilerFailed, "status 0 and left no NEFF"),
    ("crash", CompilerFailed, "status 1 and without an error code: Segmentation fault"),
    ("NCC_EVRF001 Operator sort is not supported", BuildRefused, "NXC-203"),
    ("NCC_EXTP004 Too many instructions", DoesNotFit, "NXC-401"),
    ("NCC_IXLV002 internal", CompilerFailed, "NCC_IXLV002"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("failure", "kind", "sentence"), FAILURES)
def test_each_failure_of_a_compilation_has_its_error_with_the_end_of_the_log(
    failure: str, kind: type[BuildRefused], sentence: str, compiler: InstalledCompiler
) -> None:
    compiler.fail(failure)
    with pytest.raises(BuildRefused, match=f"^tiny-bert: .*{sentence}") as raised:
        compiled(seconds=1 if failure == "timeout" else 100)
    assert type(raised.value) is kind
    assert raised.value.deterministic is not issubclass(kind, CompilerFailed | NotEnoughMemory)
    assert any("The end of the compiler's output" in note for note in raised.value.__notes__)
    row = exit_code_of(raised.value)
    assert row is not None
    assert row.number == (13 if kind is DoesNotFit else 11)


def test_a_missing_compiler_and_a_damaged_neff_are_errors_of_their_own(compiler: InstalledCompiler) -> None:
    with pytest.raises(CompilerFailed, match=r"tiny-bert: the NEFF cannot be read: .*; compile the program again"):
        read_compiled("tiny-bert", b"\1" * 2000)
    compiler.remove()
    with pytest.raises(MissingSoftware, match="neuronx-cc on the PATH"):
        compiled()


def test_a_damaged_neff_is_no_known_failure(compiler: InstalledCompiler) -> None:
    compiler.fail("truncated")
    with pytest.raises(CompilerFailed, match="tiny-bert: the NEFF cannot be read: it ends"):
        read_compiled("tiny-bert", compiled())


# Constraints and interfaces


def test_a_module_that_breaks_a_constraint_is_refused_with_operator_rule_and_remedy() -> None:
    data = Message.parse(good("attention"))
    (entry,) = [part for part in data.messages(3) if part.number(6) and len(part.messages(2)) > 5]
    dot = next(each for each in entry.messages(2) if each.text(InstructionField.OPCODE) == "dot")
    dot.set(InstructionField.OPCODE, "cholesky")
    with pytest.raises(BuildRefused, match=r"tiny-bert: neuronx-cc would refuse \S+: .*NCC_EVRF001.*NXC-203\); \S+"):
        require_accepted("tiny-bert", data.encode(), "trn2")
    require_accepted("tiny-bert", good("attention"), "trn2")


def test_a_violation_that_is_of_size_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    few = HloLimits(instructions=2)
    monkeypatch.setattr(constraints, "violations", partial(constraints.violations, limits=few))
    with pytest.raises(DoesNotFit, match=r"instructions, and the limit is 2 \[NCC_EXTP004\] \(NXC-401\)"):
        require_accepted("tiny-bert", good("attention"), "trn2")


INPUT, OUTPUT = TensorType((2, 4), DType.INT64), TensorType((4,), DType.BFLOAT16)
INTERFACE = Interface(
    1,
    (
        Argument("x", Role.INPUT, INPUT, INPUT),
        Argument("unread", Role.PARAMETER, OUTPUT, OUTPUT),
        Argument("cache", Role.STATE, OUTPUT, OUTPUT, alias=0),
    ),
    (Result("cache", OUTPUT), Result("y", OUTPUT)),
)
X, CACHE_IN, CACHE_OUT, Y = (
    Variable("x", "input", 2 * 4 * 4),  # a device has integers of 32 bits
    Variable("cache.must_alias_input", "input", 8),
    Variable("cache", "output", 8),
    Variable("y", "output", 8),
)


def neff(*variables: Variable, cores: int = 2, stated: int = 2) -> bytes:
    return container(archive(members(variables, subgraphs=cores)), lnc=stated, uuid=UUID(int=1))


def test_a_neff_may_lack_an_input_that_nothing_reads() -> None:
    require_interface("tiny-bert", neff(X, CACHE_IN, CACHE_OUT, Y), INTERFACE, 2)
    unread = Variable("unread", "input", 8)
    require_interface("tiny-bert", neff(X, CACHE_IN, CACHE_OUT, Y, unread), INTERFACE, 2)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (neff(X, CACHE_IN, CACHE_OUT), "outputs .* 'y' is missing"),
        (neff(replace(X, nbytes=64), CACHE_IN, CACHE_OUT, Y), "'x' has 64 bytes, and 32 are declared"),
        (neff(X, CACHE_IN, CACHE_OUT, replace(Y, nbytes=16)), "'y' has 16 bytes, and 8 are declared"),
        (neff(X, CACHE_IN, CACHE_OUT, Y, Variable("input7", "input", 8)), "'input7' is not declared"),
        (neff(X, CACHE_IN, CACHE_OUT, Y, cores=1, stated=1), "for 1 physical cores of a logical one, and 2"),
        (neff(X, CACHE_IN, CACHE_OUT, Y, cores=1, stated=0), "for 1 physical cores of a logical one, and 2"),
        (neff(X, CACHE_IN, CACHE_OUT, Y)[:1200], "cannot be read"),
    ],
)
def test_a_neff_with_other_tensors_or_cores_is_refused_and_not_remembered(data: bytes, sentence: str) -> None:
    with pytest.raises(CompilerFailed, match=f"tiny-bert: .*{sentence}") as refused:
        require_interface("tiny-bert", data, INTERFACE, 2)
    assert not refused.value.deterministic
