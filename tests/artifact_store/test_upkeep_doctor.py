"""The doctor tells a backend that can hold a store from one that cannot, and names what is missing."""

from pathlib import Path
from typing import Any, cast

import pytest

from artifact_store.backends.local import LocalFolder
from artifact_store.backends.protocol import Backend, Found, Payload
from artifact_store.backends.s3 import Bucket
from artifact_store.errors import StoreUnavailable, UnsafeBackend
from artifact_store.upkeep.doctor import examine, insist_on_safety


def failed(backend: Backend) -> set[str]:
    return {each.probe.name for each in examine(backend) if each.verdict == "fail"}


class Careless:
    """A backend that ignores conditions, as some servers do."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, payload: Payload, *, durable: bool = False, **_: Any) -> bool:
        self._inner.replace(path, payload)
        return True

    def remove(self, found: Found) -> bool:
        stat = self._inner.stat(found.path)
        return stat is not None and self._inner.remove(Found(found.path, stat.size, stat.tag, stat.modified))

    def read(self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> Any:
        return self._inner.read(path, start, stop)


def test_a_folder_passes_everything_and_is_left_as_it_was(tmp_path: Path) -> None:
    backend = LocalFolder(tmp_path / "store")
    diagnoses = list(examine(backend))
    assert len(diagnoses) >= 20
    assert {each.verdict for each in diagnoses} == {"pass"}
    insist_on_safety(backend.url, diagnoses)
    assert not list(backend.walk(""))


def test_a_server_that_takes_wrong_checksums_is_told_by_that_alone(backend: Bucket) -> None:
    """Moto's is one; whatever else a store needs, it does."""
    diagnoses = list(examine(backend))
    vital = {each.probe.name for each in diagnoses if each.verdict == "fail" and each.probe.vital}
    assert vital == {"a wrong SHA-256 is refused"}
    assert not list(backend.walk(""))
    with pytest.raises(UnsafeBackend, match="a wrong SHA-256 is refused"):
        insist_on_safety(backend.url, diagnoses)


def test_a_backend_that_ignores_conditions_is_refused_by_their_names(tmp_path: Path) -> None:
    careless = cast(Backend, Careless(LocalFolder(tmp_path / "store")))
    diagnoses = list(examine(careless))
    assert {each.probe.name for each in diagnoses if each.verdict == "fail"} == {
        "create refuses a taken path",
        "one of 16 creators at once wins",
        "a ranged read of a changed object is refused",
        "removal spares a changed object",
    }
    with pytest.raises(UnsafeBackend, match="create refuses a taken path"):
        insist_on_safety(careless.url, diagnoses)


def test_a_property_that_could_not_be_examined_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalFolder(tmp_path / "store")

    def denied(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("cannot write: Permission denied")

    monkeypatch.setattr(backend, "create", denied)
    diagnoses = list(examine(backend))
    assert "unknown" in {each.verdict for each in diagnoses}
    with pytest.raises(StoreUnavailable, match="could not be examined"):
        insist_on_safety(backend.url, diagnoses)


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    assert "a hard link refuses a taken name" in failed(LocalFolder(tmp_path / "store"))
