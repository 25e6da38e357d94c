"""The attempts of the security review, by id: the collected tests that replay each."""

from pathlib import Path
from typing import Final

import pytest

REPLAYED: Final = pytest.StashKey[set[str]]()
COLLECTED: Final = pytest.StashKey[set[Path]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs before tests are deselected: a slow test replays its attempts in the nightly tier."""
    marks = [mark for item in items for mark in item.iter_markers("attempt")]
    config.stash[REPLAYED] = {attempt for mark in marks for attempt in mark.args}
    config.stash[COLLECTED] = {item.path for item in items}
