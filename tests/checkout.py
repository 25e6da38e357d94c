"""A copy of the checkout's packages, for tests that change one or run it elsewhere."""

import shutil
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

PACKAGES: Final = ("artifact_store", "emulator", "pipeline", "stacks")


def copy_packages(target: Path) -> None:
    """Copy the four packages of the repository and `nxpipe/`, which links to them."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("nxpipe", *PACKAGES):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
