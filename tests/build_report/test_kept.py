"""Storage of reports: in a folder of the build, and in the store beside the artifact until that is collected."""

import json
from pathlib import Path

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.builds import store_report, timestamp_of
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.layout import REPORTS
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan
from nxpipe.pipeline.build.report import html
from nxpipe.pipeline.build.report.document import write_report
from tests.artifact_store.samples import put
from tests.build_report.world import BEGAN, course, ends, matrix, results
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

MOMENT = "20261121T190147.250000Z"


def test_a_report_is_kept_whole_in_a_folder_named_after_its_beginning(tmp_path: Path) -> None:
    of = matrix(1, [1], [64])
    done = results(of, ends(course(of)))
    files = write_report(done, tmp_path / "builds")
    assert files.json.parent == files.html.parent == tmp_path / "builds" / MOMENT
    assert json.loads(files.json.read_bytes())["verdict"] == "complete"
    assert files.html.read_bytes().startswith(b"<!doctype html>")
    assert write_report(done, tmp_path / "builds") == files
    assert sorted(path.name for path in files.json.parent.iterdir()) == ["report.html", "report.json"]


def test_a_report_that_cannot_be_written_leaves_the_earlier_one_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = matrix(1, [1], [64])
    files = write_report(results(of, ends(course(of))), tmp_path)
    before = files.json.read_bytes()

    def full(path: Path, data: bytes) -> int:
        path.open("wb").write(data[:10])
        raise OSError("no space left on the disk")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_report(results(of), tmp_path)
    assert files.json.read_bytes() == before
    assert sorted(path.name for path in files.json.parent.iterdir()) == ["report.html", "report.json"]


def test_a_report_in_a_store_stays_as_long_as_its_artifact(tmp_path: Path) -> None:
    backend = LocalFolder(tmp_path / "store")
    store = Store(backend, grace=-5.0)
    made = store.publish(put(store, "a"))
    kept, lost = made.manifest_digest, "0" * 64
    for digest in (kept, lost):
        store_report(store, digest, BEGAN, html=b"<html>", json=b"{}")
    backend.replace(f"{REPORTS}{lost}/a-file-of-mine.txt", Payload.of(b"mine"))
    assert [found.path for found in backend.walk(REPORTS)] == [
        f"{REPORTS}{lost}/{MOMENT}.html",
        f"{REPORTS}{lost}/{MOMENT}.json",
        f"{REPORTS}{lost}/a-file-of-mine.txt",
        *(f"{REPORTS}{kept}/{MOMENT}.{kind}" for kind in ("html", "json")),
    ]
    apply_plan(store, plan(store, Rules(), backend.now()))
    left = {found.path for found in backend.walk(REPORTS)}
    assert left == {
        *(f"{REPORTS}{kept}/{MOMENT}.{kind}" for kind in ("html", "json")),
        f"{REPORTS}{lost}/a-file-of-mine.txt",
    }
    apply_plan(store, plan(store, Rules(keep=0), backend.now()))
    apply_plan(store, plan(store, Rules(), backend.now()))
    assert [found.path for found in backend.walk(REPORTS)] == [f"{REPORTS}{lost}/a-file-of-mine.txt"]


def test_a_report_said_again_replaces_what_was_said(tmp_path: Path) -> None:
    store = Store(LocalFolder(tmp_path / "store"))
    for text in (b"first", b"second"):
        store_report(store, "0" * 64, BEGAN, html=text, json=text)
    assert b"".join(store.backend.read(f"{REPORTS}{'0' * 64}/{MOMENT}.html") or ()) == b"second"


@pytest.mark.parametrize(
    "began_at", ["", "yesterday", "../../x", "2026-11-21T19:01:47+00:00", "2026-11-21T19:01:47Z\n"]
)
def test_only_a_time_in_utc_names_a_report(began_at: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument):
        timestamp_of(began_at)
    with pytest.raises(InvalidDocument):
        store_report(Store(LocalFolder(tmp_path)), "0" * 64, began_at, html=b"", json=b"")


def test_a_report_lies_beside_a_manifest_or_nowhere(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="is not the digest of a manifest"):
        store_report(Store(LocalFolder(tmp_path)), "../x", BEGAN, html=b"", json=b"")


def test_a_time_names_files_that_every_system_can_hold() -> None:
    assert timestamp_of(BEGAN) == MOMENT
    assert timestamp_of("2026-11-21T19:01:47Z") == "20261121T190147Z"


def test_the_report_of_an_artifact_is_read_back_the_newest_of_several(tmp_path: Path, nxpipe: InProcess) -> None:
    store = open_store(str(tmp_path / "store"))
    published = store.publish(put(store, "a"))
    name, where = published.request_key[:12], ("--store", str(tmp_path / "store"))
    bare = nxpipe("store", "report", name, *where)
    assert bare.code == 21
    assert "has no build report" in bare.err
    of = matrix(1, [1], [64])
    files = write_report(results(of, ends(course(of))), tmp_path / "builds")
    for year, document in (("2026", b"{}"), ("2027", files.json.read_bytes())):
        store_report(store, published.manifest_digest, f"{year}{BEGAN[4:]}", html=b"<p>of somebody", json=document)
    assert nxpipe("store", "report", name, *where).out == files.json.read_text() + "\n"
    page = tmp_path / "page.html"
    assert nxpipe("store", "report", name, *where, "--to", str(page)).code == 0
    assert page.read_bytes() == html.page(json.loads(files.json.read_bytes()))
    assert nxpipe("store", "report", name, *where, "--to", str(page)).code == 5
