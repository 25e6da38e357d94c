"""`nxpipe doctor`: the software that commands require, whether it is installed, and how to install it."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.compile.neuronx.toolchain import REMEDY, installed_releases
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import SOFTWARE
from nxpipe.pipeline.util.text import style, table

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
    """A library or program that a command requires."""

    name: str
    needed_for: str
    remedy: str
    find: Callable[[], str | None]
    optional: bool = False


@dataclass(frozen=True)
class Requirement:
    """A requirement and its version, or None if it is missing."""

    need: Need
    version: str | None

    @property
    def state(self) -> str:
        if self.version:
            return "ok"
        return "optional" if self.need.optional else "missing"


def examine() -> list[Requirement]:
    """Check all requirements without importing them."""
    return [Requirement(need, need.find()) for need in NEEDS]


def _library(name: str, exactly: str | None = None) -> Callable[[], str | None]:
    def find() -> str | None:
        try:
            installed = version(name)
        except PackageNotFoundError:
            return None
        return installed if exactly is None or installed.partition("+")[0] == exactly else None

    return find


def _program(*command: str) -> Callable[[], str | None]:
    """A check that returns the first line of a program's version output."""

    def find() -> str | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return completed.stdout.strip().partition("\n")[0] if completed.returncode == 0 else None

    return find


def _cdk() -> str | None:
    """The version of the CDK command in node_modules, else of the command on the PATH."""
    local = Path("node_modules/.bin/cdk")
    return _program(str(local.resolve()) if local.exists() else "cdk", "--version")()


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
        "neuronx-cc, jaxlib",
        "nxpipe build --backend neuronx",
        REMEDY,
        installed_releases,
        optional=True,
    ),
)


_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red"}


@click.command(cls=Command)
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Report installed and missing software, with the commands that require it.

    Exits with code 4 if required software is missing.

    \b
    Example:
      nxpipe doctor
    """
    console: Console = ctx.obj
    findings = examine()
    if console.json:
        console.data([_as_json(finding) for finding in findings])
    else:
        console.page(
            table(("state", "software", "needed for", "version, or how to install it"), [_row(f) for f in findings])
        )
    missing = [finding.need.name for finding in findings if finding.state == "missing"]
    if missing:
        console.say(f"Missing: {', '.join(missing)}.")
        ctx.exit(SOFTWARE.number)
    console.say("All required software is installed.")


def _row(finding: Requirement) -> tuple[str, str, str, str]:
    state = style(finding.state, fg=_COLOURS[finding.state])
    return state, finding.need.name, finding.need.needed_for, finding.version or finding.need.remedy


def _as_json(finding: Requirement) -> dict[str, object]:
    return {
        "what": finding.need.name,
        "state": finding.state,
        "needed_for": finding.need.needed_for,
        "found": finding.version,
        "get_it": finding.need.remedy,
    }
