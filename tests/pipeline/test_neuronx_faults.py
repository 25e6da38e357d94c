"""What the compiler says, and what becomes of it."""

import re
import signal

import pytest

from nxpipe.pipeline.compile.findings import RULES
from nxpipe.pipeline.compile.neuronx.backend import CompilerFailed, explain, finding_of
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, NotEnoughMemory
from tests.conftest import ROOT


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


FAILED = "RuntimeError: neuronx-cc failed with {}"
CASES = [
    (1, "[NCC_EVRF001] Operator sort.\n" + FAILED.format(70), BuildRefused, "reports NCC_EVRF001", True),
    (1, "[NCC_EOOM001] Too large.\n" + FAILED.format(70), DoesNotFit, "NXC-401", True),
    (1, FAILED.format(70), CompilerFailed, "status 70 and no error code", False),
    (1, "[NCC_EVRF059] No kernel.\n" + FAILED.format(70), CompilerFailed, "status 70 and NCC_EVRF059", False),
    (1, FAILED.format(-signal.SIGKILL), NotEnoughMemory, "memory runs out", False),
    (1, FAILED.format(-signal.SIGABRT), CompilerFailed, "signal 6", False),
    (-signal.SIGKILL, "", NotEnoughMemory, "memory runs out", False),
    (-signal.SIGSEGV, "", CompilerFailed, "signal 11", False),
    (
        1,
        "[NCC_EVRF001]\nGot a cached failed neff at /c/x",
        CompilerFailed,
        "AWS's compile cache returned the failure of an earlier attempt",
        False,
    ),
    (1, "ImportError: libnrt.so.1: cannot open.\n\n", CompilerFailed, "ImportError: libnrt", False),
    (1, "", CompilerFailed, "no output", False),
]


@pytest.mark.parametrize(("status", "output", "kind", "sentence", "remembered"), CASES)
def test_each_end_of_the_compiler_has_its_error(
    status: int, output: str, kind: type[BuildRefused], sentence: str, remembered: bool
) -> None:
    error = explain("tiny-bert", "forward-b1-s32", status, output)
    assert type(error) is kind
    assert sentence in str(error)
    assert str(error).startswith("tiny-bert forward-b1-s32: ")
    assert error.deterministic is remembered
