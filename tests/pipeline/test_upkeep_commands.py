"""`nxpipe store gc|fsck|du|doctor|pin|unpin`, from their arguments to their exit codes."""

import json
import os
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.util.exit_codes import CORRUPT, NOT_FOUND, OK, STORE, USAGE
from tests.pipeline.in_process import InProcess, nxpipe  # noqa: F401
from tests.pipeline.test_store_commands import publish

ARGUMENTS = {
    "gc": ("--dry-run",),
    "fsck": (),
    "du": (),
    "doctor": (),
    "pin": (),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    publish(folder)
    return folder


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", ARGUMENTS)
def test_each_answers_with_one_json_document_when_asked(nxpipe: InProcess, store: Path, command: str) -> None:  # noqa: F811
    answer = nxpipe("store", command, *ARGUMENTS[command], "--store", str(store), "--json")
    assert answer.code == OK.number, answer.err
    json.loads(answer.out)


def test_a_collection_says_what_goes_and_a_dry_run_leaves_it(nxpipe: InProcess, store: Path) -> None:  # noqa: F811
    orphan = open_store(str(store)).put_blob(b"orphan")
    path = store / blob_path(orphan)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    shown = nxpipe("store", "gc", "--dry-run", "--store", str(store))
    assert blob_path(orphan) in shown.out
    assert path.exists()
    made = nxpipe("store", "gc", "--store", str(store))
    assert made.out == shown.out
    assert not path.exists()


@pytest.mark.parametrize("wrong", [("--max-age", "90"), ("--max-age", "0d"), ("--budget", "1"), ("--keep", "0")])
def test_a_rule_without_sense_is_refused(nxpipe: InProcess, store: Path, wrong: tuple[str, str]) -> None:  # noqa: F811
    assert nxpipe("store", "gc", *wrong, "--store", str(store)).code == USAGE.number


def test_damage_ends_in_the_exit_code_of_corruption_until_it_is_repaired(
    nxpipe: InProcess,  # noqa: F811
    store: Path,
    tmp_path: Path,
) -> None:
    publish(tmp_path / "replica")
    damaged = blob_path(open_store(str(store)).list()[0].manifest.weights[0].blob)
    (store / damaged).write_bytes(b"damage")
    broken = nxpipe("store", "fsck", "--store", str(store))
    assert broken.code == CORRUPT.number
    assert damaged in broken.out
    assert nxpipe("store", "fsck", "--store", str(store), "--repair-from", str(tmp_path / "replica")).code == OK.number
    assert nxpipe("store", "fsck", "--store", str(store)).code == OK.number


def test_what_cannot_be_read_is_told_from_damage_and_does_not_hide_it(
    nxpipe: InProcess,  # noqa: F811
    store: Path,
) -> None:
    unread, damaged = map(blob_path, open_store(str(store)).list()[0].manifest.blobs()[:2])
    (store / unread).unlink()
    (store / unread).mkdir()  # nobody reads that as a file, whatever the user's rights
    alone = nxpipe("store", "fsck", "--store", str(store))
    assert (alone.code, alone.out.split()[0]) == (STORE.number, "unreadable")
    (store / damaged).write_bytes(b"damage")
    both = nxpipe("store", "fsck", "--store", str(store), "--json")
    assert both.code == CORRUPT.number
    found = {finding["path"]: finding["unreadable"] for finding in json.loads(both.out)["findings"]}
    assert found == {unread: True, damaged: False}


def test_a_pin_is_listed_until_it_is_removed(nxpipe: InProcess, store: Path) -> None:  # noqa: F811
    assert nxpipe("store", "pin", "acme/tiny-bert", "--as", "audit", "--store", str(store)).code == OK.number
    assert "audit" in nxpipe("store", "pin", "--store", str(store)).out
    assert nxpipe("store", "unpin", "audit", "--store", str(store)).code == OK.number
    assert nxpipe("store", "pin", "--store", str(store)).out == ""
    assert nxpipe("store", "unpin", "audit", "--store", str(store)).code == NOT_FOUND.number
    assert nxpipe("store", "pin", "acme/tiny-bert", "--store", str(store)).code == USAGE.number
