"""The `nxpipe` command as a process, with its two streams and its exit code.

`nxpipe` is forked from a server that has imported the product (see command_server); `installed` starts the script.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.pipeline.command_server import command_server

NXPIPE = Path(sys.executable).parent / "nxpipe"
_INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_")  # read at the start of an interpreter, so they have no effect on a fork
TIMEOUT = 120.0


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def nxpipe(*arguments: str, cwd: Path, **environment: str) -> Answer:
    if any(name.startswith(_INTERPRETER) for name in environment):
        return installed(*arguments, cwd=cwd, **environment)
    return Answer(*command_server().run([str(NXPIPE), *arguments], cwd, {**os.environ, **environment}, TIMEOUT))


def installed(*arguments: str, cwd: Path, **environment: str) -> Answer:
    done = subprocess.run(
        [str(NXPIPE), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)
