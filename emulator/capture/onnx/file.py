"""ONNX file as read: the model within its limits, its tensors, and the checks on names of values.

Each name is defined once, before its use. An omitted operand is an empty name; a name that nothing defines is a fault
of the file and never an omitted operand: otherwise a bias, or a bound, would silently drop out of the program.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from nxpipe.emulator.capture.onnx.base import SMALL, dtype_of
from nxpipe.emulator.capture.onnx.external import DataFolder, tensors_of
from nxpipe.emulator.capture.onnx.limits import (
    FILE_BYTES,
    FILE_NAMES,
    FILE_NODES,
    NAME_CHARACTERS,
    BeyondLimit,
    require_few_fields,
)
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.ir.types import TensorType, is_reasonable
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.regular_file import open_regular


def load_model(path: Path) -> Any:
    """The model without the data beside it, which may be large."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= FILE_BYTES else b""
    except OSError as fault:
        raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if size > FILE_BYTES:
        raise BeyondLimit(path.name, "has {} bytes", size, FILE_BYTES, "save its weights in a file of data beside it")
    require_few_fields(data, path.name)
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as fault:  # protobuf's own errors differ with its implementation
        raise CaptureError(f"{path.name} is truncated, or no ONNX model: {error_text(fault)}") from fault
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


def error_text(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__


def parameters(path: Path) -> dict[str, Array]:
    """The weights among initialisers, by name, floats as float32: those of bodies of loops and branches too."""
    model = load_model(path)
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
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: {error_text(fault)}") from fault
    return np.asarray(array, np.float32) if type_.dtype.is_float else array


def load_with_data(path: Path) -> Any:
    """The model with all of its data in it, so that nothing that works with it opens a file."""
    model = load_model(path)
    folder = DataFolder(path.parent, path.name)
    folder.files(model)
    for tensor in tensors_of(model):
        whole = folder.embedded(tensor)
        if whole is not tensor:
            tensor.CopyFrom(whole)
    return model


def open_axes(path: Path) -> tuple[str, ...]:
    """The axes that a file leaves open, by name."""
    model = load_model(path)
    initialised = {tensor.name for tensor in model.graph.initializer}
    shapes = [
        declared.type.tensor_type.shape
        for declared in model.graph.input
        if declared.name not in initialised and declared.type.WhichOneof("value") == "tensor_type"
    ]
    names = [dim.dim_param for shape in shapes for dim in shape.dim if dim.WhichOneof("value") == "dim_param"]
    return tuple(dict.fromkeys(name for name in names if name))


_Key = tuple[str, str, str]


class Malformed(CaptureError):
    """A rule of the format is broken that makes the model mean nothing, or two things."""


def function_key(node_or_function: Any, name: str) -> _Key:
    """What calls and functions are matched by; the standard's own domain has two spellings."""
    domain = "" if node_or_function.domain == "ai.onnx" else node_or_function.domain
    return domain, name, node_or_function.overload


def require_valid_names(model: Any, name: str) -> None:
    _Names(name).walk(model.graph, (), name)
    functions: dict[_Key, Any] = {}
    for function in model.functions:
        key = function_key(function, function.name)
        if key in functions:
            raise Malformed(f"{name} has two functions {_title(key)}; give each a name of its own")
        functions[key] = function
        _Names(name).walk(function, (), f"function {_title(key)} of {name}")
    _require_no_recursion(functions, name)


def _title(key: _Key) -> str:
    return ".".join(part for part in key if part)


class _Names:
    """The walk over one graph, or one function, and the bodies in it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parameters: set[str] = set()

    def walk(self, body: Any, around: Sequence[set[str]], place: str) -> None:
        own = self._given(body, around, place)
        scopes = (own, *around)
        for number, node in enumerate(body.node):
            for word in (node.op_type, node.domain, node.name):
                if len(word) > NAME_CHARACTERS:
                    raise BeyondLimit(
                        self._name, "has a name of {} characters", len(word), NAME_CHARACTERS, "rename it"
                    )
            where = f"{place}:{node.op_type} {number}"
            for operand in node.input:
                if operand and not any(operand in scope for scope in scopes):
                    raise Malformed(f"{where} reads {operand!r}, {_why_unknown(body, number, operand)}")
            for inner in _bodies(node):
                self.walk(inner, scopes, where)
            for result in filter(None, node.output):
                self._define(result, own, around, where)
        for output in body.output:
            result = output if isinstance(output, str) else output.name
            if not any(result in scope for scope in scopes):
                raise Malformed(f"output {result!r} of {place} is made by no node; remove it, or export it again")

    def _given(self, body: Any, around: Sequence[set[str]], place: str) -> set[str]:
        """Inputs and initialisers; an input may have an initialiser of its name, as older files have them."""
        own: set[str] = set()
        for declared in body.input:
            self._define(declared if isinstance(declared, str) else declared.name, own, around, place)
        inputs = set(own)
        for tensor in getattr(body, "initializer", ()):
            if tensor.name in inputs:
                inputs.remove(tensor.name)
            else:
                self._define(tensor.name, own, around, place)
            self._require_one_of_its_name(tensor)
        if getattr(body, "sparse_initializer", ()):
            raise Malformed(f"{place} holds sparse initialisers; save them as dense ones")
        return own

    def _define(self, word: str, own: set[str], around: Sequence[set[str]], where: str) -> None:
        if not word:
            raise Malformed(f"{where} has an input or initialiser without a name; export it again")
        if word in own or any(word in scope for scope in around):
            raise Malformed(f"{where} makes {word!r}, which was made before; each value needs a name of its own")
        own.add(word)

    def _require_one_of_its_name(self, tensor: Any) -> None:
        """Weights are found by name alone, wherever in the file they stand."""
        if not is_weight(tensor):
            return
        if tensor.name in self._parameters:
            raise Malformed(f"{self._name} has two initialisers {tensor.name!r}; give each a name of its own")
        self._parameters.add(tensor.name)


def _why_unknown(body: Any, number: int, operand: str) -> str:
    for later, node in enumerate(body.node[number:], number):
        if operand in node.output:
            itself = "this node itself makes" if later == number else f"node {later} makes, which comes after it"
            return f"which {itself}; sort the nodes, or break the cycle"
    return "which nothing makes; export the model again"


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _calls(function: Any, functions: dict[_Key, Any]) -> set[_Key]:
    """The functions that a function calls, from bodies inside it too."""
    found, waiting = set(), [function]
    while waiting:
        for node in waiting.pop().node:
            key = function_key(node, node.op_type)
            if key in functions:
                found.add(key)
            waiting.extend(_bodies(node))
    return found


def _require_no_recursion(functions: dict[_Key, Any], name: str) -> None:
    """Functions are taken away whose calls all are of such as were taken away; what is left calls itself."""
    left = {key: _calls(function, functions) for key, function in functions.items()}
    callers: dict[_Key, list[_Key]] = {key: [] for key in left}
    for key, calls in left.items():
        for called in calls:
            callers[called].append(key)
    open_calls = {key: len(calls) for key, calls in left.items()}
    free = [key for key, count in open_calls.items() if not count]
    for key in free:  # grows while it is read
        for caller in callers[key]:
            open_calls[caller] -= 1
            if not open_calls[caller]:
                free.append(caller)
    circle = sorted(_title(key) for key, count in open_calls.items() if count)
    if circle:
        raise Malformed(
            f"{name}: function {circle[0]} calls itself, by {len(circle)} functions that call each other; "
            "write it as a Loop"
        )


def evaluate(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name, floats as float32."""
    try:
        model = load_with_data(path)  # onnx itself opens no file
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
