"""SHA-256 of large files, remembered between runs: a cached build must not read gigabytes to find nothing changed.

A memory is bound to device, inode, size and both times of the file, never to its size alone. A file that
changed within the last seconds is not remembered, because a later write could leave the same times.
"""

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_SETTLED_SECONDS = 2.0


def sha256_of_file(path: Path) -> str:
    """The digest of the file as it is now."""
    stamp = _stamp(path)
    memory = _memory_of(path)
    with suppress(OSError, ValueError):  # no memory, or a damaged one: hash the file
        remembered = json.loads(memory.read_text())
        if remembered["stamp"] == stamp:
            return str(remembered["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp == _stamp(path) and time.time() - path.stat().st_mtime > _SETTLED_SECONDS:
        _remember(memory, {"stamp": stamp, "sha256": digest})
    return digest


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _memory_of(path: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nxpipe" / "digests" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _remember(memory: Path, value: dict[str, object]) -> None:
    """Best effort: a cache that cannot be written only costs time."""
    with suppress(OSError):
        memory.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
        memory.parent.mkdir(0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=memory.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        Path(temporary).replace(memory)
