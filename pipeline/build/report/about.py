"""What a build was made with, as far as it helps to understand its figures. Nothing says whose machine it was."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.request import LIBRARIES, compiler_digest
from nxpipe.pipeline.util.process import processors


@dataclass(frozen=True)
class About:
    """The machine of the driver, and versions by name; of the compiler it is the digest of its source."""

    cores: int
    memory: int
    system: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Self:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(processors(), memory, f"{platform.system()} {platform.machine()}", _versions())


def _versions() -> dict[str, str]:
    own = {"nxpipe": VERSION, "compiler": compiler_digest(), "python": platform.python_version()}
    return own | {name: found for name in LIBRARIES if (found := _installed(name))}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""  # who hands cells to others need not have it
