"""Reader of ONNX models into the graph IR, one node at a time; unsupported operators are collected, not raised."""

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

# Importing these modules registers their importers.
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
_RANDOM = "a compiled program cannot generate random numbers; generate them on the host and pass them as an input"
_SEQUENCE = "sequences and optional values are not tensors; give each tensor its own input or output"
_TEXT = "the hardware has no strings; process text before the model"
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
    "the hardware decodes no image files; decode them on the host, before the model": ("ImageDecoder",),
    "the number of boxes in its result depends on data; select boxes on the host, after the model": (
        "NonMaxSuppression",
    ),
    "decision trees branch on data, which no engine does; evaluate them on the host": (
        *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    ),
}
_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names}


def reason_for(name: str, domain: str) -> str:
    """The advice for an operator without an importer."""
    return _BY_NAME.get(name) or _BY_NAME.get(domain, _NO_IMPORTER)


__all__ = ["IMPORTERS"]


_LONGEST_LOCATION: Final = 512  # characters: a location names all enclosing calls and bodies
_STANDARD_DOMAINS = ("", "ai.onnx")


class _AlreadyReported(Exception):
    """A node in a body could not be imported, and is among the problems."""


class _Poison:
    """The result of a node that could not be imported; its users are then not reported too."""


_POISON = _Poison()
_Scope = ChainMap[str, "Value | _Poison | None"]


def capture_file(path: Path, sizes: Mapping[str, int]) -> Graph:
    """The graph of an ONNX file; `sizes` fixes its dynamic axes, by name."""
    return capture_proto(load_model(path), sizes=sizes, folder=path.parent, name=path.name)


def capture_proto(
    model: Any,
    sizes: Mapping[str, int] | None = None,
    constants: Mapping[str, Array] | None = None,
    folder: Path = Path(),
    name: str = "the model",
) -> Graph:
    """The graph of a model in memory; `constants` are the values of inputs that determine shapes."""
    require_valid_names(model, name)
    return _Importer(model, sizes or {}, constants or {}, folder, name).graph()


class InputNeeded(CaptureError):
    """Inputs whose values determine shapes; the model can be captured if they are constants."""

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
        self._searched: set[Value] = set()
        self._initial: ChainMap[str, Any] = ChainMap()  # initialisers of the current body and of the enclosing ones
        self._opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._functions = {function_key(function, function.name): function for function in model.functions}
        self._call = NO_CALL  # of the function whose body is being imported
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
            if not isinstance(value, Value):  # an omitted operand that a function returns
                raise CaptureError(f"output {output.name!r} of {self._name} has no value; export the model again")
            self._builder.output(output.name, value)
        return self._builder.build()

    def _input(self, declared: Any) -> Value | _Poison:
        kind = declared.type.WhichOneof("value")
        if kind != "tensor_type":
            raise CaptureError(f"input {declared.name!r} of {self._name} is not a tensor but a {kind}")
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
            raise CaptureError(f"input {declared.name!r} of {self._name} is {type_}, which is not a valid tensor type")
        value = self._inputs[declared.name] = self._builder.input(declared.name, type_)
        return value

    def _size(self, name: str, axis: int, dim: Any) -> int:
        if dim.HasField("dim_value"):
            return int(dim.dim_value)
        if dim.dim_param in self._sizes:
            return self._sizes[dim.dim_param]
        dynamic = f"axis {axis} of input {name!r} is dynamic"
        if not dim.dim_param:
            raise CaptureError(f"{dynamic} and has no name; export the model with a fixed size there")
        raise CaptureError(f"{dynamic} ({dim.dim_param!r}); give it a size by this name: --axis '{dim.dim_param}=1'")

    def _run(self, proto: Any, scope: _Scope, place: str) -> None:
        """Import the nodes of a graph or a function into a scope of named values."""
        with self._nested():
            outer = self._initial
            initialisers = getattr(proto, "initializer", ())
            self._builder.step(1 + len(initialisers) + len(proto.input) + len(proto.output))
            self._initial = outer.new_child({tensor.name: tensor for tensor in initialisers})
            for number, node in enumerate(proto.node):
                operands = [self._operand(name, scope) if name else None for name in node.input]
                origin = Origin(node.name, f"{place}:{node.op_type} {number}"[:_LONGEST_LOCATION])
                results = self._node(node, operands, scope, origin)
                scope.update({name: result for name, result in zip(node.output, results, strict=False) if name})
            for name in (output.name for output in proto.output if not isinstance(output, str)):
                self._operand(name, scope)  # an initialiser may be the result of a graph
            self._initial = outer

    @contextmanager
    def _nested(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > DEPTH:
            remedy = "nest fewer functions, loops and branches"
            raise BeyondLimit(self._name, "nests {} bodies of functions, loops and branches", DEPTH + 1, DEPTH, remedy)
        yield
        self._depth -= 1

    def _operand(self, name: str, scope: _Scope) -> Value | _Poison | None:
        """A value by its name; an initialiser is imported when it is first used."""
        if name not in scope:
            if name not in self._initial:
                raise CaptureError(f"{self._name}: {name!r} is not the result of any node; export the model again")
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
                raise NotExpressible(f"it has {len(results)} results, but the node names {len(node.output)}")
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
            # Nodes that violate their operator's schema (a missing operand or attribute, a step of zero) cause various
            # exceptions of Python, numpy and onnx.
            self._problem(label, origin, f"the node is malformed: {type(fault).__name__} {error_text(fault)}")
        return poisoned

    def _imported(self, node: Any, operands: list[Any], scope: _Scope, origin: Origin) -> list[Any]:
        attributes = {name: self._with_data(value) for name, value in attributes_of(node).items()}
        function = self._functions.get(function_key(node, node.op_type))
        if function is not None:
            return self._function(function, operands, attributes, origin)
        if node.op_type == "Constant" and node.domain in _STANDARD_DOMAINS:
            return [self._constant(attributes)]
        standard = node.domain in _STANDARD_DOMAINS
        opset = self._opsets.get("" if standard else node.domain, 1)
        result_count = sum(bool(name) for name in node.output)
        site = OnnxSite(self._builder, (), origin, node.op_type, attributes, opset, result_count)
        if standard and node.op_type in CONTROL:
            return CONTROL[node.op_type](site, self._body(scope, origin), *operands)
        importer = IMPORTERS.get(node.op_type) if standard else None
        expanded = None if importer else decompose(node, operands, opset)
        if expanded is not None:
            return self._function(expanded, operands, attributes, origin)
        if importer is None:
            raise NotExpressible(reason_for(node.op_type, node.domain))
        result = importer(site, *operands)
        return result if isinstance(result, list) else [result]

    def _with_data(self, attribute: Any) -> Any:
        """The attribute with external data embedded, so that importers and onnx open no file."""
        if not isinstance(attribute, onnx.TensorProto):
            return attribute
        embedded = self._folder.embedded(attribute)
        self._builder.handle(len(embedded.raw_data))
        return embedded

    def _constant(self, attributes: Mapping[str, Any]) -> Value:
        (name, content), *_ = attributes.items()
        if name == "value":
            return self._builder.constant(numbers(content, self._folder), dtype_of(content.data_type))
        if name not in ("value_float", "value_floats", "value_int", "value_ints"):
            raise NotExpressible(f"the constant is given as {name}; only numbers are supported")
        kind = onnx.TensorProto.FLOAT if "float" in name else onnx.TensorProto.INT64
        return self._builder.constant(np.asarray(content), dtype_of(kind))

    def _body(self, scope: _Scope, origin: Origin) -> Body:
        """A function that imports the body of a branch or a loop, in a child of the enclosing scope."""

        def run(body: Any, operands: Sequence[Value]) -> list[Value]:
            inputs = {declared.name: value for declared, value in zip(body.input, operands, strict=True)}
            inner = scope.new_child(dict(inputs))
            self._run(body, inner, origin.source)
            results = [inner[output.name] for output in body.output]
            values = [value for value in results if isinstance(value, Value)]
            if len(values) < len(results):
                raise _AlreadyReported
            return values

        return run

    def _function(self, function: Any, operands: list[Any], attributes: Mapping[str, Any], origin: Origin) -> list[Any]:
        """Inline a function of the model or of the standard, in a new scope."""
        if len(operands) > len(function.input):
            raise NotExpressible(f"it has {len(operands)} operands, and accepts {len(function.input)}")
        absent = [None] * (len(function.input) - len(operands))
        scope: _Scope = ChainMap(dict(zip(function.input, [*operands, *absent], strict=True)))
        before = self._opsets, self._initial, self._call
        self._opsets = {entry.domain: entry.version for entry in function.opset_import} or self._opsets
        self._initial, self._call = ChainMap(), SubgraphCall.of(function, attributes)
        self._run(function, scope, origin.source)
        self._opsets, self._initial, self._call = before
        return [
            scope.get(name, _POISON) for name in function.output
        ]  # functions of the standard may omit unused results

    def _inputs_behind(self, value: Value) -> list[str]:
        """The inputs that a value depends on, without those of earlier calls."""
        names = {known: name for name, known in self._inputs.items()}
        stack, seen, names_found = [value], self._searched, []
        while stack:
            part = stack.pop()
            if part in seen:
                continue
            seen.add(part)
            if part in names:
                names_found.append(names[part])
            node = self._builder.node_of(part)
            stack.extend(node.operands if node else ())
        return sorted(names_found)

    def _problem(self, operator: str, origin: Origin, advice: str) -> None:
        self._problems[operator, origin, advice] += 1
