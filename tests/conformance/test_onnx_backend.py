"""ONNX's own node tests, run through the standard backend interface."""

import pytest

from tests.conformance.onnx_report import Outcome, node_tests, outcome, report

# Every fourth runs each time, chosen by position, so that all operators' tests take their turn; the rest by `slow`.
_SHARE = 4


@pytest.fixture(scope="module")
def sample() -> list[Outcome]:
    return [outcome(test) for test in node_tests()[::_SHARE]]


def test_no_node_test_of_onnx_fails(sample: list[Outcome]) -> None:
    failed = [item for item in sample if item.verdict == "failed"]
    assert not failed, report(failed)


def test_most_node_tests_of_onnx_pass(sample: list[Outcome]) -> None:
    passed = sum(item.verdict == "passed" for item in sample)
    assert passed >= 0.8 * len(sample), report(sample)


def test_a_refusal_names_an_operator_or_an_input_and_says_why(sample: list[Outcome]) -> None:
    for item in sample:
        if item.verdict == "unsupported":
            assert any(word in item.reason for word in ("onnx.", "ai.onnx", "input", "initialiser")), item
            assert "malformed" not in item.reason, item


@pytest.mark.slow
def test_none_of_all_the_node_tests_of_onnx_fails() -> None:
    found = [outcome(test) for test in node_tests()]
    assert not [item for item in found if item.verdict == "failed"], report(found)
