"""Every attempt of the security review of commit b545385 (`attempts.csv`) has a test here that replays it.

A test names what it replays by `@pytest.mark.attempt("P40", "P41")`.
"""

import csv
from pathlib import Path

import pytest

from tests.security.conftest import COLLECTED, REPLAYED

_HERE = Path(__file__).parent


def _attempts() -> dict[str, str]:
    with (_HERE / "attempts.csv").open(newline="", encoding="utf-8") as file:
        return {row["id"]: row["attempt"] for row in csv.DictReader(file)}


def test_every_attempt_of_the_review_is_replayed(pytestconfig: pytest.Config) -> None:
    if not set(_HERE.glob("test_*.py")) <= pytestconfig.stash[COLLECTED]:
        pytest.skip("only a part of tests/security was collected")
    missing = {key: what for key, what in _attempts().items() if key not in pytestconfig.stash[REPLAYED]}
    assert not missing


def test_no_test_replays_an_attempt_that_nobody_made(pytestconfig: pytest.Config) -> None:
    assert not pytestconfig.stash[REPLAYED] - set(_attempts())
