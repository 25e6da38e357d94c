"""The page on conformance, which a benchmark writes, speaks of everything that there is to judge."""

from pathlib import Path

import pytest

from nxpipe.emulator.capture.onnx.reader import IMPORTERS
from nxpipe.emulator.ops import OPERATORS
from tests.conformance.onnx_report import node_tests
from tests.conformance.opinfo import operators

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "conformance.md").read_text()


@pytest.mark.parametrize("section", ["PyTorch's operator database", "ONNX's node tests", "The graph's own operators"])
def test_the_page_has_a_section_for_each_judge(section: str) -> None:
    assert f"## {section}\n" in PAGE


def test_the_page_names_every_operator_of_the_graph() -> None:
    own = PAGE.partition("## The graph's own operators")[2]
    assert [name for name in OPERATORS if f"| `{name}` |" not in own] == []


def test_the_page_names_every_operator_that_is_judged() -> None:
    database, _, onnx = PAGE.partition("## ONNX's node tests")
    tested = {node.op_type for test in node_tests() for node in test.model.graph.node} & IMPORTERS.keys()
    assert [name for name in operators() if f"| `{name}` |" not in database] == []
    assert [name for name in tested if f"| `{name}` |" not in onnx] == []


def test_the_page_knows_of_no_failure() -> None:
    assert PAGE.count(", 0 failed**") == 2
