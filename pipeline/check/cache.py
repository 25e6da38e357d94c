"""Examinations that were made before, by key, in the user's cache folder.

An entry holds its own digest: one that was cut short, edited or written by another version counts as absent and is
written again. The folder keeps the entries that were used last.
"""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from nxpipe.pipeline.check.report import Examination
from nxpipe.pipeline.util.files import MiB, cache_folder, json_of, read_file

_MOST_ENTRIES = 512


def lookup(key: str) -> Examination | None:
    try:
        path = _folder() / f"{key}.json"
        document = json_of(read_file(path, limit=64 * MiB))
        if document["digest"] != _digest(key, document["examination"]):
            return None
        found = Examination.from_json(document["examination"])
        path.touch()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whatever is wrong with an entry, the examination can be made again
    return found


def keep(key: str, examination: Examination) -> None:
    """Written whole or not at all. A folder that cannot be written costs time on the next run, and nothing else."""
    body = examination.as_json()
    document = json.dumps({"digest": _digest(key, body), "examination": body})
    with suppress(OSError):
        folder = _folder()
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(document)
        Path(temporary).replace(folder / f"{key}.json")
        _forget_the_oldest(folder)


def _forget_the_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) > _MOST_ENTRIES:
        entries.sort(key=lambda path: path.stat().st_mtime)
        for path in entries[: len(entries) - _MOST_ENTRIES]:
            path.unlink(missing_ok=True)


def _digest(key: str, body: object) -> str:
    return hashlib.sha256(f"{key}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()


def _folder() -> Path:
    return cache_folder() / "checks"
