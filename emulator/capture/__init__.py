"""Capture: from a model's configuration to a graph by torch.export on fake tensors, without weights, in seconds."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxpipe.emulator.capture.dispatch import call_for_file, call_for_folder, call_for_model
from nxpipe.emulator.capture.request import TASKS, CaptureRequest
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.inputs import example_inputs

# transformers reads this variable at import: it then never downloads kernels from the hub. Only the compiler chooses
# implementations, and nothing is downloaded that a command does not name.
os.environ["USE_HUB_KERNELS"] = "NO"

__all__ = [
    "TASKS",
    "CaptureRequest",
    "capture",
    "capture_file",
    "data_files",
    "dynamic_axes",
    "example_inputs",
    "file_outputs",
    "file_parameters",
    "parameter_specs",
    "reference_outputs",
    "token_ids",
]


def capture(request: CaptureRequest) -> Graph:
    """The graph of the requested model, exported from its own model class."""
    return call_for_model(Graph, "capture", request)


def capture_file(path: Path, sizes: Mapping[str, int] | None = None) -> Graph:
    """The graph of a saved program: a `.pt2` of torch.export, or an ONNX file; `sizes` fixes its dynamic axes by
    name."""
    if path.suffix == ".onnx":
        return call_for_file(Graph, "capture_onnx", path, dict(sizes or {}))
    if path.suffix == ".pt2":
        return call_for_file(Graph, "capture_pt2", path)
    raise CaptureError(f"{path.name} is neither a .pt2 nor an .onnx file")


def data_files(path: Path) -> dict[str, int]:
    """The external data files of a saved program: name to minimum size in bytes."""
    return call_for_file(dict, "data_onnx", path) if path.suffix == ".onnx" else {}


def dynamic_axes(path: Path) -> tuple[str, ...]:
    """The names of a saved program's dynamic axes; a `.pt2` has none."""
    return call_for_file(tuple, "axes_onnx", path) if path.suffix == ".onnx" else ()


def file_parameters(path: Path) -> dict[str, Array]:
    """The weights of a saved program, by their names in its graph."""
    return call_for_file(dict, "parameters_onnx" if path.suffix == ".onnx" else "parameters_pt2", path)


def file_outputs(path: Path, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a saved program, computed by PyTorch or by ONNX's reference evaluator.

    `graph` is the result of `capture_file`, for the names of the outputs.
    """
    if path.suffix == ".onnx":
        return call_for_file(dict, "outputs_onnx", path, dict(inputs))
    return call_for_file(dict, "outputs_pt2", path, graph, dict(inputs))


def parameter_specs(request: CaptureRequest) -> dict[str, TensorType]:
    """The types of the model's weights by their names in its checkpoint; tied weights appear once."""
    return call_for_model(dict, "parameter_specs", request)


def token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, with special tokens, by the tokenizer in a model's folder."""
    return call_for_folder(list, "token_ids", folder, list(texts))


def reference_outputs(
    request: CaptureRequest, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """The outputs of PyTorch in eager mode and float32 on these weights and inputs: the reference of `verify`."""
    from nxpipe.emulator.capture.reference import run_eagerly

    return run_eagerly(request, parameters, inputs)
