"""How PyTorch's operators become ours, a file for each family; importing them fills the table."""

from emulator.capture.aten import elementwise, index, linalg, make, normalise, reduce, resample, scatter, shape, window  # noqa: F401
from emulator.capture.aten.base import NotExpressible, Site, importer_of, is_known, states_a_fact
from emulator.capture.aten.complex import Complex, complex_importer_of

__all__ = [
    "Complex",
    "NotExpressible",
    "Site",
    "complex_importer_of",
    "importer_of",
    "is_known",
    "states_a_fact",
]
