"""What every test may rely on: no user's cache, no hub, no AWS account, no NXPIPE_* variable leaks in."""

import gc
import os
import signal
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.tiers import commit_number, mark_unsampled, part_of, register_profiles

ROOT = Path(__file__).parent.parent
_NUMBERS: Final = count()  # pytest would find the next one by listing all folders, for each test again
_SAMPLE: Final = pytest.StashKey[int]()

register_profiles()

# The pool has a process for each core; threads of their libraries would wait for each other by turning.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# What a shell runs in the background is deaf to Ctrl-C, and so is all that it starts: tests send it to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported: torch, CDK and moto are a lot for the collector to go through again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of tests (docs/testing.md)")
    group.addoption("--sample", metavar="COMMIT", help="run the cases and examples that this commit samples")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A commit draws the same examples in each of its runs; another profile draws new ones each time."""
    number = config.stash[_SAMPLE] = commit_number(ROOT, config.getoption("--sample"))
    if config.getoption("--hypothesis-profile") is None and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(number)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    mark_unsampled(items, config.stash[_SAMPLE])
    yield  # -m selects
    part = config.getoption("--part")
    if part is not None:
        items[:], others = part_of(items, part)
        config.hook.pytest_deselected(items=others)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"To run the same cases and examples: --sample {config.stash[_SAMPLE]:08x}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    collected = yield
    gc.freeze()  # what is imported now stays
    gc.enable()
    return collected


@pytest.fixture(autouse=True)
def sealed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp(f"home{next(_NUMBERS)}", numbered=False)
    for name in list(os.environ):
        if name.startswith(("NXPIPE_", "AWS_")):
            monkeypatch.delenv(name)
    for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(home / folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
