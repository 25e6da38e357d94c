"""Names, URLs and key files from users: each invalid one is refused in one sentence before any access."""

import os
import stat
from pathlib import Path

import pytest

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.pipeline.util.exit_codes import CORRUPT, KEY, OK, REFUSED, STORE, USAGE
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import tree
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.test_store_commands import MODEL, publish
from tests.security.others import Planted, fingerprint

__all__ = ["nxpipe"]

attempt = pytest.mark.attempt


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    monkeypatch.chdir(tmp_path)
    return Planted(tmp_path / "st", publish(tmp_path / "st").manifest)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../x", marks=attempt("Z100")),
        pytest.param("x/y", marks=attempt("Z101")),
        pytest.param("X", marks=attempt("Z102")),
        pytest.param("-x", marks=attempt("Z103")),
        pytest.param("a" * 64, marks=attempt("Z104")),
        pytest.param("x\n", marks=attempt("Z105")),
        pytest.param("", marks=attempt("Z107")),
    ],
)
def test_a_channel_of_no_name_is_refused_before_anything_is_read(
    nxpipe: InProcess, planted: Planted, name: str
) -> None:
    before = fingerprint(planted.root)
    answer = nxpipe("promote", MODEL, "--channel", name, "--store", "st")
    assert answer.code == USAGE.number
    assert "1 to 63 of a-z, 0-9 and -" in answer.err
    assert fingerprint(planted.root) == before


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("s3://../x", marks=attempt("Z110")),
        pytest.param("s3://b/../y", marks=attempt("Z111")),
        pytest.param("http://evil/", marks=attempt("Z112")),
        pytest.param("file://a\x1b[31m", marks=attempt("Z113")),
        pytest.param("s3://UPPER/x", marks=attempt("Z114")),
        pytest.param("~nobodyhere/x", marks=attempt("Z115")),
    ],
)
def test_a_url_of_no_store_is_refused_and_nothing_is_made(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = nxpipe("store", "ls", "--store", url)
    assert answer.code == STORE.number
    assert "allowed are file:///absolute/path" in answer.err
    assert "\x1b" not in answer.err
    assert not tree(tmp_path)


# Key files


@attempt("Z04")
def test_a_key_is_not_written_through_a_link(nxpipe: InProcess, planted: Planted, tmp_path: Path) -> None:
    before = tree(tmp_path)
    (tmp_path / "k").symlink_to(tmp_path / "elsewhere")
    assert nxpipe("store", "keygen", "k").code == KEY.number
    assert tree(tmp_path) == before | {"k"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
@attempt("Z05")
def test_a_private_key_is_its_owners_whatever_the_umask(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(umask)
    try:
        assert nxpipe("store", "keygen", "k").code == OK.number
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


@attempt("Z06")
def test_a_private_key_that_others_may_read_signs_nothing(nxpipe: InProcess, planted: Planted) -> None:
    assert nxpipe("store", "keygen", "k").code == OK.number
    Path("k").chmod(0o644)
    answer = nxpipe("store", "sign", MODEL, "--key", "file:k", "--store", "st")
    assert answer.code == KEY.number
    assert "chmod 600" in answer.err
    assert not (planted.root / "sig").exists()


@attempt("Z07")
def test_nothing_is_exported_through_a_link(nxpipe: InProcess, planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "out.tar").symlink_to(tmp_path / "elsewhere.tar")
    (tmp_path / "elsewhere.tar").write_text("mine")
    answer = nxpipe("store", "export", MODEL, "--to", "out.tar", "--store", "st")
    assert answer.code == REFUSED.number
    assert (tmp_path / "elsewhere.tar").read_text() == "mine"


# Records that were exchanged


@attempt("Z12")
def test_a_record_that_names_another_manifest_changes_nothing_that_a_channel_serves(planted: Planted) -> None:
    """Whoever may write `ac/` answers for names; a channel names manifests by their digest."""
    store = planted.store
    one = store.list()[0]
    ChannelLog(store.backend, "prod").append(lambda _: first_generation("prod", [Served.of(one)]))
    other = one.manifest.model_copy(update={"report": {"forward-b1-s128": "swapped"}})
    blob = store.put_blob(other.to_bytes())
    store.records.replace(ActionRecord.model_validate({**one.record.model_dump(exclude={"seal"}), "manifest": blob}))
    assert store.list()[0].record.manifest == blob
    (served,) = ChannelLog(store.backend, "prod").tip().artifacts  # type: ignore[union-attr]
    assert store.manifest(served.manifest) == one.manifest


@attempt("Z13")
def test_a_record_of_a_manifest_that_answers_another_key_is_corrupt(nxpipe: InProcess, planted: Planted) -> None:
    one = planted.store.list()[0]
    key = "0" * 64
    forged = ActionRecord.model_validate({**one.record.model_dump(exclude={"seal"}), "request_key": key})
    planted.store.records.replace(forged)
    for words in (("fetch", key, "--to", "o"), ("gc",)):
        assert nxpipe("store", *words, "--store", "st").code == CORRUPT.number
    assert not Path("o/manifest.json").exists()


@attempt("Z14")
def test_a_record_under_the_path_of_another_key_is_corrupt(nxpipe: InProcess, planted: Planted) -> None:
    (planted.root / "ac" / ("0" * 64)).write_bytes(planted.record.read_bytes())
    for words in (("ls",), ("gc",), ("fetch", "0" * 64, "--to", "o")):
        answer = nxpipe("store", *words, "--store", "st")
        assert answer.code == CORRUPT.number
        assert "it is the record of ac/" in answer.err
