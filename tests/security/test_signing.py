"""No way out of a store gives what a channel's policy would not have: rules x attacks x ways."""

from pathlib import Path

import pytest

from tests.security.signing_matrix import NOTHING, Cell, cells, expected, page, written
from tests.security.signing_world import ATTACKS


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, str]:
    folder: Path = tmp_path_factory.mktemp("signing")
    return dict(cells(folder))


@pytest.mark.sample(4)
@pytest.mark.parametrize("attack", [NOTHING, *ATTACKS])
def test_no_way_out_is_misled_under_any_rule(seen: dict[Cell, str], attack: str) -> None:
    of_it = {cell: outcome for cell, outcome in seen.items() if cell[1] == attack}
    assert of_it
    assert {cell: outcome for cell, outcome in of_it.items() if outcome != expected(attack)} == {}


def test_the_page_says_what_was_seen(seen: dict[Cell, str]) -> None:
    assert written() == page(seen), "python -m tests.security.signing_matrix writes it anew"
