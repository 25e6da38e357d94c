"""Patches of moto where it differs from AWS in a way that matters to this project; one file for each service.

`DIVERGENCES.md` lists them, and the differences that are left.
"""

from importlib import import_module
from pathlib import Path


def apply_all() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__name__}.{path.stem}").apply()
