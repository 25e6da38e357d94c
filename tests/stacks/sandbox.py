"""A sandbox for user data: a folder as root, and stubs for commands that would change a machine.

The only other programs on its PATH are those that `PROGRAMS` names: a script that runs another one fails.
"""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from nxpipe.pipeline.config.locks import SystemSoftware
from nxpipe.pipeline.fleet.agent.wheels import Bundle
from nxpipe.stacks.user_data.scripts import DISK_PROGRAMS, HOST_PROGRAMS, PROGRAMS
from tests.agent.wheels import AGENT_WHEEL, write_wheel

WAIT_FOR_TEE = "sleep 0.1"

_METADATA = """case "${@: -1}" in
*/api/token) echo a-token ;;
*/instance-id) echo i-1 ;;
*/tags/instance/aws:autoscaling:groupName) echo blue ;;
esac"""

_DPKG = """[ -s "$2" ] || exit 1
echo try >> "$SANDBOX/tries"
if [ "$(wc -l < "$SANDBOX/tries")" -lt "${UNLOCKED_AT:-1}" ]; then
    echo "dpkg: error: dpkg frontend lock was locked by another process with pid 7" >&2
    exit 2
fi
[ -z "${DPKG:-}" ] || { echo "dpkg: error: $DPKG" >&2; exit 1; }"""

_AWS = """case "$1 $2" in
"s3 cp") cp "$BUNDLE" "${@: -1}" ;;
"logs create-log-stream") exit "${NO_STREAM:-0}" ;;
"logs put-log-events")
    sleep "${LOGS_TAKE:-0}"
    last="${@: -1}"; cp "${last#file://}" "$SANDBOX/delivered" ;;
*) exit "${AWS:-0}" ;;
esac"""

# Commands of an instance that a test must not run; each stub records its arguments and has a visible effect.
_STUBS = {
    "aws": _AWS,
    "curl": _METADATA,
    "dpkg": _DPKG,
    "id": "exit 1",
    "python3": '[ -z "${NO_VENV:-}" ] && mkdir -p "$3/bin" && cp "$SANDBOX/pip" "$3/bin/pip"',
    "sleep": '[ "$1" != 0.1 ] || exec sleep "$1"',  # the wait for `tee` has a limit, so it must take its time
    "systemctl": 'exit "${SYSTEMCTL:-0}"',
    "useradd": "",
}


# What a disk holds is the end of its name.
_DISK_STUBS = {
    "blkid": 'case "${@: -1}" in *-blank) exit 2 ;; *-ours) echo nxpipe ;; esac',
    "mkfs.ext4": "",
    "mount": 'touch "${@: -1}/.mounted"',
    "mountpoint": '[ -e "${@: -1}/.mounted" ]',
}
# `modprobe` makes the devices of the driver that the installer left, and the installer is a part of the EFA bundle.
_HOST_STUBS = {
    "dnf": 'exit "${DNF:-0}"',
    "modprobe": """[ -e "$SANDBOX/installed" ] || exit 1
mkdir -p "$SANDBOX/root/dev/infiniband"
for ((card = 0; card < ${CARDS:-8}; card++)); do touch "$SANDBOX/root/dev/infiniband/uverbs$card"; done""",
    "mdadm": "",
    "mkfs.ext4": "",
    "mount": "",
}
_INSTALLER = """#!/bin/sh
echo "efa_installer.sh $*" >> "$SANDBOX/calls"
: > "$SANDBOX/installed"
"""
_PIP = 'for wheel; do :; done; [ -s "$wheel" ]'


@dataclass(frozen=True)
class Ran:
    code: int
    err: str
    console: str
    calls: list[str]
    delivered: list[str]  # messages that the log group has got

    @property
    def steps(self) -> list[str]:
        """The calls but those that deliver the output, which waits for `tee` as often as it must."""
        return [call for call in self.calls if not call.startswith(("aws logs ", "curl ", WAIT_FOR_TEE))]

    def called(self, command: str) -> list[str]:
        return [call for call in self.calls if call.split()[0] == command and call != WAIT_FOR_TEE]


class Sandbox:
    def __init__(self, folder: Path, *, python: str | None = None, bundle: Path | None = None) -> None:
        """`python` is the real Python that takes the stub's place."""
        self.folder = folder
        self.root = folder / "root"
        (folder / "bin").mkdir(parents=True)
        (self.root / "etc").mkdir(parents=True)
        (self.root / "dev").mkdir()
        (self.root / "var/log").mkdir(parents=True)
        (folder / "calls").touch()
        _write_stub(folder / "pip", _PIP)
        for name, does in _STUBS.items():
            _write_stub(folder / "bin" / name, does)
        if python is not None:
            _write_stub(folder / "bin" / "python3", f'exec {python} "$@"')
        for name in PROGRAMS:
            if name not in _STUBS:
                program = shutil.which(name)
                assert program is not None, f"this machine has no {name}"
                (folder / "bin" / name).symlink_to(program)
        self.bundle = folder / "bundle.tar"
        self.bundle.write_bytes(bundle.read_bytes() if bundle else _bundle(folder / "wheels"))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.bundle.read_bytes()).hexdigest()

    def replace(self, name: str, does: str) -> None:
        """Another stand-in for a program."""
        path = self.folder / "bin" / name
        path.unlink()
        _write_stub(path, does)

    def add_disks(self, *disks: str) -> None:
        """The programs for an instance store, and its disks: "1-blank", "2-ours", "3-lvm"."""
        assert set(_DISK_STUBS) == set(DISK_PROGRAMS)
        for name, does in _DISK_STUBS.items():
            _write_stub(self.folder / "bin" / name, does)
        (self.root / "dev/disk/by-id").mkdir(parents=True)
        for disk in disks:
            (self.root / f"dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{disk}").touch()

    def add_training_host(self) -> None:
        """The programs of a training host, which has no Python and no AWS CLI before `dnf`, and the EFA installer."""
        folder = self.folder / "efa"
        for other in (self.folder / "bin").iterdir():
            other.unlink()
        for name in (*HOST_PROGRAMS, "aws", "mdadm"):
            does = (_HOST_STUBS | _STUBS).get(name)
            if does is not None:
                _write_stub(self.folder / "bin" / name, does)
                continue
            program = shutil.which(name)
            assert program is not None, f"this machine has no {name}"
            (self.folder / "bin" / name).symlink_to(program)
        (folder / "aws-efa-installer").mkdir(parents=True)
        script = folder / "aws-efa-installer/efa_installer.sh"
        script.write_text(_INSTALLER)
        script.chmod(0o755)
        with tarfile.open(self.bundle, "w:gz") as archive:
            archive.add(folder / "aws-efa-installer", "aws-efa-installer")

    def run(self, script: str, **environment: str) -> Ran:
        path = self.folder / "user-data"
        path.write_text(script)
        return self.run_file(path, **environment)

    def run_file(self, path: Path, **environment: str) -> Ran:
        bash = shutil.which("bash")
        assert bash is not None
        done = subprocess.run(
            [bash, str(path)],
            env={
                "PATH": f"{self.folder}/bin",
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
        console = self.root / "dev" / "console"
        said = console.read_text() if console.exists() else ""
        return Ran(done.returncode, done.stderr, said, calls, self._delivered())

    def _delivered(self) -> list[str]:
        path = self.folder / "delivered"
        events = json.loads(path.read_text()) if path.exists() else []
        assert all(abs(event["timestamp"] / 1000 - time.time()) < 600 for event in events)
        return [event["message"] for event in events]

    def path(self, path: str) -> str:
        return str(self.root / path)

    def text(self, path: str) -> str:
        return (self.root / path).read_text()


def _write_stub(path: Path, does: str) -> None:
    path.write_text(
        f'#!{shutil.which("bash")}\nPATH={os.defpath}:$PATH\necho "{path.name} $*" >> "$SANDBOX/calls"\n{does}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _bundle(folder: Path) -> bytes:
    folder.mkdir()
    write_wheel(folder, "click-8.4.0-py3-none-any.whl")
    write_wheel(folder, AGENT_WHEEL, "click")
    (folder / "neuron-tools_2.4.1_amd64.deb").write_text("a package of the system")
    return Bundle.of(folder, SystemSoftware(python="3.12", glibc="2.39")).data
