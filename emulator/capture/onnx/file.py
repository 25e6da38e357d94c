"""An ONNX file, read: the model, within the limits, and the numbers of its tensors."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from nxpipe.emulator.capture.onnx.base import SMALL
from nxpipe.emulator.capture.onnx.elementwise import dtype_of
from nxpipe.emulator.capture.onnx.external import DataFolder, tensors_of
from nxpipe.emulator.capture.onnx.limits import FILE_BYTES, FILE_NAMES, FILE_NODES, BeyondLimit
from nxpipe.emulator.capture.onnx.wire import require_few_parts
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import TensorType, is_reasonable
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.regular_file import open_regular


def loaded(path: Path) -> Any:
    """The model without the data beside it, which may be large."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= FILE_BYTES else b""
    except OSError as fault:
        raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if size > FILE_BYTES:
        raise BeyondLimit(path.name, "has {} bytes", size, FILE_BYTES, "save its weights in a file of data beside it")
    require_few_parts(data, path.name)
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as fault:  # protobuf's own errors differ with its implementation
        raise CaptureError(f"{path.name} is truncated, or no ONNX model: {sentence(fault)}") from fault
    if not model.graph.node and not model.graph.output:
        raise CaptureError(f"{path.name} holds no ONNX graph")
    require_bounded(model, path.name)
    return model


def require_bounded(model: Any, name: str) -> None:
    """Nodes, and what they name, in all graphs and functions of the file."""
    nodes = names = 0
    waiting = [model.graph, *model.functions]
    while waiting:
        body = waiting.pop()
        nodes += len(body.node)
        if nodes > FILE_NODES:
            raise BeyondLimit(name, "has at least {} nodes", nodes, FILE_NODES, "export the model in smaller parts")
        for node in body.node:
            names += len(node.input) + len(node.output) + len(node.attribute)
            for attribute in node.attribute:
                waiting.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
    if names > FILE_NAMES:
        way_out = "export the model in smaller parts"
        raise BeyondLimit(name, "has {} operands, results and attributes", names, FILE_NAMES, way_out)


def sentence(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__


def parameters(path: Path) -> dict[str, Array]:
    """The weights among initialisers, by name, floats as float32: those of bodies of loops and branches too."""
    model = loaded(path)
    folder = DataFolder(path.parent, path.name)
    every = (tensor for body in graphs_of(model) for tensor in body.initializer)
    return {tensor.name: numbers(tensor, folder) for tensor in every if is_weight(tensor)}


def graphs_of(model: Any) -> list[Any]:
    """The graph and the bodies in it; functions have no initialisers."""
    found = [model.graph]
    for body in found:  # grows while it is read
        for attribute in (attribute for node in body.node for attribute in node.attribute):
            found.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
    return found


def type_of(tensor: Any) -> TensorType:
    """NotExpressible if the hardware has no such elements."""
    type_ = TensorType(tuple(tensor.dims), dtype_of(tensor.data_type))
    if any(size < 0 for size in type_.shape) or not is_reasonable(type_):
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: no tensor has the shape {list(tensor.dims)}")
    return type_


def is_parameter(type_: TensorType) -> bool:
    """Weights are parameters; small tables of integers, and single numbers, are part of the program."""
    return type_.elements > 1 and (type_.dtype.is_float or type_.elements > SMALL)


def is_weight(tensor: Any) -> bool:
    """Whether it is a parameter wherever it is used; what the hardware has no elements for is said there."""
    try:
        return is_parameter(type_of(tensor))
    except NotExpressible:
        return False


def numbers(tensor: Any, folder: DataFolder) -> Array:
    whole, type_ = folder.embedded(tensor), type_of(tensor)
    try:
        array = onnx.numpy_helper.to_array(whole)
    except Exception as fault:  # a damaged tensor
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: {sentence(fault)}") from fault
    return np.asarray(array, np.float32) if type_.dtype.is_float else array


def with_data(path: Path) -> Any:
    """The model with all of its data in it, so that nothing that works with it opens a file."""
    model = loaded(path)
    folder = DataFolder(path.parent, path.name)
    folder.files(model)
    for tensor in tensors_of(model):
        whole = folder.embedded(tensor)
        if whole is not tensor:
            tensor.CopyFrom(whole)
    return model


def open_axes(path: Path) -> tuple[str, ...]:
    """The axes that a file leaves open, by name."""
    model = loaded(path)
    initialised = {tensor.name for tensor in model.graph.initializer}
    shapes = [
        declared.type.tensor_type.shape
        for declared in model.graph.input
        if declared.name not in initialised and declared.type.WhichOneof("value") == "tensor_type"
    ]
    names = [dim.dim_param for shape in shapes for dim in shape.dim if dim.WhichOneof("value") == "dim_param"]
    return tuple(dict.fromkeys(name for name in names if name))
