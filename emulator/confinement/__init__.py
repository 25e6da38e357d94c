"""Confinement: untrusted models are read by a process without credentials; docs/guides/security.md states its
permissions.

Captures inside `confined()` run in that process; elsewhere they run in this one, for libraries and tests. Importing
this package is light.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GIB: Final = 2**30


@dataclass(frozen=True)
class Limits:
    """What one model may take to be read. Without `memory` it is what the machine has."""

    memory: int | None = None  # bytes
    seconds: float = 7200.0  # for each question
    written: int = GIB  # bytes of one file, in a folder of its own that goes with it


@dataclass(frozen=True)
class ModelAccess:
    """What is read: its name, its kind where it is a configuration, and the files and folders that may be opened."""

    name: str
    kind: str = ""
    reads: tuple[Path, ...] = ()


_now: list[Limits] = []


@contextmanager
def confined(limits: Limits | None = None) -> Iterator[None]:
    """In here, and for the whole process, models are read elsewhere."""
    _now.append(limits or Limits())
    try:
        yield
    finally:
        _now.pop()


def active_limits() -> Limits | None:
    """The limits of the innermost `confined()`; None where models are read in this process.

    Forking a process with numerical libraries in it, and all that confines the copy, is Linux's.
    """
    return _now[-1] if _now and sys.platform == "linux" else None
