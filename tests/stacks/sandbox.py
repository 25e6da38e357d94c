"""A sandbox for user data: a folder as root, and stubs for commands that would change a machine."""

import hashlib
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nxpipe.pipeline.config.locks import SystemSoftware
from nxpipe.pipeline.fleet.agent.run import Bundle
from tests.agent.wheels import AGENT_WHEEL, write_wheel

_MOUNTED = '[ "$(wc -l < "$SANDBOX/tries")" -ge "${MOUNTS_AT:-1}" ]'
_METADATA = """case "${@: -1}" in
*/api/token) echo a-token ;;
*/instance-id) echo i-1 ;;
*/tags/instance/aws:autoscaling:groupName) echo blue ;;
esac"""

# Commands of an instance that a test must not run; each stub records its arguments and has a visible effect.
_STUBS = {
    "aws": 'if [ "$1 $2" = "s3 cp" ]; then cp "$BUNDLE" "${@: -1}"; fi',
    "curl": _METADATA,
    "dpkg": '[ -s "$2" ]',
    "id": "exit 1",
    "mount": f'echo try >> "$SANDBOX/tries"; {_MOUNTED}',
    "mount.efs": "",
    "mountpoint": _MOUNTED,
    "python3": 'mkdir -p "$3/bin"; cp "$SANDBOX/bin/pip" "$3/bin/pip"',
    "pip": 'for wheel; do :; done; [ -s "$wheel" ]',
    "sleep": "",
    "systemctl": 'exit "${SYSTEMCTL:-0}"',
    "useradd": "",
}


@dataclass(frozen=True)
class Ran:
    code: int
    err: str
    calls: list[str]

    def called(self, command: str) -> list[str]:
        return [call for call in self.calls if call.split()[0] == command]


class Sandbox:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        (folder / "bin").mkdir(parents=True)
        (self.root / "etc").mkdir(parents=True)
        for name, does in _STUBS.items():
            path = folder / "bin" / name
            path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$SANDBOX/calls"\n{does}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.bundle = folder / "bundle.tar"
        self.bundle.write_bytes(_bundle(folder / "wheels"))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.bundle.read_bytes()).hexdigest()

    def run(self, script: str, **environment: str) -> Ran:
        path = self.folder / "user-data"
        path.write_text(script)
        done = subprocess.run(
            ["bash", str(path)],
            env={
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "SANDBOX": str(self.folder),
                "BUNDLE": str(self.bundle),
                "TMPDIR": str(self.folder),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        calls = (self.folder / "calls").read_text().splitlines()
        return Ran(done.returncode, done.stderr, calls)

    def text(self, path: str) -> str:
        return (self.root / path).read_text()


def _bundle(folder: Path) -> bytes:
    folder.mkdir()
    write_wheel(folder, "click-8.4.0-py3-none-any.whl")
    write_wheel(folder, AGENT_WHEEL, "click")
    (folder / "neuron-tools_2.4.1_amd64.deb").write_text("a package of the system")
    return Bundle.of(folder, SystemSoftware(python="3.12", glibc="2.39")).data
