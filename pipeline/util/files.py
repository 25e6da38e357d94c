"""Files: the folders of the user and the project, atomic writes, and reads of untrusted documents within limits.

`read_file` reads every file that a user names, `json_of` every JSON text, `toml_of` every TOML text. The message of
`DocumentInvalid` (a ValueError) is one sentence without the origin of the document, which the caller adds.
"""

import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.regular_file import open_regular


class NoHome(OSError):
    """The user has no home folder, as in a container with an unknown uid. Callers then work without caches."""


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise NoHome("there is no home folder; set HOME") from error


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "nxpipe"


def user_state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state") / "nxpipe"


def log_folder() -> Path:
    return user_state_folder() / "logs"


def expanded(path: str | Path) -> Path:
    """The path with `~` and `~USER` expanded as a shell does; an unknown user stays literal."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of Path raises for an unknown user


NAME: Final = ".nxpipe"


def state_folder(config_path: Path) -> Path:
    return config_path.parent / NAME


def write_whole(path: Path, data: bytes) -> None:
    """Write atomically: readers see the old bytes or the new bytes. Creates the folder; the last writer wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class FileChange:
    """One file before (None: absent) and after. Bytes that are not UTF-8 survive in both."""

    root: Path
    name: str
    before: str | None
    after: str
    amends: bool = False  # extends a file that may exist; any other change creates a file

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def replaces(self) -> bool:
        return self.before is not None and not self.amends


def write_changes(changes: Sequence[FileChange]) -> None:
    """Apply all changes, or restore the folder."""
    with ExitStack() as undo, ExitStack() as staging:
        staged = [(change, _stage(change, undo, staging)) for change in changes]
        for change, file in staged:
            undo.callback(_restore, change)
            file.replace(change.path)
        undo.pop_all()  # success: nothing is undone


def _stage(change: FileChange, undo: ExitStack, staging: ExitStack) -> Path:
    """Write the new text beside its destination: a full disk fails before any file changes."""
    for folder in _missing_folders(change.path.parent):
        folder.mkdir()
        undo.callback(folder.rmdir)
    file = change.path.with_name(f".{change.path.name}.{os.getpid()}.new")
    file.touch(exist_ok=False)  # never through an existing link
    staging.callback(file.unlink, missing_ok=True)
    file.write_bytes(change.after.encode("utf-8", "surrogateescape"))
    return file


def _missing_folders(folder: Path) -> Iterator[Path]:
    """The folders that do not exist, the outermost first."""
    if not folder.exists():
        yield from _missing_folders(folder.parent)
        yield folder


def _restore(change: FileChange) -> None:
    if change.before is None:
        change.path.unlink(missing_ok=True)
    else:
        change.path.write_bytes(change.before.encode("utf-8", "surrogateescape"))


MiB: Final = 1 << 20

_DEPTH_LIMIT: Final = 100  # levels: parsers, and code that traverses documents, recurse once per level
_PARTS_LIMIT: Final = 2_000_000  # each takes about 100 bytes of memory, and two or more in the file
_LARGEST_TOML: Final = 4 * MiB
_KEY_PARTS_LIMIT: Final = 32  # tomllib takes quadratic time and memory in the parts of a dotted key
_WORD: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED: Final = re.compile(rf"{_WORD}(?:[ \t]*\.[ \t]*{_WORD})*+")


class DocumentInvalid(ValueError):
    """A malformed document, or one beyond the limits. `lineno` is the line at fault, if known."""

    def __init__(self, message: str, lineno: int | None = None) -> None:
        super().__init__(message)
        self.lineno = lineno


class NotJson(DocumentInvalid):
    """The text is not JSON."""


def read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; OSError for a FIFO, a device or a folder."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DocumentInvalid(f"more than {limit:,} bytes, the limit for such a file")
    return data


def json_of(data: bytes | str, *, parts: int = _PARTS_LIMIT) -> Any:
    """The value of a JSON text of limited depth and number of parts."""
    encoded = data.encode(errors="replace") if isinstance(data, str) else data
    if (count := sum(encoded.count(mark) for mark in (b"[", b"{", b","))) > parts:
        raise DocumentInvalid(f"JSON of {count:,} parts; the limit is {parts:,}")
    try:
        value: object = json.loads(data)
    except json.JSONDecodeError as error:
        raise NotJson(f"not valid JSON ({error})", error.lineno) from None
    except UnicodeDecodeError as error:
        raise DocumentInvalid(f"not valid JSON ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise _too_deep("JSON") from None
    except ValueError:  # Python limits integers to 4,300 digits
        raise DocumentInvalid("JSON with an integer of more than 4,300 digits") from None
    _require_flat(value)
    return value


def _require_flat(value: object) -> None:
    level = [value]
    for _ in range(_DEPTH_LIMIT):
        containers = (
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level = [item for items in containers for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep("JSON")


def toml_of(text: str) -> dict[str, Any]:
    """The document of a TOML text of limited size; raises `DocumentInvalid` or `tomllib.TOMLDecodeError`."""
    if len(text) > _LARGEST_TOML:
        raise DocumentInvalid(f"TOML of {len(text):,} characters; the limit is {_LARGEST_TOML:,}")
    for key in _DOTTED.finditer(text):
        if key[0].count(".") >= _KEY_PARTS_LIMIT and len(re.findall(_WORD, key[0])) > _KEY_PARTS_LIMIT:
            line = text.count("\n", 0, key.start()) + 1
            raise DocumentInvalid(f"a dotted key of more than {_KEY_PARTS_LIMIT} parts", line)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep("TOML") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python limits integers to 4,300 digits
        lines = enumerate(text.splitlines(), 1)
        position = next((number for number, line in lines if re.search("[0-9_]{4300}", line)), None)
        raise DocumentInvalid("a number of more than 4,300 digits", position) from None


def _too_deep(format_name: str) -> DocumentInvalid:
    return DocumentInvalid(f"{format_name} nested deeper than the limit of {_DEPTH_LIMIT} levels")
