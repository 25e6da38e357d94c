"""Reference outputs of ONNX files by the evaluator of the onnx package, written for clarity in numpy."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from nxpipe.emulator.capture.onnx.file import with_data
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.numerics import Array


def evaluate(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name, floats as float32."""
    try:
        model = with_data(path)  # onnx itself opens no file
        evaluator = ReferenceEvaluator(model)
        kinds = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
        given = {
            name: array.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[name])) for name, array in inputs.items()
        }
        with np.errstate(all="ignore"):
            results = evaluator.run(None, given)
    except (CompileError, MemoryError):
        raise
    except Exception as fault:  # its operators raise whatever numpy does
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise CaptureError(f"ONNX's reference evaluator cannot run {path.name}: {reason}") from fault
    return {one.name: _plain(result) for one, result in zip(model.graph.output, results, strict=True)}


def _plain(result: Array) -> Array:
    array = np.asarray(result)
    exact = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    return array if exact else array.astype(np.float32)
