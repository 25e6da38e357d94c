"""The table of all operators, a file for each family; importing them fills it."""

from nxpipe.emulator.capture.onnx import (  # noqa: F401
    elementwise,
    index,
    linalg,
    quantise,
    recurrent,
    reduce,
    resize,
    shape,
    spectral,
    window,
)
from nxpipe.emulator.capture.onnx.base import IMPORTERS

__all__ = ["IMPORTERS"]
