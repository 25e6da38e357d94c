"""No operator is forgotten: each that has instructions is in a table, and is swept alone and between divided layers."""

import pytest

from nxpipe.emulator.lower import LOWERINGS
from nxpipe.emulator.ops import OPERATORS, Operator
from tests.conftest import ROOT
from tests.lower import (
    test_attention,
    test_collectives,
    test_convolution,
    test_elementwise,
    test_gather,
    test_matmul,
    test_movement,
    test_norm,
    test_reduce,
)
from tests.lower.divided import sweep_divided

MODULES = (
    test_attention,
    test_collectives,
    test_convolution,
    test_elementwise,
    test_gather,
    test_movement,
    test_matmul,
    test_reduce,
    test_norm,
)
ROWS = tuple(row for module in MODULES for row in module.TABLE)
KINDS = sorted({row.kind for row in ROWS}, key=lambda kind: kind.name)


def bounds() -> str:
    """As docs/reference/lowering.md has them: operators by how far they may be off."""
    rows: dict[tuple[float, float], list[str]] = {}
    for row in ROWS:
        rows.setdefault((row.units, row.noise), []).append(row.name)
    lines = ["| units | absolute | operators |", "|---|---|---|"]
    lines += [f"| {units:g} | {noise:.1g} | {', '.join(sorted(rows[units, noise]))} |" for units, noise in sorted(rows)]
    return "\n".join(lines)


def test_every_operator_is_in_a_table() -> None:
    assert set(KINDS) == set(LOWERINGS) == set(OPERATORS.values())
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_page_says_how_far_each_may_be_off() -> None:
    assert bounds() in (ROOT / "docs" / "reference" / "lowering.md").read_text()


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_divided_operator_is_what_fast_makes_of_it(kind: type[Operator]) -> None:
    sweep_divided(kind, ROWS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_divided_operator_is_what_fast_makes_of_it_in_many_forms(kind: type[Operator]) -> None:
    sweep_divided(kind, ROWS, 200)
