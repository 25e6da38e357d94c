"""Confinement: untrusted models are read by a process without credentials; docs/guides/security.md states its
permissions.

Captures inside `confined()` run in that process; other captures run in the calling process, for libraries and tests.
Importing this package loads no large library.
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
    """Resource limits for reading one model. Without `memory` the limit is the machine's memory."""

    memory: int | None = None  # bytes
    seconds: float = 7200.0  # for each call
    written: int = GIB  # bytes of one file in the scratch folder, which is deleted with the process


@dataclass(frozen=True)
class ModelAccess:
    """The model of a confined process: its name, its `model_type` (`kind`) if it is a configuration, and the files and
    folders that the process may read."""

    name: str
    kind: str = ""
    reads: tuple[Path, ...] = ()


_limits_stack: list[Limits] = []


@contextmanager
def confined(limits: Limits | None = None) -> Iterator[None]:
    """Read models in the confined process, for all threads, while the context is open."""
    _limits_stack.append(limits or Limits())
    try:
        yield
    finally:
        _limits_stack.pop()


def active_limits() -> Limits | None:
    """The limits of the innermost `confined()`; None where models are read in this process.

    Confinement needs Linux: a fork of a process with numerical libraries loaded, Landlock and prctl.
    """
    return _limits_stack[-1] if _limits_stack and sys.platform == "linux" else None
