"""Reader of ONNX models into the graph IR, one node at a time; unsupported operators are collected, not raised."""

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

# Importing a family registers its importers.
from nxpipe.emulator.capture.onnx import elementwise, linear_algebra, movement, spatial  # noqa: F401
from nxpipe.emulator.capture.onnx.base import (
    CONTROL,
    IMPORTERS,
    NO_CALL,
    Body,
    OnnxSite,
    SubgraphCall,
    ValueNeeded,
    attribute_bytes,
    attributes_of,
    decompose,
    dtype_of,
    resolve_references,
)
from nxpipe.emulator.capture.onnx.external import DataFolder
from nxpipe.emulator.capture.onnx.file import (
    error_text,
    function_key,
    is_parameter,
    load_model,
    numbers,
    require_valid_names,
    type_of,
)
from nxpipe.emulator.capture.onnx.limits import DEPTH, BeyondLimit, BoundedBuilder
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.errors import CaptureError, CompileError, Finding, IllTyped, UnsupportedOperators
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Origin, Value
from nxpipe.emulator.ir.types import TensorType, is_reasonable
from nxpipe.emulator.numerics import Array

_NO_IMPORTER = "the compiler has no such operator; write it with elementwise, matrix and reduction operators"
_RANDOM = "a compiled program draws no random numbers; draw them on the host and pass them as an input"
_SEQUENCE = "sequences and optional values are no tensors; give each tensor an input or output of its own"
_TEXT = "the hardware has no strings; work on text before the model"
_TRAINING = "it belongs to training; export the model for inference"

_REASONS = {
    _RANDOM: ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    _SEQUENCE: (
        *("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt"),
        *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap"),
        "SplitToSequence",
    ),
    _TEXT: ("LabelEncoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    _TRAINING: ("ai.onnx.preview.training", "ai.onnx.training"),
    "files of images are decoded on the host, before the model": ("ImageDecoder",),
    "how many boxes it keeps depends on data; choose boxes on the host, after the model": ("NonMaxSuppression",),
    "trees walk from node to node by data, which no engine does; evaluate them on the host": (
        *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    ),
}
_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names}


def reason_for(name: str, domain: str) -> str:
    """What to say of an operator that has no importer."""
    return _BY_NAME.get(name) or _BY_NAME.get(domain, _NO_IMPORTER)


__all__ = ["IMPORTERS"]


_LONGEST_PLACE: Final = 512  # characters: a place names each call and body around it
_OWN_DOMAINS = ("", "ai.onnx")


class _AlreadyReported(Exception):
    """Something inside a body could not be imported, and is among the problems."""


class _Poison:
    """Stands for the result of a node that could not be imported, so that its users are not reported as well."""


_POISON = _Poison()
_Scope = ChainMap[str, "Value | _Poison | None"]


def capture_file(path: Path, sizes: Mapping[str, int]) -> Graph:
    return capture_proto(load_model(path), sizes=sizes, folder=path.parent, name=path.name)


def capture_proto(
    model: Any,
    sizes: Mapping[str, int] | None = None,
    constants: Mapping[str, Array] | None = None,
    folder: Path = Path(),
    name: str = "the model",
) -> Graph:
    """The graph of a model in memory; `constants` gives inputs that are known now, because they decide sizes."""
    require_valid_names(model, name)
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
        self._folder, self._name = DataFolder(folder, name), name
        self._builder = BoundedBuilder(name)
        self._inputs: dict[str, Value] = {}
        self._problems: Counter[tuple[str, Origin, str]] = Counter()
        self._needed: dict[str, str] = {}
        self._looked_behind: set[Value] = set()
        self._initial: ChainMap[str, Any] = ChainMap()  # initialisers of the body being read, and of those around it
        self._opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._functions = {function_key(function, function.name): function for function in model.functions}
        self._call = NO_CALL  # of the function whose body is being read
        self._depth = 0

    def graph(self) -> Graph:
        proto = self._model.graph
        scope: _Scope = ChainMap()
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
            value = scope[output.name]
            if not isinstance(value, Value):  # an operand that was left out, handed on by a function
                raise CaptureError(f"output {output.name!r} of {self._name} has no value; export the model again")
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
        type_ = TensorType(shape, dtype)
        if any(size < 0 for size in shape) or not is_reasonable(type_):
            raise CaptureError(f"input {declared.name!r} of {self._name} is {type_}, which no tensor can be")
        value = self._inputs[declared.name] = self._builder.input(declared.name, type_)
        return value

    def _size(self, name: str, axis: int, dim: Any) -> int:
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        if dim.dim_param in self._sizes:
            return self._sizes[dim.dim_param]
        open_axis = f"axis {axis} of input {name!r} is open"
        if not dim.dim_param:
            raise CaptureError(f"{open_axis} and has no name; export the model with a fixed size there")
        raise CaptureError(f"{open_axis} ({dim.dim_param!r}); give it a size by this name: --axis '{dim.dim_param}=1'")

    def _run(self, proto: Any, scope: _Scope, place: str) -> None:
        """Import a graph's or a function's nodes into a scope of named values."""
        with self._one_deeper():
            around = self._initial
            initialisers = getattr(proto, "initializer", ())
            self._builder.step(1 + len(initialisers) + len(proto.input) + len(proto.output))
            self._initial = around.new_child({tensor.name: tensor for tensor in initialisers})
            for number, node in enumerate(proto.node):
                operands = [self._operand(name, scope) if name else None for name in node.input]
                origin = Origin(node.name, f"{place}:{node.op_type} {number}"[:_LONGEST_PLACE])
                results = self._node(node, operands, scope, origin)
                scope.update({name: result for name, result in zip(node.output, results, strict=False) if name})
            for name in (output.name for output in proto.output if not isinstance(output, str)):
                self._operand(name, scope)  # an initialiser may be the result of a graph
            self._initial = around

    @contextmanager
    def _one_deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEPTH:
            way_out = "put fewer functions, loops and branches inside of each other"
            raise BeyondLimit(self._name, "nests {} bodies of functions, loops and branches", DEPTH + 1, DEPTH, way_out)
        yield
        self._depth -= 1

    def _operand(self, name: str, scope: _Scope) -> Value | _Poison | None:
        """A value by its name; an initialiser becomes one when it is first used."""
        if name not in scope:
            if name not in self._initial:
                raise CaptureError(f"{self._name}: {name!r} is made by no node; export the model again")
            scope[name] = self._initialiser(self._initial[name])
        return scope[name]

    def _initialiser(self, tensor: Any) -> Value | _Poison:
        try:
            type_ = type_of(tensor)
        except NotExpressible as problem:
            self._problem("initializer", Origin(tensor.name), str(problem))
            return _POISON
        if is_parameter(type_):
            return self._builder.parameter(tensor.name, type_)
        return self._builder.constant(numbers(tensor, self._folder), type_.dtype)

    def _node(self, node: Any, operands: list[Any], scope: _Scope, origin: Origin) -> list[Any]:
        poisoned = [_POISON] * len(node.output)
        label = f"{node.domain or 'onnx'}.{node.op_type}"
        try:
            if any(operand is _POISON for operand in operands):
                return poisoned
            self._builder.step()
            self._builder.handle(attribute_bytes(node))
            results = self._imported(resolve_references(node, self._call), operands, scope, origin)
            if any(node.output[len(results) :]):
                raise NotExpressible(f"it has {len(results)} results, and the node names {len(node.output)}")
            return results
        except _AlreadyReported:
            return poisoned
        except ValueNeeded as problem:
            for name in self._inputs_behind(problem.value):
                self._needed.setdefault(name, f"{label} at {origin} cannot be compiled: {problem}")
            if not self._needed:
                self._problem(label, origin, str(problem))
        except (NotExpressible, IllTyped) as problem:
            self._problem(label, origin, str(problem))
        except (CompileError, MemoryError):
            raise
        except Exception as fault:
            # Nodes that break their operator's own rules, by an operand too few, an attribute that is not there, or a
            # step of zero: Python, numpy or onnx objects, each in its own way.
            self._problem(label, origin, f"the node is malformed: {type(fault).__name__} {error_text(fault)}")
        return poisoned

    def _imported(self, node: Any, operands: list[Any], scope: _Scope, origin: Origin) -> list[Any]:
        attributes = {name: self._with_data(value) for name, value in attributes_of(node).items()}
        function = self._functions.get(function_key(node, node.op_type))
        if function is not None:
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
        expanded = None if importer else decompose(node, operands, opset)
        if expanded is not None:
            return self._function(expanded, operands, attributes, origin)
        if importer is None:
            raise NotExpressible(reason_for(node.op_type, node.domain))
        result = importer(site, *operands)
        return result if isinstance(result, list) else [result]

    def _with_data(self, attribute: Any) -> Any:
        """A tensor's bytes may lie elsewhere; importers, and onnx, get it whole and open no file."""
        if not isinstance(attribute, onnx.TensorProto):
            return attribute
        whole = self._folder.embedded(attribute)
        self._builder.handle(len(whole.raw_data))
        return whole

    def _constant(self, attributes: Mapping[str, Any]) -> Value:
        (name, held), *_ = attributes.items()
        if name == "value":
            return self._builder.constant(numbers(held, self._folder), dtype_of(held.data_type))
        if name not in ("value_float", "value_floats", "value_int", "value_ints"):
            raise NotExpressible(f"the constant is given as {name}; only numbers can be computed with")
        kind = onnx.TensorProto.FLOAT if "float" in name else onnx.TensorProto.INT64
        return self._builder.constant(np.asarray(held), dtype_of(kind))

    def _body(self, scope: _Scope, origin: Origin) -> Body:
        """How a branch or a loop runs its body: in the scope around it, on inputs of its own."""

        def run(body: Any, operands: Sequence[Value]) -> list[Value]:
            given = {declared.name: value for declared, value in zip(body.input, operands, strict=True)}
            inner = scope.new_child(dict(given))
            self._run(body, inner, origin.source)
            results = [inner[output.name] for output in body.output]
            found = [value for value in results if isinstance(value, Value)]
            if len(found) < len(results):
                raise _AlreadyReported
            return found

        return run

    def _function(self, function: Any, operands: list[Any], attributes: Mapping[str, Any], origin: Origin) -> list[Any]:
        """A function of the model or of the standard: its nodes in a scope of their own."""
        if len(operands) > len(function.input):
            raise NotExpressible(f"it is given {len(operands)} operands, and takes {len(function.input)}")
        absent = [None] * (len(function.input) - len(operands))
        scope: _Scope = ChainMap(dict(zip(function.input, [*operands, *absent], strict=True)))
        before = self._opsets, self._initial, self._call
        self._opsets = {entry.domain: entry.version for entry in function.opset_import} or self._opsets
        self._initial, self._call = ChainMap(), SubgraphCall.of(function, attributes)
        self._run(function, scope, origin.source)
        self._opsets, self._initial, self._call = before
        return [scope.get(name, _POISON) for name in function.output]  # the standard's leave out what nobody asked for

    def _inputs_behind(self, value: Value) -> list[str]:
        """The inputs that a value is computed from, but for those that were found before."""
        names = {known: name for name, known in self._inputs.items()}
        waiting, seen, found = [value], self._looked_behind, []
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
