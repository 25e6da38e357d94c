import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.manifest import MAX_KEY_INPUTS_BYTES, File, Manifest, ModelRef, Tensor
from nxpipe.artifact_store.records import ActionRecord
from tests.artifact_store.samples import contents, folder, manifest, put, with_device_programs
from tests.artifact_store.test_canonical_json import JSON

SAMPLE = manifest([Blob.of(data) for data in contents()])
VALUE: dict[str, Any] = SAMPLE.model_dump()
BLOB = Blob.of(b"x")


def parse(value: object) -> Manifest:
    return Manifest.from_bytes(canonical_json(value))


def changed(*path: str | int, to: object) -> dict[str, Any]:
    value = copy.deepcopy(VALUE)
    spot: Any = value
    for step in path[:-1]:
        spot = spot[step] if isinstance(spot, dict) else list(spot)[int(step)]
    spot[path[-1]] = to
    return value


def test_a_manifest_survives_its_bytes() -> None:
    assert Manifest.from_bytes(SAMPLE.to_bytes()) == SAMPLE


def test_equal_inputs_give_equal_bytes_however_they_are_ordered() -> None:
    shuffled = {key: VALUE[key] for key in reversed(VALUE)}
    assert parse(shuffled).to_bytes() == SAMPLE.to_bytes()


ESCAPES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "/a",
    "..\\x",
    "C:/x",
    "C:x",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\u202eb",
    "x" * 256,
    "é" * 128,
    "/".join(["abc"] * 300),
]


@pytest.mark.parametrize("path", ESCAPES, ids=lambda path: repr(path)[:20])
def test_a_path_that_could_leave_its_folder_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        File(path=path, blob=BLOB)
    with pytest.raises(InvalidDocument):
        parse(changed("files", 0, "path", to=path))
    with pytest.raises(ValidationError):
        ModelRef(id=path, revision=None, task="fill-mask")


@pytest.mark.parametrize("path", ["a", "a/b.txt", ".hidden", "a..b", "...", "with space", "ünï/cödé", "x" * 255])
def test_a_plain_relative_path_is_taken(path: str) -> None:
    assert File(path=path, blob=BLOB).path == path


FAULTS: dict[str, object] = {
    "an unknown field": changed("surprise", to=1),
    "an unknown field of a blob": changed("weights", 0, "blob", to={**BLOB.model_dump(), "url": "x"}),
    "a later format": changed("format", to="nxpipe.manifest/4"),
    "key inputs beyond the limit": changed("key_inputs", "size", to=MAX_KEY_INPUTS_BYTES + 1),
    "an upper-case digest": changed("weights", 0, "blob", "sha256", to="A" * 64),
    "a short digest": changed("weights", 0, "blob", "sha256", to="a" * 63),
    "a digest and a newline": changed("weights", 0, "blob", "sha256", to="a" * 64 + "\n"),
    "a negative size": changed("weights", 0, "blob", "size", to=-1),
    "a size as text": changed("weights", 0, "blob", "size", to="1"),
    "a size as a float": changed("weights", 0, "blob", "size", to=100.0),
    "a truth for a number": changed("executables", 0, "batch", to=True),
    "a batch of none": changed("executables", 0, "batch", to=0),
    "a negative dimension": changed("weights", 0, "shape", to=[-1]),
    "a dimension as text": changed("weights", 0, "shape", to=["1"]),
    "absurdly many dimensions": changed("weights", 0, "shape", to=[1] * 65),
    "a name with an escape sequence": changed("weights", 0, "name", to="\x1b[31m"),
    "no name": changed("weights", 0, "name", to=""),
    "two weights of one name": changed("weights", to=[VALUE["weights"][0]] * 2),
    "two files of one path": changed("files", to=[VALUE["files"][0]] * 2),
    "two programs of one name": changed("executables", to=[VALUE["executables"][0]] * 2),
    "a file below a file": changed(
        "files", to=[{"path": path, "blob": BLOB.model_dump()} for path in ("a", "b", "a/b/c")]
    ),
    "one digest with two sizes": changed("files", 0, "blob", to={**VALUE["weights"][0]["blob"], "size": 1}),
    "too many programs": changed(
        "executables", to=[{**VALUE["executables"][0], "name": str(number)} for number in range(4097)]
    ),
    "an object for a list": changed("files", to={}),
    "what was found out": changed("report", to={}),
    "not an object": [],
    "nothing": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_manifest_is_refused_with_a_sentence(fault: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse(FAULTS[fault])
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", sorted(VALUE))
def test_no_field_of_a_manifest_is_optional_when_read(field: str) -> None:
    value = {key: VALUE[key] for key in VALUE if key != field}
    with pytest.raises(InvalidDocument):
        parse(value)


@pytest.mark.parametrize("earlier", ["nxpipe.manifest/1", "nxpipe.manifest/2"])
def test_a_manifest_of_an_earlier_format_is_to_be_built_again(earlier: str) -> None:
    with pytest.raises(InvalidDocument, match=f"{earlier}, published by an earlier nxpipe; build it again"):
        parse(changed("format", to=earlier))


def test_a_manifest_that_would_be_too_large_is_refused_with_the_numbers() -> None:
    (program,) = SAMPLE.executables
    outputs = tuple(f"{number:05}{'x' * 500}" for number in range(10_000))
    programs = tuple(program.model_copy(update={"name": f"{number}", "outputs": outputs}) for number in range(7))
    huge = SAMPLE.model_copy(update={"executables": programs})
    with pytest.raises(InvalidDocument, match=r"3\d{7} bytes, and at most 33554432"):
        huge.to_bytes()


def test_a_blob_that_two_names_share_counts_once() -> None:
    twice = tuple(Tensor(name=name, dtype="uint8", shape=(1,), blob=BLOB, pack=None) for name in ("a", "b"))
    shared = Manifest(**{**dict(SAMPLE), "weights": twice})
    assert [blob for blob in shared.blobs() if blob == BLOB] == [BLOB]


@st.composite
def mutants(draw: st.DrawFn) -> object:
    """The sample with one to three nodes replaced, removed, added or repeated."""
    value = copy.deepcopy(VALUE)
    for _ in range(draw(st.integers(1, 3))):
        spot: Any = value
        while True:
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(spot[key], tuple):
                spot[key] = list(spot[key])
            if isinstance(spot[key], dict | list) and spot[key] and draw(st.booleans()):
                spot = spot[key]
                continue
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    spot[key] = draw(JSON)
                case "remove":
                    del spot[key]
                case _ if isinstance(spot, dict):
                    spot[draw(st.text(st.characters(exclude_categories=["Cs"])))] = draw(JSON)
                case _:
                    spot.append(copy.deepcopy(spot[key]))
            break
    return value


@given(mutants())
def test_a_hostile_manifest_is_either_valid_or_a_typed_error(value: object) -> None:
    data = canonical_json(value)
    try:
        accepted = Manifest.from_bytes(data)
    except InvalidDocument:
        return
    assert accepted.to_bytes() == data


@given(st.binary() | JSON.map(canonical_json))
def test_a_hostile_record_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        ActionRecord.from_bytes(data)


def test_a_record_whose_seal_was_made_anew_is_still_held_to_its_shape() -> None:
    fields = ActionRecord.of(SAMPLE, Blob.of(SAMPLE.to_bytes())).model_dump()
    for name, wrong in {
        "format": "nxpipe.action/2",
        "model_id": "../x",
        "executables": -1,
        "published_at": "now",
    }.items():
        body = {**fields, name: wrong}
        sealed = canonical_json({**body, "seal": sha256_hex(canonical_json(body))})
        with pytest.raises(InvalidDocument, match=name):
            ActionRecord.from_bytes(sealed)


def test_programs_for_devices_are_part_of_the_manifest_and_absent_ones_leave_no_trace(tmp_path: Path) -> None:
    store = folder(tmp_path).store
    plain = put(store)
    made = with_device_programs(store, plain)
    assert Manifest.from_bytes(made.to_bytes()) == made
    device = made.executables[0].device
    assert device is not None
    assert {device.neff, device.module, device.interface} <= set(made.blobs())
    assert made.runs_on_devices
    assert not plain.runs_on_devices
    assert b'"device"' not in plain.to_bytes()
    assert not made.model_copy(update={"executables": ()}).runs_on_devices
