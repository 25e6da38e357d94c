"""Replacements of third-party actions. All other parts of a workflow are real."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from tests.github.runner import Machine

StandIn: TypeAlias = Callable[[Machine, Mapping[str, str]], None]

_PIP: Final = '#!/bin/sh\nprintf "%s\\n" "$*" >> "$HOME/pip"\n'
_KEYS: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
_SUBJECT: Final = re.compile(r"([0-9a-f]{64})  (\S+)")


def checkout(machine: Machine, inputs: Mapping[str, str]) -> None:
    """A clone of the repository."""
    assert inputs["persist-credentials"] == "false"
    subprocess.run(["git", "clone", "--quiet", machine.run.repository, machine.workspace], check=True)


def setup_python(machine: Machine, inputs: Mapping[str, str]) -> None:
    """Put this environment on the PATH, in which nxpipe is installed, behind a pip that only records its arguments."""
    assert inputs["python-version"] == "3.11"
    tools = machine.folder / "tools"
    tools.mkdir()
    (tools / "pip").write_text(_PIP)
    (tools / "pip").chmod(0o755)
    machine.environment["PATH"] = f"{tools}:{Path(sys.executable).parent}:{machine.environment['PATH']}"


def cache(machine: Machine, inputs: Mapping[str, str]) -> None:
    """A cache that is always empty; records the key."""
    machine.note("cache", inputs["key"])


def configure_aws_credentials(machine: Machine, inputs: Mapping[str, str]) -> None:
    """Set credentials, of which the local AWS accepts any; records the role. Without this step a job has none."""
    machine.note("role", inputs["role-to-assume"])
    machine.note("seconds", inputs["role-duration-seconds"])
    machine.environment.update(
        {**_KEYS, "AWS_REGION": inputs["aws-region"], "AWS_DEFAULT_REGION": inputs["aws-region"]}
    )


def attest_build_provenance(machine: Machine, inputs: Mapping[str, str]) -> None:
    """Check the format of the subjects (a digest, two blanks, a name), and record the digests."""
    lines = (machine.workspace / inputs["subject-checksums"]).read_text().splitlines()
    for line in lines:
        subject = _SUBJECT.fullmatch(line)
        assert subject, line
        machine.note("attested", subject[1])
    assert lines


def upload_artifact(machine: Machine, inputs: Mapping[str, str]) -> None:
    """Copy files and folders to a folder of the run, by their place in the workspace; absent ones are ignored."""
    into = machine.run.folder / "artifacts" / inputs["name"]
    for name in inputs["path"].split():
        source = machine.workspace / name
        if source.is_dir():
            shutil.copytree(source, into / name)
        elif source.exists():
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, into / name)


STAND_INS: Final[Mapping[str, StandIn]] = {
    "actions/attest-build-provenance": attest_build_provenance,
    "actions/cache": cache,
    "actions/checkout": checkout,
    "actions/setup-python": setup_python,
    "actions/upload-artifact": upload_artifact,
    "aws-actions/configure-aws-credentials": configure_aws_credentials,
}
