"""The environment of every test: without the user's cache, hub access, AWS account, GitHub job, NXPIPE_* variables."""

import gc
import os
import shutil
import signal
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.botocore_descriptions import share_descriptions
from tests.tiers import NIGHTLY_TIMEOUT, commit_number, mark_unsampled, part_of, register_profiles

ROOT = Path(__file__).parent.parent
_NUMBERS: Final = count()  # pytest would list all folders for each new number
_SAMPLE: Final = pytest.StashKey[int]()
MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 6 << 30  # bytes

register_profiles()
share_descriptions()

# The pool has a process for each core; threads of their libraries would compete in busy waits.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# PyTorch's operator database imports setuptools, which cannot replace a distutils that a test has imported before.
os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")

# A shell's background processes and their children ignore SIGINT, which tests send to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until the end of the collection: the garbage collector would scan torch, CDK and moto repeatedly


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of tests (docs/testing.md)")
    group.addoption("--sample", metavar="COMMIT", help="run the cases and examples that this commit samples")
    group.addoption("--all-samples", action="store_true", help="run all cases of sampled tests")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Seed Hypothesis by the commit's number: its runs have equal examples. Other profiles draw new ones."""
    _use_memory(config)
    os.environ.pop("COLUMNS", None)  # set by workers of xdist; output is that of a pipe, of any length
    os.unsetenv("COLUMNS")  # set by readline, for child processes only
    number = config.stash[_SAMPLE] = commit_number(ROOT, config.getoption("--sample"))
    if config.getoption("--hypothesis-profile") is None and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(number)
    if config.getoption("--hypothesis-profile") == "nightly" and config.getoption("--timeout") is None:
        config.option.timeout = NIGHTLY_TIMEOUT


def _use_memory(config: pytest.Config) -> None:
    """Put temporary folders in memory if there is room, since stores wait for each fsync on a disk. The nightly tier
    writes more than the memory of a small machine."""
    is_commit_tier = config.getoption("--hypothesis-profile") is None
    if is_commit_tier and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > _ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    if not config.getoption("--all-samples"):
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
    gc.freeze()  # imported modules stay
    gc.set_threshold(20_000, 20, 50)  # most objects of a test are freed by their reference counts
    gc.enable()
    return collected


@pytest.fixture(autouse=True)
def sealed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Not "home": a fixture's mktemp("home") takes the next free number after that prefix.
    home = tmp_path_factory.mktemp(f"sealed-{next(_NUMBERS)}", numbered=False)
    for name in list(os.environ):
        if name.startswith(("NXPIPE_", "AWS_", "GITHUB_", "RUNNER_")):
            monkeypatch.delenv(name)
    for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(home / folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
