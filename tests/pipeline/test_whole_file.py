"""A file is seen as it was, or as it was written: whatever goes wrong, and whoever else writes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from nxpipe.pipeline.util.files import write_whole


def test_the_folder_of_a_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "file"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def _half_written(path: Path, data: bytes) -> int:
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError("no space left on the disk")


def _not_renamed(path: Path, target: Path) -> Path:
    raise OSError(f"{path} cannot be {target}")


@pytest.mark.parametrize(("step", "failing"), [("write_bytes", _half_written), ("replace", _not_renamed)])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(
    step: str, failing: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, step, failing)
    with pytest.raises(OSError, match=r"no space|cannot be"):
        write_whole(path, b"the new one")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_that_write_at_once_one_stands_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have written, and neither has its place yet."""
    path, both, replace = tmp_path / "file", Barrier(2, timeout=60), Path.replace

    def together(beside: Path, target: Path) -> Path:
        both.wait()
        return replace(beside, target)

    monkeypatch.setattr(Path, "replace", together)
    offered = [name * 100_000 for name in (b"a", b"b")]
    with ThreadPoolExecutor() as threads:
        list(threads.map(write_whole, [path, path], offered))
    assert path.read_bytes() in offered
    assert list(tmp_path.iterdir()) == [path]
