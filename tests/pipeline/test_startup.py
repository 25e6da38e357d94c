"""A short command avoids unneeded imports, without skipping checks."""

import subprocess
import sys
from pathlib import Path

import pytest

from nxpipe.pipeline.config import Config, ConfigInvalid, load_config, load_store_section
from nxpipe.pipeline.config.store_section import TABLES
from tests.pipeline.command import nxpipe

PROJECT = '[project]\nname = "search"\n'
WRONG_FLEET = '[[fleets]]\nkind = "serving"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nxpipe.toml"


def test_the_store_is_read_without_the_rest_of_the_file(path: Path) -> None:
    path.write_text(f'{PROJECT}[store]\nurl = "s3://search-artifacts/models"\ncache_limit = "5GiB"\n')
    assert load_store_section(path, {}) == load_config(path, {}).store


def test_without_a_file_the_store_has_its_defaults(path: Path) -> None:
    assert load_store_section(path, {}) == load_config(path, {}, missing_ok=True).store


def test_a_fault_beside_the_store_keeps_nobody_from_its_artifacts(path: Path) -> None:
    path.write_text(f'{PROJECT}{WRONG_FLEET}[store]\nurl = "file://here"\n')
    with pytest.raises(ConfigInvalid):
        load_config(path, {})
    assert load_store_section(path, {}).url == "file://here"


def test_a_variable_for_the_store_counts(path: Path) -> None:
    path.write_text(f'{PROJECT}[store]\nurl = "file://here"\n')
    assert load_store_section(path, {"NXPIPE_STORE_CACHE": "/mnt/cache"}).cache == "/mnt/cache"


@pytest.mark.parametrize(
    ("text", "variables", "fault"),
    [
        ("[stroe]\nurl = 's3://search-artifacts'\n", {}, 'did you mean "store"'),
        ("[store]\nurl = 'http://search'\n", {}, "store.url"),
        ("store = 1\n", {}, "store"),
        ("[store\n", {}, "nxpipe.toml:1"),
        ("[store]\ncache = 'c'\n", {"NXPIPE_STORE_ULR": "s3://search"}, "NXPIPE_STORE_ULR"),
    ],
)
def test_whatever_may_concern_the_store_is_told(path: Path, text: str, variables: dict[str, str], fault: str) -> None:
    path.write_text(text + PROJECT)
    with pytest.raises(ConfigInvalid, match=fault):
        load_store_section(path, variables)


def test_every_table_of_a_file_is_known_to_who_reads_the_store_alone() -> None:
    assert Config.model_fields.keys() == TABLES


def test_the_installed_command_looks_for_no_plugins(tmp_path: Path) -> None:
    """Each document that a command reads is a model of pydantic's, which would import `importlib.metadata` for it."""
    answer = nxpipe("store", "ls", "--store", "s", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in answer.err.splitlines()}
    assert answer.code == 0
    assert "pydantic" in imported
    assert (
        not {
            "importlib.metadata",
            "nxpipe.emulator.hardware",
            "nxpipe.emulator.capture",
            "nxpipe.pipeline.config.fleets",
            "nxpipe.pipeline.config.serving_fleet",
        }
        & imported
    )


def test_what_else_is_looked_for_beside_the_plugins_is_pydantics_own() -> None:
    code = """
import sys
from nxpipe.pipeline.cli.entry import skip_plugins
skip_plugins()
from pydantic.plugin._loader import get_plugins
assert list(get_plugins()) == [] and "importlib.metadata" not in sys.modules
from pydantic.plugin._loader import PYDANTIC_ENTRY_POINT_GROUP
assert PYDANTIC_ENTRY_POINT_GROUP == "pydantic"
from pydantic import BaseModel
class Number(BaseModel):
    value: int
assert Number(value=1).value == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
