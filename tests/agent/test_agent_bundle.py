"""`nxpipe agent bundle`: what instances install is named by its digest, the same wherever it is made, and fits them."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from nxpipe.pipeline.config.locks import SystemSoftware
from nxpipe.pipeline.fleet.agent.wheels import Bundle
from nxpipe.pipeline.util import exit_codes
from nxpipe.stacks.locks import NoAgentLocked, locked_agent
from nxpipe.stacks.user_data.scripts import script
from tests.agent.wheels import AGENT_WHEEL, find_python, write_wheel
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.sandbox import Sandbox

__all__ = ["nxpipe"]

UBUNTU = SystemSoftware(python="3.12", glibc="2.39")
DEB = "amazon-efs-utils-2.4.1_amd64.deb"
CLICK = "click-8.4.0-py3-none-any.whl"
NATIVE = "cffi-2.1.1-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
NAMES = [DEB, NATIVE, CLICK, AGENT_WHEEL]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\n[store]\nurl = "file://store"\n')
    folder = tmp_path / "packages"
    folder.mkdir()
    write_wheel(folder, AGENT_WHEEL, "click>=8.4", 'cffi>=2.0 ; platform_python_implementation != "PyPy"')
    write_wheel(folder, CLICK, 'colorama; platform_system == "Windows"', 'importlib-metadata; python_version < "3.8"')
    write_wheel(folder, NATIVE)
    for name in (DEB, "notes.txt"):
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
    assert locked_agent(tmp_path, "3.12") == digest
    again = nxpipe("agent", "bundle", "packages", "--json")
    known = {"sha256": digest, "path": f"agents/{digest}.tar", "python": "3.12", "packages": NAMES, "new": False}
    assert json.loads(again.out) == known


def test_dates_and_modes_of_files_are_no_part_of_it(packages: Path) -> None:
    before = Bundle.of(packages, UBUNTU).sha256
    for path in packages.iterdir():
        os.utime(path, (1, 1))
        path.chmod(0o600)
    assert Bundle.of(packages, UBUNTU).sha256 == before
    (packages / DEB).write_text("another")
    assert Bundle.of(packages, UBUNTU).sha256 != before


def refused(nxpipe: InProcess, folder: Path) -> str:
    """The message for a folder from which nothing was stored and nothing locked."""
    answer = nxpipe("agent", "bundle", "packages")
    assert answer.code == exit_codes.USAGE.number
    assert not (folder / "nxpipe.agent.lock").exists()
    assert not (folder / "store").exists()
    return answer.err


def test_a_folder_without_the_agent_itself_is_refused(nxpipe: InProcess, packages: Path, tmp_path: Path) -> None:
    (packages / AGENT_WHEEL).unlink()
    assert "has no wheel of nxpipe" in refused(nxpipe, tmp_path)


@pytest.mark.parametrize(
    "tags",
    [
        "cp311-cp311-manylinux2014_x86_64",  # of the Python that runs nxpipe
        "cp312-cp312-macosx_11_0_arm64",
        "cp312-cp312-manylinux2014_aarch64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp312-cp312-linux_x86_64",  # compiled on a machine with any glibc
        "cp312-cp312-manylinux_2_40_x86_64",
        "cp313-abi3-manylinux2014_x86_64",
        "cp312-cp312t-manylinux2014_x86_64",
        "py313-none-any",
        "py2-none-any",
    ],
)
def test_a_wheel_that_the_image_cannot_install_is_refused_by_its_name(
    nxpipe: InProcess, packages: Path, tmp_path: Path, tags: str
) -> None:
    (packages / NATIVE).unlink()
    write_wheel(packages, f"cffi-2.1.1-{tags}.whl")
    message = refused(nxpipe, tmp_path)
    assert f"packages/cffi-2.1.1-{tags}.whl does not install on the fleets' image, which has Python 3.12" in message
    assert "nxpipe agent bundle NEW_FOLDER --fetch WHEEL_OF_NXPIPE" in message


@pytest.mark.parametrize(
    "tags",
    [
        "cp38-abi3-manylinux1_x86_64",
        "cp312-abi3-manylinux_2_39_x86_64",
        "cp312-none-any",
        "py2.py3-none-any",
        "py310-none-manylinux2010_x86_64",
        "cp311.cp312-cp312-manylinux2014_x86_64",
        "1-cp312-cp312-manylinux2014_x86_64",  # a build number
    ],
)
def test_a_wheel_that_pip_would_install_there_is_taken(packages: Path, tags: str) -> None:
    (packages / NATIVE).unlink()
    name = f"cffi-2.1.1-{tags}.whl"
    write_wheel(packages, name)
    assert name in Bundle.of(packages, UBUNTU).packages


@pytest.mark.parametrize(
    ("name", "requires", "python", "fault"),
    [
        (CLICK, ["six>=1.5"], ">=3.11", "requires six>=1.5, but packages does not have it; add that wheel"),
        (CLICK, ["cffi<2"], ">=3.11", "requires cffi<2, but packages has cffi 2.1.1"),
        (CLICK, ["cffi~=2.0.4"], ">=3.11", "requires cffi~=2.0.4, but packages has cffi 2.1.1"),
        (CLICK, ["cffi!=2.1.*"], ">=3.11", "but packages has cffi 2.1.1"),
        (CLICK, ["cffi[fast]"], ">=3.11", "six, but packages does not have it"),
        (CLICK, ['six; sys_platform == "linux" and (python_version >= "3.12")'], ">=3.11", "requires six"),
        (CLICK, ['six; python_full_version >= "3.12.0" and python_version != "3.11"'], ">=3.11", "requires six"),
        (CLICK, ['six; what_is_this > "3"'], ">=3.11", "Expected a marker variable"),
        (CLICK, [], ">=3.13", "requires Python >=3.13, but the fleets' image has 3.12"),
        ("click-8.3.9-py3-none-any.whl", [], ">=3.11", "and click-8.3.9-py3-none-any.whl are of one package"),
        (CLICK, ["two words"], ">=3.11", "it requires 'two words': Expected semicolon"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_closure_is_refused_by_what_it_lacks(
    nxpipe: InProcess, packages: Path, tmp_path: Path, name: str, requires: list[str], python: str, fault: str
) -> None:
    write_wheel(packages, NATIVE, "six; extra == 'fast'")
    write_wheel(packages, name, *requires, python=python)
    assert fault in refused(nxpipe, tmp_path)


def test_a_file_that_is_no_wheel_is_refused_by_its_name(nxpipe: InProcess, packages: Path, tmp_path: Path) -> None:
    (packages / CLICK).write_text("not a zip file")
    assert "click-8.4.0-py3-none-any.whl is not a wheel" in refused(nxpipe, tmp_path)


AMIS = """
[[image]]
region = "us-east-2"
sdk = "2.32.0"
id = "ami-0a1b2c3d4e5f60718"
name = "an image"
created = 2026-08-20
expires = 2099-01-01
source = "a test"
"""


def test_the_bundle_is_for_the_python_of_the_locked_image(nxpipe: InProcess, packages: Path, tmp_path: Path) -> None:
    lock = tmp_path / "nxpipe.amis.lock"
    lock.write_text(AMIS)  # of an older nxpipe: the documented Python, 3.12, applies
    assert nxpipe("agent", "bundle", "packages").code == 0
    lock.write_text(f'{AMIS}python = "3.13"\nglibc = "2.39"\n')
    assert "which has Python 3.13" in nxpipe("agent", "bundle", "packages").err
    lock.write_text(f'{AMIS}python = "3.12"\n{AMIS.replace("us-east-2", "eu-west-1")}python = "3.13"\n')
    assert "images of one operating system" in nxpipe("agent", "bundle", "packages").err
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\nregion = "eu-west-1"\n')
    assert "which has Python 3.13" in nxpipe("agent", "bundle", "packages").err


def test_a_bundle_for_another_python_than_the_images_is_not_deployed(
    nxpipe: InProcess, packages: Path, tmp_path: Path
) -> None:
    assert nxpipe("agent", "bundle", "packages").code == 0
    with pytest.raises(NoAgentLocked, match=r"a bundle for Python 3\.12, and the fleets' image has 3\.13"):
        locked_agent(tmp_path, "3.13")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetching_takes_the_wheels_of_the_images_python_and_not_those_of_the_one_that_runs(
    nxpipe: InProcess, packages: Path, index: Path, tmp_path: Path
) -> None:
    """pip evaluates markers for the Python that runs it; what only the image's requires is there all the same."""
    running = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for python in {"cp312", running}:
        write_wheel(index, f"cffi-2.1.1-{python}-{python}-manylinux_2_17_x86_64.whl")
    write_wheel(index, "late-1.0-py3-none-any.whl")
    wheel = write_wheel(tmp_path, AGENT_WHEEL, "cffi>=2", f'late; python_version != "{running[2]}.{running[3:]}"')
    answer = nxpipe("agent", "bundle", "fetched", "--fetch", str(wheel))
    assert answer.code == 0, answer.err
    fetched = ["cffi-2.1.1-cp312-cp312-manylinux_2_17_x86_64.whl", "late-1.0-py3-none-any.whl", AGENT_WHEEL]
    assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == fetched
    assert nxpipe("agent", "bundle", "fetched").out == answer.out


@pytest.mark.parametrize(
    ("folder", "agent", "fault"),
    [
        (
            "fetched",
            "nxpipe==0.2.0",
            "pip cannot download nxpipe==0.2.0 and its dependencies for Python 3.12: No ",
        ),
        pytest.param("fetched", "late", "late is not nxpipe", marks=pytest.mark.slow),
        ("packages", "nxpipe==0.2.0", "packages already has wheels; name a new folder"),
    ],
)
def test_a_download_that_fails_leaves_no_folder(
    nxpipe: InProcess, packages: Path, index: Path, tmp_path: Path, folder: str, agent: str, fault: str
) -> None:
    write_wheel(index, "late-1.0-py3-none-any.whl")
    before = sorted(tmp_path.iterdir())
    answer = nxpipe("agent", "bundle", folder, "--fetch", agent)
    assert (answer.code, fault in answer.err) == (exit_codes.USAGE.number, True), answer.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_the_bundle_of_this_very_nxpipe_installs_and_starts_on_the_images_python(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real index, by the user data. Where there is no Python 3.12, pip resolves for it instead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "demo"\n[store]\nurl = "file://store"\n')
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", str(ROOT)]
    subprocess.run(wheel, check=True)
    answer = nxpipe("agent", "bundle", "packages", "--fetch", *map(str, Path("dist").iterdir()))
    assert answer.code == 0, answer.err
    python = find_python("3.12")
    if python is None:
        packages = [str(path) for path in Path("packages").iterdir()]
        for_312 = ["--dry-run", "--only-binary=:all:", "--python-version=3.12", "--target=nowhere"]
        platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in range(39, 4, -1)]
        platforms.append("--platform=manylinux2014_x86_64")
        subprocess.run([*pip, "install", "--no-index", "--no-deps", *for_312, *platforms, *packages], check=True)
        return
    digest = answer.out.strip()
    instance = Sandbox(tmp_path / "instance", python=python, bundle=tmp_path / f"store/agents/{digest}.tar")
    values = {
        "CONSOLE": instance.path("dev/console"),
        "PROGRAMS": instance.path("opt/nxpipe"),
        "REGION": "us-east-2",
        "HOOK": "ready",
        "AGENT_URL": "s3://demo/agent.tar",
        "AGENT_SHA256": digest,
    }
    ran = instance.run(script(values, {}, "agent"))
    assert ran.code == 0, ran.err
    programs = instance.root / "opt/nxpipe/agent/bin"
    subprocess.run([programs / "pip", "check"], check=True)
    subprocess.run([programs / "nxpipe", "agent", "run", "--help"], check=True)
    modules = "nxpipe.pipeline.fleet.agent.run, nxpipe.pipeline.fleet.agent.watch, boto3, cryptography, pydantic"
    subprocess.run([programs / "python", "-c", f"import {modules}"], check=True)


@pytest.mark.parametrize(("text", "fault"), [("{", "cannot be read"), ('{"sha256": "latest"}', "names no digest")])
def test_with_a_broken_lock_nothing_is_synthesised(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "nxpipe.agent.lock").write_text(text)
    with pytest.raises(NoAgentLocked, match=f"{fault}, .* run: nxpipe agent bundle"):
        locked_agent(tmp_path, "3.12")


def test_a_missing_lock_is_an_agent_that_is_not_chosen_yet(tmp_path: Path) -> None:
    assert locked_agent(tmp_path, "3.12") is None
