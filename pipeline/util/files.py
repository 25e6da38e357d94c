"""Folders of the user: where the home is, and what is kept below it. A container may run under a uid that has none."""

import json
import os
import re
import secrets
import tomllib
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.regular_file import open_regular


class NoHome(OSError):
    """Neither HOME nor the system says where the user's files are; what is only kept to save time is done without."""


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise NoHome("no home folder is known; set HOME") from error


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "nxpipe"


def user_state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state") / "nxpipe"


def log_folder() -> Path:
    return user_state_folder() / "logs"


def expanded(path: str | Path) -> Path:
    """`~` and `~USER` as a shell takes them: where no such home is known, they are the name of a file."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of Path raises for an unknown user


NAME: Final = ".nxpipe"


def state_folder(config_path: Path) -> Path:
    return config_path.parent / NAME


def write_whole(path: Path, data: bytes) -> None:
    """Its folder is made if need be. Several may write at once, and the last one stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


MiB: Final = 1 << 20

_DEEPEST: Final = 100  # Python's own readers, and all that walks a document here, call themselves once a level
_MOST_PARTS: Final = 2_000_000  # each takes some 100 bytes of memory, where it may have had two in the file
_LARGEST_TOML: Final = 4 * MiB
_MOST_KEY_PARTS: Final = 32  # the readers of TOML take time and memory by the square of them
_WORD: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED: Final = re.compile(rf"{_WORD}(?:[ \t]*\.[ \t]*{_WORD})*+")


class DocumentInvalid(ValueError):
    """What is read is no such document, or beyond the limits. `lineno` is the line at fault where one is."""

    def __init__(self, message: str, lineno: int | None = None) -> None:
        super().__init__(message)
        self.lineno = lineno


class NotJson(DocumentInvalid):
    """What is read is no JSON at all, so it may be text."""


def read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file; OSError of anything else, so that no FIFO is waited for, and no device read."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DocumentInvalid(f"more than {limit:,} bytes, the most that such a file may have")
    return data


def json_of(data: bytes | str) -> Any:
    """The value of a JSON text, of limited depth and number of parts."""
    encoded = data.encode(errors="replace") if isinstance(data, str) else data
    if (parts := sum(encoded.count(mark) for mark in (b"[", b"{", b","))) > _MOST_PARTS:
        raise DocumentInvalid(f"JSON of {parts:,} parts, and at most {_MOST_PARTS:,} are read")
    try:
        value: object = json.loads(data)
    except json.JSONDecodeError as error:
        raise NotJson(f"not valid JSON ({error})", error.lineno) from None
    except UnicodeDecodeError as error:
        raise DocumentInvalid(f"not valid JSON ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise _too_deep("JSON") from None
    except ValueError:  # Python reads no integer of more digits
        raise DocumentInvalid("JSON with an integer of more than 4,300 digits") from None
    _require_flat(value)
    return value


def _require_flat(value: object) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        holders = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for parts in holders for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep("JSON")


def toml_of(text: str) -> dict[str, Any]:
    """The document of a TOML text; what is no TOML is `tomllib.TOMLDecodeError`, a ValueError too."""
    if len(text) > _LARGEST_TOML:
        raise DocumentInvalid(f"TOML of {len(text):,} characters, and at most {_LARGEST_TOML:,} are read")
    for key in _DOTTED.finditer(text):
        if key[0].count(".") >= _MOST_KEY_PARTS and len(re.findall(_WORD, key[0])) > _MOST_KEY_PARTS:
            line = text.count("\n", 0, key.start()) + 1
            raise DocumentInvalid(f"a dotted key of more than {_MOST_KEY_PARTS} parts", line)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep("TOML") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no integer of more digits
        at = next((n for n, row in enumerate(text.splitlines(), 1) if re.search("[0-9_]{4300}", row)), None)
        raise DocumentInvalid("a number of thousands of digits", at) from None


def _too_deep(what: str) -> DocumentInvalid:
    return DocumentInvalid(f"{what} nested hundreds deep")
