"""Providers of the types of resources that the local AWS deploys. Importing a module registers its types."""

from importlib import import_module
from pathlib import Path


def know_all() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__name__}.{path.stem}")
