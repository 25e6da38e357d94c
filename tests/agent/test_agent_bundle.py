"""`nxpipe agent bundle`: what instances install is named by its digest, and the same wherever it is made."""

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from nxpipe.pipeline.fleet.agent.run import Bundle
from nxpipe.pipeline.util import exit_codes
from nxpipe.stacks.locks import NoAgentLocked, locked_agent
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

NAMES = ["amazon-efs-utils-2.4.1_amd64.deb", "click-8.4.0-py3-none-any.whl", "nxpipe-0.1.0-py3-none-any.whl"]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\n[store]\nurl = "file://store"\n')
    folder = tmp_path / "packages"
    folder.mkdir()
    for name in [*NAMES, "notes.txt"]:
        (folder / name).write_text(name)
    return folder


def test_the_bundle_is_in_the_store_under_its_digest_and_the_stacks_know_it(
    nxpipe: InProcess, packages: Path, tmp_path: Path
) -> None:
    answer = nxpipe("agent", "bundle", "packages")
    assert answer.code == 0, answer.err
    digest = answer.out.strip()
    stored = tmp_path / "store" / "agents" / f"{digest}.tar"
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == digest
    with tarfile.open(stored) as archive:
        assert archive.getnames() == NAMES
    assert locked_agent(tmp_path) == digest
    again = nxpipe("agent", "bundle", "packages", "--json")
    assert json.loads(again.out) == {"sha256": digest, "path": f"agents/{digest}.tar", "packages": NAMES, "new": False}


def test_dates_and_modes_of_files_are_no_part_of_it(packages: Path) -> None:
    before = Bundle.of(packages).sha256
    for path in packages.iterdir():
        os.utime(path, (1, 1))
        path.chmod(0o600)
    assert Bundle.of(packages).sha256 == before
    (packages / NAMES[0]).write_text("another")
    assert Bundle.of(packages).sha256 != before


def test_a_folder_without_the_agent_itself_is_refused(nxpipe: InProcess, packages: Path, tmp_path: Path) -> None:
    (packages / NAMES[2]).unlink()
    answer = nxpipe("agent", "bundle", "packages")
    assert answer.code == exit_codes.USAGE.number
    assert "has no wheel of nxpipe" in answer.err
    assert not (tmp_path / "nxpipe.agent.lock").exists()


@pytest.mark.parametrize(("text", "fault"), [("{", "cannot be read"), ('{"sha256": "latest"}', "names no digest")])
def test_with_a_broken_lock_nothing_is_synthesised(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "nxpipe.agent.lock").write_text(text)
    with pytest.raises(NoAgentLocked, match=f"{fault}, .* run: nxpipe agent bundle"):
        locked_agent(tmp_path)


def test_a_missing_lock_is_an_agent_that_is_not_chosen_yet(tmp_path: Path) -> None:
    assert locked_agent(tmp_path) is None
