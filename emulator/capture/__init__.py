"""From a model's configuration to a graph: torch.export on fake tensors, no weights, seconds.

Importing this package is light; torch and transformers are loaded by the first call that needs them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from emulator.capture.inputs import example_inputs
from emulator.capture.request import TASKS, CaptureRequest
from emulator.errors import CaptureError
from emulator.graph import Graph
from emulator.numerics import Array
from emulator.types import TensorType

# transformers reads this when it is imported: whatever else is installed, it takes no kernel from the hub. What
# computes a model is the compiler's choice, and nothing is fetched but what a command names.
os.environ["USE_HUB_KERNELS"] = "NO"

__all__ = [
    "TASKS",
    "CaptureRequest",
    "capture",
    "capture_file",
    "data_files",
    "example_inputs",
    "file_outputs",
    "file_parameters",
    "open_axes",
    "parameter_specs",
    "reference_outputs",
]


def capture(request: CaptureRequest) -> Graph:
    """The graph of the model that `request` describes, traced in the model's own class."""
    from emulator.capture.export import capture_model

    return capture_model(request)


def capture_file(path: Path, sizes: Mapping[str, int] | None = None) -> Graph:
    """The graph of a saved program: a `.pt2` of torch.export, or an ONNX file, whose open axes `sizes` fixes."""
    if path.suffix == ".onnx":
        from emulator.capture.onnx import capture_onnx

        return capture_onnx(path, sizes)
    if path.suffix == ".pt2":
        from emulator.capture.exported import capture_exported

        return capture_exported(path)
    raise CaptureError(f"{path.name} is neither a .pt2 nor an .onnx file")


def data_files(path: Path) -> dict[str, int]:
    """The files of weights beside a saved program, by name, and the bytes that each must have at least."""
    if path.suffix != ".onnx":
        return {}
    from emulator.capture.onnx import onnx_data_files

    return onnx_data_files(path)


def open_axes(path: Path) -> tuple[str, ...]:
    """The axes that a saved program leaves open, by name; a `.pt2` has none."""
    if path.suffix != ".onnx":
        return ()
    from emulator.capture.onnx import onnx_open_axes

    return onnx_open_axes(path)


def file_parameters(path: Path) -> dict[str, Array]:
    """The weights in a saved program, by the names that they have in its graph."""
    if path.suffix == ".onnx":
        from emulator.capture.onnx import onnx_parameters

        return onnx_parameters(path)
    from emulator.capture.exported import exported_parameters

    return exported_parameters(path)


def file_outputs(path: Path, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What the makers' own interpreter computes with a saved program: PyTorch, or ONNX's reference evaluator.

    `graph` is what `capture_file` made of the file, for the names of its results.
    """
    if path.suffix == ".onnx":
        from emulator.capture.onnx import run_onnx

        return run_onnx(path, inputs)
    from emulator.capture.exported import run_exported

    return run_exported(path, graph, inputs)


def parameter_specs(request: CaptureRequest) -> dict[str, TensorType]:
    """The types of the model's weights by their names in its checkpoint; tied weights appear once."""
    from emulator.capture.model import weight_types

    return weight_types(request)


def reference_outputs(
    request: CaptureRequest, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """What PyTorch itself computes, eager and in float32, on these weights and inputs: the oracle of `verify`."""
    from emulator.capture.reference import run_eagerly

    return run_eagerly(request, parameters, inputs)
