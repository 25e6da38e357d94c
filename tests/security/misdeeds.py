"""A process that confines itself as a reader of models does, and then tries forbidden operations.

`python -m tests.security.misdeeds SCRATCH MODEL SECRET PORT` prints the result of each attempt as JSON.
"""

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from nxpipe.emulator.confinement import Limits, server


def attempts(scratch: Path, model: Path, secret: Path, port: int) -> dict[str, Callable[[], object]]:
    parent = os.getppid()
    return {
        "read the model": lambda: model.read_bytes(),
        "read numpy": lambda: __import__("numpy"),
        "write into its folder": lambda: (scratch / "x").write_text("x"),
        "read a secret": lambda: secret.read_bytes(),
        "list a folder": lambda: list(secret.parent.iterdir()),
        "write beside the model": lambda: (model.parent / "y").write_text("y"),
        "change the model": lambda: model.open("r+b").close(),
        "read the parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "read the parent's memory": lambda: Path(f"/proc/{parent}/mem").open("rb").close(),
        "read /etc/passwd": lambda: Path("/etc/passwd").read_bytes(),
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "run a program of its own": lambda: _run_own(scratch),
        "call home": lambda: socket.create_connection(("127.0.0.1", port), 5).close(),
        "listen": lambda: socket.socket().bind(("127.0.0.1", 0)),
        "end the parent": lambda: os.kill(parent, 0),
        "write a huge file": lambda: (scratch / "huge").write_bytes(bytes(2**21)),
        "dump core": lambda: _require(resource.getrlimit(resource.RLIMIT_CORE)[0] > 0),
    }


def _run_own(scratch: Path) -> None:
    program = scratch / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    os.execv(program, ["program"])


def _require(fact: bool) -> None:
    if not fact:
        raise OSError("no")


def main() -> None:
    scratch, model, secret = map(Path, sys.argv[1:4])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails
    tried = attempts(scratch, model, secret, int(sys.argv[4]))
    server.set_rlimits(Limits(written=2**20))
    confined = server.confine([*server.library_folders(Path(server.__file__).parents[2]), str(model)], str(scratch))
    found = {"": confined}
    for name, attempt in tried.items():
        try:
            attempt()
            found[name] = True
        except OSError:
            found[name] = False
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
