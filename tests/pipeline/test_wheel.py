"""The wheel installs one package, `nxpipe`, which works beside a repository with folders of our packages' names, and is
all that a repository needs to deploy stacks.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.checkout import PACKAGES
from tests.conftest import ROOT
from tests.pipeline.conftest import BERT, write_model
from tests.wheel import build, environment_of, wheel_of

CONFIGURATION = '[project]\nname = "search"\n'
JUNK = "raise RuntimeError('a module of the repository was imported')\n"

pytestmark = pytest.mark.sample(2, "wheel")  # an installation takes six seconds


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder but for a virtual environment with the wheel; dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("project") / "My Search"
    build("venv", "--without-pip", str(folder / ".venv"))
    python = str(folder / ".venv/bin/python")
    build("pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    # The .pth files there, such as one that leads to this checkout, are not read.
    (packages_of(folder) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def packages_of(project: Path) -> Path:
    (packages,) = (project / ".venv/lib").glob("python*/site-packages")
    return packages


@pytest.fixture(scope="module")
def installed(project: Path) -> Path:
    """A folder with the wheel's content and nothing else."""
    return packages_of(project)


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


def run(
    installed: Path, repository: Path, code: str, *arguments: str, packages: str = sysconfig.get_path("purelib")
) -> subprocess.CompletedProcess[str]:
    """Python with the repository, the installed wheel and its dependencies on the path; without this checkout."""
    start = f"import sys; sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}] + [{packages!r}]\n"
    return subprocess.run(
        [sys.executable, "-S", "-c", start + code, *arguments],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", str(installed)])},
        capture_output=True,
        text=True,
        check=False,
    )


def data_of_packages() -> list[str]:
    """Every file of the packages that is no module and no cache, by its name below `nxpipe/`."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in {".py", ".pyc"}]
    return ["py.typed", "stacks/__main__.py", *(str(path.relative_to(ROOT)) for path in data)]


def test_the_wheel_has_one_package_with_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"nxpipe", "nxpipe-0.1.0.dist-info"}
    assert [name for name in data_of_packages() if f"nxpipe/{name}" not in names] == []
    assert not [name for name in names if "tests/" in name or name.endswith(".pyc")]


def test_a_wheel_from_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    build("hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    again = wheel_of(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


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
print(*sorted(file for name, file in files.items() if name.startswith("nxpipe") and file), sep="\\n")
"""
    done = run(installed, repository, code)
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert files
    assert all(Path(file).is_relative_to(installed / "nxpipe") for file in files)


def test_the_console_script_is_the_entry_point(wheel: Path) -> None:
    points = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    assert "nxpipe = nxpipe.pipeline.cli.entry:main" in zipfile.ZipFile(wheel).read(points).decode()


# A repository of a user's own


def test_an_empty_folder_becomes_stacks_by_init_and_the_cdk_command(project: Path) -> None:
    def command(*words: str) -> str:
        environment = environment_of(project)
        done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command(".venv/bin/nxpipe", "init", "--fleet", "serving")
    assert command(".venv/bin/nxpipe", "config", "check") == "nxpipe.toml is valid: 1 model, 1 fleet.\n"
    for name in ("constructs", "stacks", "nxpipe"):  # folders that a repository may have
        (project / name).mkdir()
        (project / name / "__init__.py").write_text(JUNK)
    (project / "node_modules").symlink_to(ROOT / "node_modules")  # `npm install`
    pinned = json.loads((project / "package.json").read_text())["devDependencies"]["aws-cdk"]
    assert command("node_modules/.bin/cdk", "--version").split()[0] == pinned
    command("node_modules/.bin/cdk", "synth", "--quiet")
    stacks = {path.name.partition(".")[0] for path in (project / "cdk.out").glob("*.template.json")}
    assert stacks == {
        *(f"my-search-{name}" for name in ("network", "observe", "storage")),
        *(f"my-search-{name}-bert-base-uncased" for name in ("rollout", "serve")),
    }


def test_the_cdk_app_without_its_extra_names_the_extra(installed: Path, repository: Path, tmp_path: Path) -> None:
    dependencies = tmp_path / "dependencies"  # of the base package
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("aws_cdk", "cdk_nag", "constructs", "jsii")):
            (dependencies / entry.name).symlink_to(entry)
    code = "import runpy; runpy.run_module('nxpipe.stacks', run_name='__main__')"
    done = run(installed, repository, code, packages=str(dependencies))
    assert done.returncode == 4
    assert done.stderr == "The CDK app requires aws_cdk, which is not installed; run: pip install 'nxpipe[cdk]'.\n"
