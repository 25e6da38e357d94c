"""ONNX's own node tests, run through the standard backend interface; a commit runs one quarter of them."""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.onnx_report import node_tests, outcome, report

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "conformance.md").read_text()

# Passed and unsupported node tests of the pinned onnx, by quarter. An operator that no longer passes counts as
# unsupported, not as failed; the totals reveal it.
TOTALS: Final = ((386, 85), (385, 86), (399, 72), (398, 73))


@pytest.mark.sample(8)
@pytest.mark.parametrize("quarter", range(4))
def test_no_node_test_of_onnx_fails_and_as_many_pass_as_ever(quarter: int) -> None:
    outcomes = [outcome(test) for test in node_tests()[quarter :: len(TOTALS)]]
    verdicts = Counter(item.verdict for item in outcomes)
    passed, unsupported = TOTALS[quarter]
    assert verdicts == {"passed": passed, "unsupported": unsupported}, report(outcomes)
    for item in outcomes:
        if item.verdict == "unsupported":  # the refusal names an operator or an input
            assert any(word in item.reason for word in ("onnx.", "ai.onnx", "input", "initialiser")), item
            assert "malformed" not in item.reason, item


def test_the_page_states_these_totals() -> None:
    passed, unsupported = (sum(column) for column in zip(*TOTALS, strict=True))
    onnx = PAGE.partition("## ONNX's node tests")[2]
    assert f"{passed + unsupported} tests, " in onnx
    assert f"**{passed} passed, {unsupported} unsupported, 0 failed**" in onnx
