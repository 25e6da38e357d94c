"""docs/reference/store-format.md is the definition: what it says is read here, and the code is held to it."""

import json
import re
from pathlib import Path

import pytest

from nxpipe.artifact_store import documents, layout, manifest, weights
from nxpipe.artifact_store.backends import s3_multipart
from nxpipe.artifact_store.blobs import GRACE
from nxpipe.artifact_store.builds import MAX_OUTCOME_BYTES, MAX_PART_BYTES, ResultFile, StepResult
from nxpipe.artifact_store.canonical import MAX_DEPTH, MAX_INTEGER, canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import MAX_EVIDENCE_BYTES, Compared, Evidence, Figures, Limits, Timing
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.records import ActionRecord
from tests.artifact_store.samples import folder, put, tree
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "store-format.md").read_text()
SECTIONS = {part.split(".")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def rows(section: str, header: str) -> list[list[str]]:
    """The cells of the table with this first heading."""
    table = SECTIONS[section].split(f"| {header} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def example(number: int) -> bytes:
    return str(re.findall(r"```json\n(.*)\n```", SECTIONS["16"])[number]).encode()


@pytest.mark.parametrize(("value", "spelled"), rows("3", "Value"))
def test_the_page_spells_canonical_json_as_the_code_does(value: str, spelled: str) -> None:
    assert canonical_json(json.loads(value.strip("` "))) == spelled.strip("` ").encode()


def test_the_example_of_a_manifest_is_one_and_has_the_digest_that_the_page_gives() -> None:
    data = example(0)
    assert Manifest.from_bytes(data).to_bytes() == data
    assert f"Its digest is `{Blob.of(data).sha256}`." in PAGE


def test_the_example_of_a_record_points_to_the_example_of_a_manifest() -> None:
    data = example(1)
    record = ActionRecord.from_bytes(data)
    assert record.to_bytes() == data
    described = Manifest.from_bytes(example(0))
    expected = ActionRecord.of(described, Blob.of(example(0)))
    changing = {"published_at": record.published_at, "write_id": record.write_id}
    assert record == expected.model_copy(update=changing)


def fields(section: str) -> set[str]:
    return {name for cell, *_ in rows(section, "Field") for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_is_on_the_page_and_no_other() -> None:
    assert fields("4") == set(Manifest.model_fields)
    assert fields("6") == {*ActionRecord.model_fields, "seal"}
    assert fields("18") == {*StepResult.model_fields, "seal"}
    assert fields("19") == {*Evidence.model_fields, "seal"}
    parts = (Compared, Timing, Limits, Figures)
    assert {name for part in parts for name in part.model_fields} <= set(re.findall(r"`(\w+)`", SECTIONS["19"]))


@pytest.mark.parametrize(
    "part",
    [
        *(manifest.Executable, manifest.DeviceProgram, manifest.Tensor, manifest.File, manifest.ModelRef),
        *(manifest.ServingPayload, manifest.SharedFile, ResultFile),
    ],
)
def test_every_field_of_a_part_is_on_the_page(part: type[documents.Document]) -> None:
    cells = [row[1] for section in ("4", "18") for row in rows(section, "Field")]
    named = {frozenset(re.findall(r"`(\w+)`", cell)) for cell in cells}
    assert any(set(part.model_fields) <= names for names in named)


def test_a_store_holds_the_paths_on_the_page_and_no_others(tmp_path: Path) -> None:
    place = folder(tmp_path)
    published = place.store.publish(put(place.store))
    paths = {row[0].strip("`") for row in rows("2", "Path")}
    key, digest = published.request_key, published.manifest_digest
    expected = {
        "cas/sha256/<first 2 hex>/<64 hex>": f"cas/sha256/{digest[:2]}/{digest}",
        "ac/<request key>": f"ac/{key}",
        'neuron-artifacts/<model id, "-" for "/">/<first 16 hex of the request key>/manifest.json': (
            f"neuron-artifacts/acme-tiny-bert/{key[:16]}/manifest.json"
        ),
    }
    assert expected.keys() < paths
    assert set(expected.values()) <= tree(tmp_path)
    others = tree(tmp_path) - set(expected.values())
    assert others == {f"cas/sha256/{blob.sha256[:2]}/{blob.sha256}" for blob in published.manifest.blobs()}


def test_every_folder_of_the_layout_is_on_the_page() -> None:
    folders = {row[0].strip("`").split("/")[0] for row in rows("2", "Path")}
    constants = {value for name, value in vars(layout).items() if name.isupper() and isinstance(value, str)}
    assert folders == {*(value.split("/")[0] for value in constants), "doctor-<16 hex>"}


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    limits = {name: [int(number) for number in re.findall(r"\d+", text)] for name, text in rows("15", "Item")}
    expected = {
        "manifest": [manifest.MAX_MANIFEST_BYTES],
        "key inputs": [manifest.MAX_KEY_INPUTS_BYTES],
        "a record, other than a generation, a part, an outcome or a segment": [documents.MAX_RECORD_BYTES],
        "part": [MAX_PART_BYTES],
        "evidence": [MAX_EVIDENCE_BYTES],
        "outcome": [MAX_OUTCOME_BYTES],
        "model id": [documents.MAX_MODEL_ID_BYTES, 8],
        "path of a file": [documents.MAX_PATH_BYTES, 8, documents.MAX_PATH_PART_BYTES],
        "executables, weights, files in a manifest": [
            manifest.MAX_EXECUTABLES,
            manifest.MAX_WEIGHTS,
            manifest.MAX_FILES,
        ],
    }
    assert {name: limits[name] for name in expected} == expected
    assert f"at most {MAX_DEPTH} levels deep" in SECTIONS["3"]
    assert MAX_INTEGER == 2**53 - 1
    assert "-(2^53 - 1) and 2^53 - 1" in SECTIONS["3"]
    assert s3_multipart.WRITE_ID in SECTIONS["13"]
    assert f"| grace | {GRACE / 3600:.0f} hours." in PAGE


def test_the_page_gives_the_sizes_of_packs() -> None:
    assert f"below {weights.PACKED_BELOW} bytes" in SECTIONS["5"]
    assert f"exceed {weights.MAX_PACK_BYTES} bytes" in SECTIONS["5"]
    assert f"1 to {weights.MAX_TENSORS}" in SECTIONS["5"]
