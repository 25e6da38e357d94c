"""The wheel of this checkout, and the environment of a repository that has nothing else of it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def build(*command: str, cwd: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=True)


def wheel_of(sources: Path, folder: Path) -> Path:
    build("pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), ".", cwd=sources)
    (wheel,) = folder.glob("nxpipe-*.whl")
    return wheel


def environment_of(project: Path) -> dict[str, str]:
    """What is left of this process's environment: no account, no settings, no activated virtual environment."""
    private = ("AWS_", "CDK_", "NXPIPE_", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(private)} | {
        "AWS_EC2_METADATA_DISABLED": "true",
        "CDK_HOME": str(project.parent / "cdk-home"),
        "CDK_VALIDATION": "false",  # tests/stacks/test_cdk_app.py switches it on: it takes ten seconds
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
    }
