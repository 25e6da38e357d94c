"""From an ONNX model to our graph, one node at a time; what cannot be expressed is collected, not raised."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from emulator.builder import GraphBuilder
from emulator.capture.onnx.base import SMALL, OnnxSite, ValueNeeded
from emulator.capture.onnx.control import CONTROL, Body
from emulator.capture.onnx.elementwise import dtype_of
from emulator.capture.onnx.functions import attributes_of, fill_attributes, taken_apart
from emulator.capture.onnx.refused import reason_for
from emulator.capture.onnx.table import IMPORTERS
from emulator.capture.site import NotExpressible
from emulator.errors import CaptureError, Finding, IllTyped, UnsupportedOperators
from emulator.graph import Graph, Origin, Value
from emulator.numerics import Array
from emulator.types import TensorType

_OWN_DOMAINS = ("", "ai.onnx")


class _AlreadyReported(Exception):
    """Something inside a body could not be imported, and is among the problems."""


class _Poison:
    """Stands for the result of a node that could not be imported, so that its users are not reported as well."""


_POISON = _Poison()
_Scope = dict[str, "Value | _Poison | None"]


def capture_file(path: Path, sizes: Mapping[str, int]) -> Graph:
    model = loaded(path)
    return capture_proto(model, sizes=sizes, folder=path.parent, name=path.name)


def parameters(path: Path) -> dict[str, Array]:
    """All initialisers by name, floats as float32."""
    model = loaded(path)
    return {tensor.name: _numbers(tensor, path.parent) for tensor in model.graph.initializer}


def loaded(path: Path) -> Any:
    """The model without the data beside it, which may be large."""
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as fault:
        raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except Exception as fault:  # protobuf's own errors differ with its implementation
        raise CaptureError(f"{path.name} is truncated, or no ONNX model: {_sentence(fault)}") from fault
    if not model.graph.node and not model.graph.output:
        raise CaptureError(f"{path.name} holds no ONNX graph")
    return model


def _sentence(fault: Exception) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__


def _numbers(tensor: Any, folder: Path) -> Array:
    try:
        array = onnx.numpy_helper.to_array(tensor, str(folder))
    except Exception as fault:  # a damaged tensor, or a file of data that is missing or leads out of the folder
        raise CaptureError(f"initialiser {tensor.name!r} cannot be read: {_sentence(fault)}") from fault
    floating = dtype_of(tensor.data_type).is_float
    return np.asarray(array, np.float32) if floating else array


def capture_proto(
    model: Any,
    sizes: Mapping[str, int] | None = None,
    constants: Mapping[str, Array] | None = None,
    folder: Path = Path(),
    name: str = "the model",
) -> Graph:
    """The graph of a model in memory; `constants` gives inputs that are known now, because they decide sizes."""
    return _Importer(model, sizes or {}, constants or {}, folder, name).graph()


class InputNeeded(CaptureError):
    """An input decides about a size; known as a constant, it would not stand in the way."""

    def __init__(self, message: str, inputs: Sequence[str]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


class _Importer:
    def __init__(
        self, model: Any, sizes: Mapping[str, int], constants: Mapping[str, Array], folder: Path, name: str
    ) -> None:
        self._model, self._sizes, self._constants = model, sizes, constants
        self._folder, self._name = folder, name
        self._builder = GraphBuilder()
        self._inputs: dict[str, Value] = {}
        self._problems: Counter[tuple[str, Origin, str]] = Counter()
        self._needed: dict[str, str] = {}
        self._initial: dict[str, Any] = {}  # initialisers of the graph being read, and of those around it
        self._opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._functions = {(f.domain, f.name): f for f in model.functions}

    def graph(self) -> Graph:
        proto = self._model.graph
        scope: _Scope = {}
        initialised = {tensor.name for tensor in proto.initializer}
        for declared in proto.input:
            if declared.name not in initialised:
                scope[declared.name] = self._input(declared)
        self._run(proto, scope, self._name)
        if self._needed:
            raise InputNeeded(next(iter(self._needed.values())), list(self._needed))
        if self._problems:
            problems = self._problems.items()
            raise UnsupportedOperators([Finding(op, at.module, at.source, n, why) for (op, at, why), n in problems])
        for output in proto.output:
            value = scope.get(output.name)
            if not isinstance(value, Value):
                raise CaptureError(f"output {output.name!r} of {self._name} is made by no node")
            self._builder.output(output.name, value)
        return self._builder.build()

    def _input(self, declared: Any) -> Value | _Poison:
        kind = declared.type.WhichOneof("value")
        if kind != "tensor_type":
            raise CaptureError(f"input {declared.name!r} of {self._name} is no tensor but a {kind}")
        try:
            dtype = dtype_of(declared.type.tensor_type.elem_type)
        except NotExpressible as problem:
            self._problem("input", Origin(declared.name), str(problem))
            return _POISON
        if declared.name in self._constants:
            return self._builder.constant(np.asarray(self._constants[declared.name]), dtype)
        tensor = declared.type.tensor_type
        if not tensor.HasField("shape"):
            raise CaptureError(f"input {declared.name!r} of {self._name} has no shape; export it with one")
        shape = tuple(self._size(declared.name, axis, dim) for axis, dim in enumerate(tensor.shape.dim))
        value = self._inputs[declared.name] = self._builder.input(declared.name, TensorType(shape, dtype))
        return value

    def _size(self, name: str, axis: int, dim: Any) -> int:
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        if dim.dim_param in self._sizes:
            return self._sizes[dim.dim_param]
        open_axis = f"axis {axis} of input {name!r} is open"
        if not dim.dim_param:
            raise CaptureError(f"{open_axis} and has no name; export the model with a fixed size there")
        raise CaptureError(f"{open_axis} ({dim.dim_param!r}); give it a size by this name")

    def _run(self, proto: Any, scope: _Scope, place: str) -> None:
        """Import a graph's or a function's nodes into a scope of named values."""
        around = self._initial
        self._initial = initial = around | {tensor.name: tensor for tensor in getattr(proto, "initializer", ())}
        for number, node in enumerate(proto.node):
            operands = []
            for name in node.input:
                if name not in scope and name in initial:
                    scope[name] = self._initialiser(initial[name])
                operands.append(scope.get(name) if name else None)
            origin = Origin(node.name, f"{place}:{node.op_type} {number}")
            results = self._node(node, operands, scope, origin)
            scope.update(zip(node.output, results, strict=False))
        for name in {output.name for output in getattr(proto, "output", ()) if not isinstance(output, str)}:
            if name not in scope and name in initial:
                scope[name] = self._initialiser(initial[name])
        self._initial = around

    def _initialiser(self, tensor: Any) -> Value | _Poison:
        """Weights are parameters; small tables of integers, and single numbers, are part of the program."""
        try:
            dtype = dtype_of(tensor.data_type)
        except NotExpressible as problem:
            self._problem("initializer", Origin(tensor.name), str(problem))
            return _POISON
        type_ = TensorType(tuple(tensor.dims), dtype)
        if type_.elements <= 1 or (not dtype.is_float and type_.elements <= SMALL):
            return self._builder.constant(_numbers(tensor, self._folder), dtype)
        return self._builder.parameter(tensor.name, type_)

    def _node(self, node: Any, operands: list[Any], scope: _Scope, origin: Origin) -> list[Any]:
        poisoned = [_POISON] * len(node.output)
        label = f"{node.domain or 'onnx'}.{node.op_type}"
        try:
            if any(operand is _POISON for operand in operands):
                return poisoned
            return self._imported(node, operands, scope, origin)
        except _AlreadyReported:
            return poisoned
        except ValueNeeded as problem:
            for name in self._inputs_behind(problem.value):
                self._needed.setdefault(name, f"{label} at {origin} cannot be compiled: {problem}")
            if not self._needed:
                self._problem(label, origin, str(problem))
        except (NotExpressible, IllTyped) as problem:
            self._problem(label, origin, str(problem))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as fault:
            # Nodes that break their operator's own rules: an operand too few, an attribute that is not there.
            self._problem(label, origin, f"the node is malformed: {type(fault).__name__} {_sentence(fault)}")
        return poisoned

    def _imported(self, node: Any, operands: list[Any], scope: _Scope, origin: Origin) -> list[Any]:
        attributes = attributes_of(node)
        if (node.domain, node.op_type) in self._functions:
            function = self._functions[node.domain, node.op_type]
            return self._function(function, operands, attributes, origin)
        if node.op_type == "Constant" and node.domain in _OWN_DOMAINS:
            return [self._constant(attributes)]
        own = node.domain in _OWN_DOMAINS
        opset = self._opsets.get("" if own else node.domain, 1)
        wanted = sum(bool(name) for name in node.output)
        site = OnnxSite(self._builder, (), origin, node.op_type, attributes, opset, wanted)
        if own and node.op_type in CONTROL:
            return CONTROL[node.op_type](site, self._body(scope, origin), *operands)
        importer = IMPORTERS.get(node.op_type) if own else None
        expanded = None if importer else taken_apart(node, operands, opset)
        if expanded is not None:
            return self._function(expanded, operands, attributes, origin)
        if importer is None:
            raise NotExpressible(reason_for(node.op_type, node.domain))
        result = importer(site, *operands)
        return result if isinstance(result, list) else [result]

    def _constant(self, attributes: Mapping[str, Any]) -> Value:
        (name, held), *_ = attributes.items()
        if name == "value":
            return self._builder.constant(_numbers(held, self._folder), dtype_of(held.data_type))
        if name not in ("value_float", "value_floats", "value_int", "value_ints"):
            raise NotExpressible(f"the constant is given as {name}; only numbers can be computed with")
        kind = onnx.TensorProto.FLOAT if "float" in name else onnx.TensorProto.INT64
        return self._builder.constant(np.asarray(held), dtype_of(kind))

    def _body(self, scope: _Scope, origin: Origin) -> Body:
        """How a branch or a loop runs its body: in the scope around it, on inputs of its own."""

        def run(body: Any, operands: Sequence[Value]) -> list[Value]:
            inner = scope | {declared.name: value for declared, value in zip(body.input, operands, strict=True)}
            self._run(body, inner, origin.source)
            results = [inner.get(output.name) for output in body.output]
            found = [value for value in results if isinstance(value, Value)]
            if len(found) < len(results):
                raise _AlreadyReported
            return found

        return run

    def _function(self, function: Any, operands: list[Any], attributes: Mapping[str, Any], origin: Origin) -> list[Any]:
        """A function of the model or of the standard: its nodes in a scope of their own."""
        body = onnx.FunctionProto()
        body.CopyFrom(function)
        for node in body.node:
            fill_attributes(node, attributes, function)
        scope: _Scope = dict(zip(body.input, operands, strict=False))
        before, around = self._opsets, self._initial
        self._opsets = {entry.domain: entry.version for entry in body.opset_import} or before
        self._initial = {}
        self._run(body, scope, origin.source)
        self._opsets, self._initial = before, around
        return [scope.get(name, _POISON) for name in body.output]

    def _inputs_behind(self, value: Value) -> list[str]:
        """The inputs that a value is computed from."""
        names = {known: name for name, known in self._inputs.items()}
        waiting, seen, found = [value], set(), []
        while waiting:
            part = waiting.pop()
            if part in seen:
                continue
            seen.add(part)
            if part in names:
                found.append(names[part])
            node = self._builder.node_of(part)
            waiting.extend(node.operands if node else ())
        return sorted(found)

    def _problem(self, operator: str, origin: Origin, advice: str) -> None:
        self._problems[operator, origin, advice] += 1
