"""What each command needs beyond the base install, whether it is here, and how to get it."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from nxpipe.pipeline.compile.neuronx.toolchain import REMEDY, installed_releases

LIBRARIES: Final = (
    "click",
    "pydantic",
    "boto3",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "ml_dtypes",
    "aws-cdk-lib",
    "ray",
)
_COMPILE: Final = "pip install 'nxpipe[compile]'"
_CDK: Final = "pip install 'nxpipe[cdk]'"


@dataclass(frozen=True)
class Need:
    """One thing that some command cannot do without."""

    what: str
    needed_for: str
    get_it: str
    find: Callable[[], str | None]
    optional: bool = False


@dataclass(frozen=True)
class Finding:
    need: Need
    found: str | None

    @property
    def state(self) -> str:
        if self.found:
            return "ok"
        return "optional" if self.need.optional else "missing"


def examine() -> list[Finding]:
    """Look for everything that any command needs; nothing heavy is imported or run."""
    return [Finding(need, need.find()) for need in NEEDS]


def _library(name: str, exactly: str | None = None) -> Callable[[], str | None]:
    def find() -> str | None:
        try:
            found = version(name)
        except PackageNotFoundError:
            return None
        return found if exactly is None or found.partition("+")[0] == exactly else None

    return find


def _program(*command: str) -> Callable[[], str | None]:
    """The first line that a program prints about its version."""

    def find() -> str | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip().partition("\n")[0] if answer.returncode == 0 else None

    return find


def _cdk() -> str | None:
    """The CDK command of this project, else the one on the PATH."""
    local = Path("node_modules/.bin/cdk")
    return _program(str(local.resolve()) if local.exists() else "cdk", "--version")()


def neuronx() -> str | None:
    """The release of AWS's own compiler, where it is installed."""
    return _library("neuronx-cc")()


NEEDS: Final = (
    Need("torch 2.13.0", "nxpipe build", _COMPILE, _library("torch", exactly="2.13.0")),
    Need("transformers", "nxpipe build", _COMPILE, _library("transformers")),
    Need("safetensors", "nxpipe build", _COMPILE, _library("safetensors")),
    Need("numpy", "nxpipe build", _COMPILE, _library("numpy")),
    Need("ml_dtypes", "nxpipe build", _COMPILE, _library("ml_dtypes")),
    Need("boto3", "a store on s3://", "pip install nxpipe", _library("boto3")),
    Need("aws-cdk-lib", "cdk synth, cdk deploy", _CDK, _library("aws-cdk-lib")),
    Need("node", "cdk synth, cdk deploy", "install Node.js 24, or 22", _program("node", "--version")),
    Need("cdk", "cdk synth, cdk deploy", "npm ci (or npm install aws-cdk@2.1148.1)", _cdk),
    Need("git", "nxpipe init", "install git", _program("git", "--version"), optional=True),
    Need("ray", "building on several machines", "pip install 'nxpipe[ray]'", _library("ray"), optional=True),
    Need(
        "neuronx-cc, torch-neuronx",
        "nxpipe build --backend neuronx",
        REMEDY,
        installed_releases,
        optional=True,
    ),
)
