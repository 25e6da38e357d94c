"""ONNX's own node tests, run through the standard backend interface: every one of them, in a few seconds."""

from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.onnx_report import Outcome, node_tests, outcome, report

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "conformance.md").read_text()

# Of the onnx that the requirements pin. An operator that no longer passes counts as unsupported, not as failed: so the
# totals are kept here, and a change of them is a change of this line.
TOTALS = {"passed": 1568, "unsupported": 316}


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return [outcome(test) for test in node_tests()]


def test_no_node_test_of_onnx_fails(found: list[Outcome]) -> None:
    failed = [item for item in found if item.verdict == "failed"]
    assert not failed, report(failed)


def test_as_many_node_tests_of_onnx_pass_as_ever(found: list[Outcome]) -> None:
    assert Counter(item.verdict for item in found) == TOTALS, report(found)


def test_the_page_states_these_totals() -> None:
    tests, passed, unsupported = sum(TOTALS.values()), TOTALS["passed"], TOTALS["unsupported"]
    onnx = PAGE.partition("## ONNX's node tests")[2]
    assert f"{tests} tests, " in onnx
    assert f"**{passed} passed, {unsupported} unsupported, 0 failed**" in onnx


def test_a_refusal_names_an_operator_or_an_input_and_says_why(found: list[Outcome]) -> None:
    for item in found:
        if item.verdict == "unsupported":
            assert any(word in item.reason for word in ("onnx.", "ai.onnx", "input", "initialiser")), item
            assert "malformed" not in item.reason, item
