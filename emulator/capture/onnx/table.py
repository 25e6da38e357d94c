"""The table of all operators, a file for each family; importing them fills it."""

from emulator.capture.onnx import elementwise, index, linalg, quantise, reduce, resize, shape, window  # noqa: F401
from emulator.capture.onnx.base import IMPORTERS

__all__ = ["IMPORTERS"]
