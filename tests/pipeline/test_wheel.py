"""The wheel installs one package, `nxpipe`, which works beside a repository with folders of our packages' names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pipeline.conftest import BERT, write_model

DATA = (
    "py.typed",
    "pipeline/build/report/page.css",
    "pipeline/build/report/page.js",
    "pipeline/models/known_models.json",
    "pipeline/templates/nxpipe.toml",
    "pipeline/templates/nxpipe-release.yml",
    "pipeline/templates/nxpipe/action.yml",
    "stacks/lint/prices.toml",
    "stacks/user_data/agent.sh",
)
CONFIGURATION = '[project]\nname = "search"\n'
JUNK = "raise RuntimeError('a module of the repository was imported')\n"


def build(*command: str, cwd: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=True)


def wheel_of(sources: Path, folder: Path) -> Path:
    build("pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), ".", cwd=sources)
    (wheel,) = folder.glob("nxpipe-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    build("pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A user's project whose folders have the names of our packages, and raise when they are imported."""
    for name in ("artifact_store", "emulator", "pipeline", "stacks"):
        (tmp_path / name / "cli").mkdir(parents=True)
        for module in ("__init__", "config", "errors", "cli/__init__"):
            (tmp_path / name / f"{module}.py").write_text(JUNK)
    (tmp_path / "nxpipe.toml").write_text(CONFIGURATION)
    write_model(tmp_path / "tiny", BERT)
    return tmp_path


def run(installed: Path, repository: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the repository, the installed wheel and its dependencies on the path; without this checkout."""
    packages = sysconfig.get_path("purelib")
    start = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}] + [{packages!r}]\n"
    return subprocess.run(
        [sys.executable, "-S", "-c", start + code, *arguments],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", str(installed)])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_has_one_package_with_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"nxpipe", "nxpipe-0.1.0.dist-info"}
    assert [name for name in DATA if f"nxpipe/{name}" not in names] == []
    assert not [name for name in names if "tests/" in name or name.endswith(".pyc")]


def test_a_wheel_from_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    build("hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    again = wheel_of(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("config", "check"),
        ("check", "--model-id", "./tiny", "--task", "feature-extraction", "--buckets", "16"),
        ("init", "fresh"),
    ],
    ids=" ".join,
)
def test_the_installed_command_works_beside_folders_of_the_same_names(
    installed: Path, repository: Path, arguments: tuple[str, ...]
) -> None:
    (repository / "fresh").mkdir()
    done = run(installed, repository, "from nxpipe.pipeline.cli.entry import main; main()", *arguments)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


def test_the_installed_packages_are_those_that_are_imported(installed: Path, repository: Path) -> None:
    code = """
import nxpipe.stacks.app, nxpipe.stacks.serving.stack, nxpipe.pipeline.build.run, nxpipe.emulator.compile
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(*sorted(file for name, file in files.items() if name.startswith("nxpipe") and file))
"""
    shutil.copy(ROOT / "app.py", repository)
    done = run(installed, repository, code)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert files
    assert all(Path(file).is_relative_to(installed / "nxpipe") for file in files)


def test_the_console_script_is_the_entry_point(wheel: Path) -> None:
    points = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    assert "nxpipe = nxpipe.pipeline.cli.entry:main" in zipfile.ZipFile(wheel).read(points).decode()
