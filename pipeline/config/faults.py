"""What is wrong with a configuration, said once for each fault: where, what was found, what is allowed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

# A place in the document, as in ("models", 1, "buckets", 2).
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Finding:
    """A fault as a rule reports it, which knows the key but not the file or the line."""

    path: KeyPath
    found: str
    allowed: str
    nearest: str | None = None


@dataclass(frozen=True)
class Fault:
    """One fault. Its string is one line that a person can act on."""

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
    """The configuration cannot be used; holds every fault that it has, in the order of the file."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0)))
        self.lines = tuple(map(str, self.faults))
        super().__init__("\n".join(self.lines))
