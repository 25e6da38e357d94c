"""Faults of a configuration: file and line, the value found, the values allowed, the nearest valid spelling."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

# The path of a key in the document, as in ("models", 1, "buckets", 2).
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Violation:
    """A broken rule: the key, the value found and the values allowed, without file and line."""

    path: KeyPath
    found: str
    allowed: str
    nearest: str | None = None


@dataclass(frozen=True)
class Fault:
    """A violation with its file and line; `str` gives one line: place, found, expected."""

    file: str
    line: int | None
    key: str
    found: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        subject = f"{place}: {self.key}" if self.key else place
        guess = f'; did you mean "{self.nearest}"?' if self.nearest else ""
        return f"{subject}: found {self.found}; expected {self.allowed}{guess}"


class ConfigInvalid(Exception):
    """An invalid configuration, with all of its faults in the order of the file."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0)))
        self.lines = tuple(map(str, self.faults))
        super().__init__("\n".join(self.lines))
