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

from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.util.files import MiB, cache_folder, json_of, read_file

_SETTLED_SECONDS = 2.0


def sha256_of_file(path: Path) -> str:
    """The digest of the file as it is now."""
    stamp = _stamp(path)
    with suppress(OSError, ValueError, KeyError, TypeError):  # no memory, or a damaged one: hash the file
        remembered = json_of(read_file(_memory_of(path), limit=MiB))
        if remembered["stamp"] == stamp:
            return str(remembered["sha256"])
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp == _stamp(path) and time.time() - path.stat().st_mtime > _SETTLED_SECONDS:
        _remember(path, {"stamp": stamp, "sha256": digest})
    return digest


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _memory_of(path: Path) -> Path:
    return cache_folder() / "digests" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _remember(path: Path, value: dict[str, object]) -> None:
    """Best effort: a cache that cannot be written only costs time."""
    with suppress(OSError):
        memory = _memory_of(path)
        memory.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
        memory.parent.mkdir(0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=memory.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        Path(temporary).replace(memory)
