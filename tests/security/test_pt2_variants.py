"""Variants of `hostile_pt2`: whatever a file holds, reading it is reading, and ends in a graph or a sentence."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nxpipe import emulator
from nxpipe.emulator.capture.pt2 import capture_exported, exported_parameters
from nxpipe.emulator.errors import CompileError
from tests.security.audit import watched
from tests.security.hostile_pt2 import GADGETS, MARK, good_files, variant
from tests.security.saved_entries import Saved

# Of the reader, and of what it calls. Packages, of which torch imports more when a program fails.
_READERS: Final = (
    "nxpipe.emulator", "torch", "transformers", "sympy", "mpmath", "numpy", "encodings", "multiprocessing"
)  # fmt: skip
_OURS: Final = Path(emulator.__file__).parent  # lines of which torch quotes in a traceback
_SECONDS: Final = 120  # which ends a hang; nothing here takes one
_MEMORY: Final = 4 * 2**30  # more than this process has by then


@contextmanager
def bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    files = good_files()
    for number, saved in enumerate(files):
        path = saved.write(tmp_path_factory.mktemp("good") / f"{number}.pt2")
        assert capture_exported(path).nodes  # and all that a good file imports
    return files


def outcome(number: int, good: list[Saved], folder: Path) -> bool:
    """Whether the variant is a program; whatever else it did fails the test."""
    path = folder / "in" / "m.pt2"
    path.write_bytes(variant(number, good))
    refusal = ""
    with bounded(), watched() as seen:
        try:
            capture_exported(path)
            exported_parameters(path)
        except CompileError as refused:
            refusal = str(refused)
    assert "Traceback" not in refusal, number
    assert len(refusal) < 10_000, number
    assert not seen.forbidden, (number, seen.forbidden)
    assert not seen.imports_beyond(*_READERS), number
    assert not seen.files_outside(path.parent, _OURS), number
    assert [entry.name for entry in folder.iterdir()] == ["in"], number
    assert os.listdir(path.parent) == ["m.pt2"], number  # noqa: PTH208
    return not refusal


def many(numbers: range, good: list[Saved], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "m.pt2").touch()
    monkeypatch.chdir(folder)
    readable = [number for number in numbers if outcome(number, good, folder)]
    assert not Path(MARK).exists()
    assert 0 < len(readable) < len(numbers)  # some changes are of what nobody reads; most are refused


@pytest.mark.sample(4)
def test_three_hundred_hostile_files(good: list[Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(range(300), good, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("thousand", range(34))
def test_thirty_four_thousand_hostile_files(
    thousand: int, good: list[Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(range(300 + 1000 * thousand, 1300 + 1000 * thousand), good, tmp_path, monkeypatch)


def test_the_same_number_is_the_same_file(good: list[Saved]) -> None:
    assert [variant(number, good) for number in range(9)] == [variant(number, good) for number in range(9)]
    assert len({variant(number, good) for number in range(60)}) > 50
    assert any(MARK in gadget for gadget in GADGETS)
