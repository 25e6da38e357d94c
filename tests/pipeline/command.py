"""Running the installed `nxpipe` as a user does: a process of its own, its two streams and its exit code."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NXPIPE = Path(sys.executable).parent / "nxpipe"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def nxpipe(*arguments: str, cwd: Path, **environment: str) -> Answer:
    done = subprocess.run(
        [str(NXPIPE), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)
