"""ONNX model file: loading within limits, tensors, validation of value names, and the reference evaluator.

Each value name must be defined once, before its use. An omitted operand has an empty name. An undefined name is an
error and never an omitted operand, because otherwise a bias or a bound would be dropped silently.
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
    """The model without its external data."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= FILE_BYTES else b""
    except OSError as fault:
        raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    if size > FILE_BYTES:
        raise BeyondLimit(path.name, "has {} bytes", size, FILE_BYTES, "save its weights as external data")
    require_few_fields(data, path.name)
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as fault:  # protobuf's exceptions differ between its implementations
        raise CaptureError(f"{path.name} is truncated, or is not an ONNX model: {error_text(fault)}") from fault
    if not model.graph.node and not model.graph.output:
        raise CaptureError(f"{path.name} has no ONNX graph")
    require_bounded(model, path.name)
    return model


def require_bounded(model: Any, name: str) -> None:
    """Check the numbers of nodes and of their names, in all graphs and functions of the file."""
    nodes = names = 0
    stack = [model.graph, *model.functions]
    while stack:
        body = stack.pop()
        nodes += len(body.node)
        if nodes > FILE_NODES:
            raise BeyondLimit(name, "has at least {} nodes", nodes, FILE_NODES, "export the model in smaller parts")
        for node in body.node:
            names += len(node.input) + len(node.output) + len(node.attribute)
            for attribute in node.attribute:
                stack.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
    if names > FILE_NAMES:
        remedy = "export the model in smaller parts"
        raise BeyondLimit(name, "has {} operands, results and attributes", names, FILE_NAMES, remedy)


def error_text(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__


def parameters(path: Path) -> dict[str, Array]:
    """The initialisers that are weights, by name, with floats as float32; those of loop and branch bodies too."""
    model = load_model(path)
    folder = DataFolder(path.parent, path.name)
    every = (tensor for body in graphs_of(model) for tensor in body.initializer)
    return {tensor.name: numbers(tensor, folder) for tensor in every if is_weight(tensor)}


def graphs_of(model: Any) -> list[Any]:
    """The graph and the bodies nested in it; functions have no initialisers."""
    bodies = [model.graph]
    for body in bodies:  # extended in the loop
        for attribute in (attribute for node in body.node for attribute in node.attribute):
            bodies.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
    return bodies


def type_of(tensor: Any) -> TensorType:
    """The type of an initialiser; NotExpressible if the hardware does not have its element type."""
    type_ = TensorType(tuple(tensor.dims), dtype_of(tensor.data_type))
    if any(size < 0 for size in type_.shape) or not is_reasonable(type_):
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: the shape {list(tensor.dims)} is invalid")
    return type_


def is_parameter(type_: TensorType) -> bool:
    """True if an initialiser is a parameter; small integer tables and single numbers are constants of the program."""
    return type_.elements > 1 and (type_.dtype.is_float or type_.elements > SMALL)


def is_weight(tensor: Any) -> bool:
    """True if an initialiser is a parameter; an unsupported element type is reported at its use."""
    try:
        return is_parameter(type_of(tensor))
    except NotExpressible:
        return False


def numbers(tensor: Any, folder: DataFolder) -> Array:
    embedded, type_ = folder.embedded(tensor), type_of(tensor)
    try:
        array = onnx.numpy_helper.to_array(embedded)
    except Exception as fault:  # a damaged tensor
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: {error_text(fault)}") from fault
    return np.asarray(array, np.float32) if type_.dtype.is_float else array


def load_with_data(path: Path) -> Any:
    """The model with its external data embedded, so that no consumer opens a file."""
    model = load_model(path)
    folder = DataFolder(path.parent, path.name)
    folder.files(model)
    for tensor in tensors_of(model):
        embedded = folder.embedded(tensor)
        if embedded is not tensor:
            tensor.CopyFrom(embedded)
    return model


def dynamic_axes(path: Path) -> tuple[str, ...]:
    """The names of the dynamic axes of a file's inputs."""
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
    """A violation of the format that makes the model's meaning undefined or ambiguous."""


def function_key(node_or_function: Any, name: str) -> _Key:
    """The key by which calls and functions are matched; the standard domain has two spellings."""
    domain = "" if node_or_function.domain == "ai.onnx" else node_or_function.domain
    return domain, name, node_or_function.overload


def require_valid_names(model: Any, name: str) -> None:
    """Raise Malformed for undefined or duplicate names, duplicate functions and recursion."""
    _Names(name).walk(model.graph, (), name)
    functions: dict[_Key, Any] = {}
    for function in model.functions:
        key = function_key(function, function.name)
        if key in functions:
            raise Malformed(f"{name} has two functions {_title(key)}; give each its own name")
        functions[key] = function
        _Names(name).walk(function, (), f"function {_title(key)} of {name}")
    _require_no_recursion(functions, name)


def _title(key: _Key) -> str:
    return ".".join(part for part in key if part)


class _Names:
    """The check of value names in one graph or function, and in its nested bodies."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parameters: set[str] = set()

    def walk(self, body: Any, outer: Sequence[set[str]], place: str) -> None:
        own = self._inputs(body, outer, place)
        scopes = (own, *outer)
        for number, node in enumerate(body.node):
            for text in (node.op_type, node.domain, node.name):
                if len(text) > NAME_CHARACTERS:
                    raise BeyondLimit(
                        self._name, "has a name of {} characters", len(text), NAME_CHARACTERS, "rename it"
                    )
            where = f"{place}:{node.op_type} {number}"
            for operand in node.input:
                if operand and not any(operand in scope for scope in scopes):
                    raise Malformed(f"{where} reads {operand!r}, {_why_unknown(body, number, operand)}")
            for inner in _bodies(node):
                self.walk(inner, scopes, where)
            for result in filter(None, node.output):
                self._define(result, own, outer, where)
        for output in body.output:
            result = output if isinstance(output, str) else output.name
            if not any(result in scope for scope in scopes):
                raise Malformed(
                    f"output {result!r} of {place} is not the result of any node; remove it, or export it again"
                )

    def _inputs(self, body: Any, outer: Sequence[set[str]], place: str) -> set[str]:
        """The names of inputs and initialisers; in older files an input may have an initialiser with its name."""
        own: set[str] = set()
        for declared in body.input:
            self._define(declared if isinstance(declared, str) else declared.name, own, outer, place)
        inputs = set(own)
        for tensor in getattr(body, "initializer", ()):
            if tensor.name in inputs:
                inputs.remove(tensor.name)
            else:
                self._define(tensor.name, own, outer, place)
            self._require_unique_weight(tensor)
        if getattr(body, "sparse_initializer", ()):
            raise Malformed(f"{place} has sparse initialisers; save them as dense ones")
        return own

    def _define(self, name: str, own: set[str], outer: Sequence[set[str]], where: str) -> None:
        if not name:
            raise Malformed(f"{where} has an input or initialiser without a name; export it again")
        if name in own or any(name in scope for scope in outer):
            raise Malformed(f"{where} defines {name!r}, which is already defined; give each value its own name")
        own.add(name)

    def _require_unique_weight(self, tensor: Any) -> None:
        """Raise Malformed for two weights of one name: weights of all bodies are looked up by name alone."""
        if not is_weight(tensor):
            return
        if tensor.name in self._parameters:
            raise Malformed(f"{self._name} has two initialisers {tensor.name!r}; give each its own name")
        self._parameters.add(tensor.name)


def _why_unknown(body: Any, number: int, operand: str) -> str:
    for later, node in enumerate(body.node[number:], number):
        if operand in node.output:
            definition = "this node itself" if later == number else f"node {later}, which comes after it,"
            return f"which {definition} defines; sort the nodes, or break the cycle"
    return "which is not defined; export the model again"


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _calls(function: Any, functions: dict[_Key, Any]) -> set[_Key]:
    """The functions that a function calls, also from its nested bodies."""
    called, stack = set(), [function]
    while stack:
        for node in stack.pop().node:
            key = function_key(node, node.op_type)
            if key in functions:
                called.add(key)
            stack.extend(_bodies(node))
    return called


def _require_no_recursion(functions: dict[_Key, Any], name: str) -> None:
    """Topological sort of the call graph: functions that remain are recursive."""
    calls_of = {key: _calls(function, functions) for key, function in functions.items()}
    callers: dict[_Key, list[_Key]] = {key: [] for key in calls_of}
    for key, calls in calls_of.items():
        for called in calls:
            callers[called].append(key)
    open_calls = {key: len(calls) for key, calls in calls_of.items()}
    free = [key for key, count in open_calls.items() if not count]
    for key in free:  # extended in the loop
        for caller in callers[key]:
            open_calls[caller] -= 1
            if not open_calls[caller]:
                free.append(caller)
    cycle = sorted(_title(key) for key, count in open_calls.items() if count)
    if cycle:
        raise Malformed(
            f"{name}: function {cycle[0]} calls itself, by {len(cycle)} functions that call each other; "
            "write it as a Loop"
        )


def evaluate(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of the reference evaluator by name, with floats as float32."""
    try:
        model = load_with_data(path)  # with embedded data onnx opens no file
        evaluator = ReferenceEvaluator(model)
        kinds = {declared.name: declared.type.tensor_type.elem_type for declared in model.graph.input}
        arrays = {
            name: array.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[name])) for name, array in inputs.items()
        }
        with np.errstate(all="ignore"):
            results = evaluator.run(None, arrays)
    except (CompileError, MemoryError):
        raise
    except Exception as fault:  # its operators raise the exceptions of numpy
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise CaptureError(f"ONNX's reference evaluator cannot run {path.name}: {reason}") from fault
    return {output.name: _plain(result) for output, result in zip(model.graph.output, results, strict=True)}


def _plain(result: Array) -> Array:
    array = np.asarray(result)
    exact = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    return array if exact else array.astype(np.float32)
