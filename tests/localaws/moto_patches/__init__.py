"""What moto's services do otherwise than AWS, where it matters to us, put right: a file for each service.

`DIVERGENCES.md` lists them, and those that are left.
"""

from importlib import import_module
from pathlib import Path


def apply_all() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__name__}.{path.stem}").mend()
