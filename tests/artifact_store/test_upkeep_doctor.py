"""The doctor distinguishes backends that can hold a store from others, and names missing features."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any, Final, cast

import pytest

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend, ListedObject, Payload, Probe
from nxpipe.artifact_store.backends.s3 import Bucket
from nxpipe.artifact_store.errors import Denied, StoreUnavailable, UnsafeBackend
from nxpipe.artifact_store.maintenance.doctor import Diagnosis, examine, require_safety
from tests.artifact_store.wire import Wire, answer

pytestmark = pytest.mark.sample(12)

_SHA256: Final = "x-amz-checksum-sha256"


def failed(backend: Backend) -> set[str]:
    return {entry.probe.name for entry in examine(backend) if entry.verdict == "fail"}


class Careless:
    """A backend that ignores conditions, as some servers do."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, payload: Payload, *, durable: bool = False, **_: Any) -> bool:
        self._inner.replace(path, payload)
        return True

    def remove(self, item: ListedObject) -> bool:
        stat = self._inner.stat(item.path)
        return stat is not None and self._inner.remove(ListedObject(item.path, stat.size, stat.tag, stat.modified))

    def read(self, path: str, start: int = 0, stop: int | None = None, *, tag: str | None = None) -> Any:
        return self._inner.read(path, start, stop)


def test_a_folder_passes_everything_and_is_left_as_it_was(tmp_path: Path) -> None:
    backend = LocalFolder(tmp_path / "store")
    diagnoses = list(examine(backend))
    assert len(diagnoses) >= 20
    assert {diagnosis.verdict for diagnosis in diagnoses} == {"pass"}
    require_safety(backend.url, diagnoses)
    assert not list(backend.walk(""))


def ignore_a_wrong_checksum(request: Any, **_: Any) -> None:
    body = request.body
    if not isinstance(body, bytes | bytearray):
        body = request.body.read()
        request.body.seek(0)
    right = base64.b64encode(hashlib.sha256(body).digest())
    if request.headers.get(_SHA256, right) not in (right, right.decode()):
        del request.headers[_SHA256]


def test_a_server_that_takes_wrong_checksums_is_told_by_that_alone(
    backend: Bucket, client: Any, by_the_client: None
) -> None:
    """Whatever else a store needs, this one does."""
    client.meta.events.register("before-send.s3.PutObject", ignore_a_wrong_checksum)
    diagnoses = list(examine(backend))
    vital = {diagnosis.probe.name for diagnosis in diagnoses if diagnosis.verdict == "fail" and diagnosis.probe.vital}
    assert vital == {"a wrong SHA-256 is refused"}
    assert not list(backend.walk(""))
    with pytest.raises(UnsafeBackend, match="a wrong SHA-256 is refused"):
        require_safety(backend.url, diagnoses)


def test_a_backend_that_ignores_conditions_is_refused_by_their_names(tmp_path: Path) -> None:
    careless = cast(Backend, Careless(LocalFolder(tmp_path / "store")))
    diagnoses = list(examine(careless))
    assert {diagnosis.probe.name for diagnosis in diagnoses if diagnosis.verdict == "fail"} == {
        "create refuses a taken path",
        "one of 16 creators at once wins",
        "a ranged read of a changed object is refused",
        "removal spares a changed object",
    }
    with pytest.raises(UnsafeBackend, match="create refuses a taken path"):
        require_safety(careless.url, diagnoses)


def test_a_property_that_could_not_be_examined_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalFolder(tmp_path / "store")

    def denied(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("cannot write: Permission denied")

    monkeypatch.setattr(backend, "create", denied)
    diagnoses = list(examine(backend))
    assert "not proved" in {diagnosis.verdict for diagnosis in diagnoses}
    with pytest.raises(StoreUnavailable, match="could not be tested"):
        require_safety(backend.url, diagnoses)


DENIALS = {
    "CompleteMultipartUpload": ("", "s3:PutObject", {"an upload in parts arrives whole"}),
    "ListObjectVersions": ("", "s3:ListBucketVersions", {"removal is visible at once"}),
    "ListParts": ("", "s3:ListMultipartUploadParts", {"open uploads and their parts are listed"}),
    "DeleteObject": (
        "User: arn:aws:iam::1:user/ann is not authorized to perform: s3:DeleteObject on resource: x",
        "s3:DeleteObject",
        {"removal is visible at once", "the examination leaves nothing behind"},
    ),
    "PutObject": (
        "User: ann is not authorized to perform: kms:GenerateDataKey on resource: x",
        "kms:GenerateDataKey",
        {"create refuses a taken path", "empty objects are kept"},
    ),
}


@pytest.mark.parametrize("operation", DENIALS)
def test_a_denied_permission_is_named_with_the_request_and_what_it_keeps_from_being_proved(
    backend: Bucket, client: Any, wire: Wire, operation: str
) -> None:
    name = backend.url.split("/")[2]
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    said, permission, properties = DENIALS[operation]
    wire.on(operation, *[answer(403, "AccessDenied", said or "Access Denied")] * 1000)
    diagnoses = list(examine(backend))
    denied = [diagnosis for diagnosis in diagnoses if diagnosis.denied]
    assert properties <= {entry.probe.name for entry in denied}
    assert {entry.verdict for entry in denied} <= {"not proved"}
    for entry in denied:
        assert entry.denied
        assert (entry.denied.permission, entry.denied.operation) == (permission, operation)
        assert f"{permission} is denied ({operation})" in entry.detail
    failed = {diagnosis.probe.name for diagnosis in diagnoses if diagnosis.verdict == "fail" and diagnosis.probe.vital}
    assert failed <= {"a wrong SHA-256 is refused"}  # moto's one fault, told by itself


def test_what_was_not_proved_for_want_of_a_permission_is_not_called_a_failure(tmp_path: Path) -> None:
    probe = Probe("a property", "it matters", lambda: None)
    denied = Denied("cannot write x", "s3:PutObject", "UploadPart")
    with pytest.raises(StoreUnavailable, match=r"1 vital .* may hold or fail: .*denied s3:PutObject \(UploadPart\);"):
        require_safety("s3://bucket", [Diagnosis(probe, "not proved", "a sentence", denied)])


def test_a_folder_that_forbids_something_is_examined_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    backend = LocalFolder(tmp_path / "store")
    monkeypatch.setattr(os, "utime", refused)
    denied = {entry.probe.name: entry.denied for entry in examine(backend) if entry.denied}
    assert set(denied) == {"an object can be made young", "removal spares a changed object", "file times are fine"}
    young = denied["an object can be made young"]
    assert young.permission == "permission to write"
    assert young.operation.startswith(f"write {tmp_path}")


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    assert "a hard link refuses a taken name" in failed(LocalFolder(tmp_path / "store"))
