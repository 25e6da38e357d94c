"""A user's repository: an empty folder, a virtual environment with the wheel, a shell, and the local AWS beside it.

Nothing of this checkout is reachable there, but for the downloaded dependencies of Python and npm.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.conftest import ROOT
from tests.wheel import build, environment_of

# The unpacked CDK package, shared by digest: tests have a new HOME each, and unpacking takes nine seconds.
PACKAGE_CACHE: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Repository:
    """A user's repository and shell. What one script exports is there in the next one."""

    folder: Path
    environment: dict[str, str]
    noted: dict[str, str] = field(default_factory=dict)  # what placeholders stand for

    @property
    def shell(self) -> Path:
        return self.folder.parent / "shell.sh"

    @property
    def configuration(self) -> Path:
        return self.folder / "nxpipe.toml"

    def edit(self, *changes: tuple[str, str]) -> None:
        text = self.configuration.read_text()
        for pattern, line in changes:
            text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
            assert count == 1, (pattern, count)
        self.configuration.write_text(text)

    def fill_in(self, commands: str) -> str:
        for word, value in self.noted.items():
            commands = value.join(re.split(rf"(?<!\w){re.escape(word)}(?!\w)", commands))
        return commands

    def execute(self, commands: str, *, timeout: float = 900, **environment: str) -> Done:
        """Run a script without a terminal; its exit code and its two streams."""
        self.shell.touch()
        end = f"trap 'code=$?; export -p > {self.shell}; exit $code' EXIT"
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", f". {self.shell}\n{end}\n{self.fill_in(commands)}\n"],
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,  # no controlling terminal
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def run(self, commands: str) -> tuple[int, str]:
        done = self.execute(f"exec 2>&1\n{commands}")
        return done.code, done.out

    def succeed(self, commands: str) -> str:
        code, output = self.run(commands)
        assert code == 0, f"{commands}: exit code {code}\n{output}"
        return output


def fresh_repository(folder: Path, noted: Mapping[str, str] | None = None) -> Repository:
    """An empty folder and the programs of the machine; nothing is installed for it."""
    folder.mkdir()
    programs = folder.parent / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    inherited = [entry for entry in os.environ["PATH"].split(os.pathsep) if Path(entry) != Path(sys.executable).parent]
    own = {
        "PATH": os.pathsep.join([str(programs), *inherited]),
        "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(PACKAGE_CACHE),
        "npm_config_offline": "true",
        "HF_HUB_OFFLINE": "1",
    }
    return Repository(folder, environment_of(folder) | own, dict(noted or {}))


def new_repository(folder: Path, wheel: Path | None, noted: Mapping[str, str] | None = None) -> Repository:
    """An empty folder whose virtual environment has our dependencies, and is activated with the wheel if one is given;
    else `pip install` has to install it."""
    repository = fresh_repository(folder, noted)
    environment = folder / ".venv"
    build("venv", *(["--without-pip"] if wheel else []), str(environment))
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # The .pth files there, such as one that leads to this checkout, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    if wheel:
        python = str(environment / "bin/python")
        build("pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", str(wheel))
        path = repository.environment["PATH"]
        repository.environment["PATH"] = f"{environment / 'bin'}{os.pathsep}{path}"
    return repository


def download_cdk(folder: Path) -> None:
    """What `npm install` downloads, which keeps it."""
    shutil.copytree(ROOT / "node_modules", folder / "node_modules", symlinks=True)


@contextmanager
def cloud_up(errors: Path) -> Iterator[str]:
    """The local AWS in a process of its own, as `make cloud-up` starts it; the `export` lines that it prints."""
    command = [sys.executable, "-m", "tests.localaws.server"]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("export AWS_REGION="):
                lines.append(server.stdout.readline())
                assert lines[-1], errors.read_text()
            yield "".join(lines)
        finally:
            server.send_signal(signal.SIGTERM)
