"""ATen importers: one module per operator family; importing a module registers its importers."""

from nxpipe.emulator.capture.aten import contraction, elementwise, movement, reduce  # noqa: F401
from nxpipe.emulator.capture.aten.base import (
    Complex,
    NotExpressible,
    Site,
    complex_importer_of,
    importer_of,
    is_assertion,
    is_known,
)

__all__ = [
    "Complex",
    "NotExpressible",
    "Site",
    "complex_importer_of",
    "importer_of",
    "is_assertion",
    "is_known",
]
