"""Importer of torch.export programs into the graph IR, one call at a time; unsupported operators are collected, not
raised.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nxpipe.emulator.capture.aten import Complex, NotExpressible, Site, complex_importer_of, importer_of, is_assertion
from nxpipe.emulator.capture.constants import HostValues
from nxpipe.emulator.capture.model import tensor_type
from nxpipe.emulator.capture.provenance import origin_of
from nxpipe.emulator.errors import CaptureError, Finding, IllTyped, UnsupportedOperators
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Origin, Value
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array

_NO_IMPORTER = "the compiler has no such operator; write it with elementwise, matrix and reduction operators"
_STATEFUL = "a model cannot keep state between calls; make the state an input and an output"
_UNSUPPORTED_RESULT = "the compiler does not compute this result of the operator; use only the first result"
_SIZE_DEPENDS_ON_DATA = "the size of its result depends on data; use torch.where, or pad to a fixed size"
_VALUE_ESCAPES = "a tensor's value becomes a Python number, which a compiled program cannot do; keep it a tensor"
_TYPES = "use float32, bfloat16, float16, an integer or a boolean"
_NOT_INLINED = "the body under this context is not compiled; call the module without the context"
_TORCH_NAMES = {"cond": "torch.cond", "while_loop": "torch.while_loop", "map_impl": "map", "scan": "scan"}
_CONTROL_FLOW = {
    "cond": "compute both branches and select with torch.where",
    "while_loop": "a program has a fixed number of steps; unroll the loop, or run it outside of the model",
    "map_impl": "unroll the loop, or write it as one operator over a batch",
    "scan": "unroll the loop, or write it as one operator over a batch",
}
# Types that only constants computed at compile time may have.
_HOST_TYPES = (torch.float64, torch.complex128)


class _Poison:
    """The result of a call that could not be imported; its users are then not reported too."""


_POISON = _Poison()


@dataclass(frozen=True)
class _Unrounded:
    """A constant in an element type that the hardware does not have."""

    numbers: Any


def import_program(program: Any, names: Mapping[str, str]) -> Graph:
    """The graph of an exported program; UnsupportedOperators lists all calls that cannot be imported.

    `names` maps a parameter to its name in the checkpoint, because torch.export picks any name of a tied parameter.
    """
    return _Importer(program, names).graph()


class _Importer:
    def __init__(self, program: Any, names: Mapping[str, str]) -> None:
        self._program = program
        self._names = names
        self._builder = GraphBuilder()
        self._problems: Counter[tuple[str, Origin, str]] = Counter()
        self._lifted: dict[Any, Any] = {}
        self._read: set[str] = set()  # targets that are read; a buffer that is only written is no state

    def graph(self) -> Graph:
        module = self._program.graph_module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        specs = self._program.graph_signature.input_specs
        constants, state = self._program.constants, self._program.state_dict
        self._lifted = {
            node: constants[spec.target]
            for node, spec in zip(placeholders, specs, strict=True)
            if spec.target in constants and spec.target not in state
        }
        self._read = {spec.target for node, spec in zip(placeholders, specs, strict=True) if node.users}
        arguments = [self._argument(node, spec) for node, spec in zip(placeholders, specs, strict=True)]
        results = self._user_outputs(self._run(module, arguments))
        if self._problems:
            raise UnsupportedOperators(_findings(self._problems))
        structure = pytree.tree_unflatten(results, self._program.call_spec.out_spec)
        for name, value in _named_outputs(structure, ""):
            self._builder.output(name, value)
        return self._builder.build()

    def _user_outputs(self, results: list[Any]) -> list[Any]:
        """The user outputs. Writes to inputs are dropped; writes to buffers are reported."""
        specs = self._program.graph_signature.output_specs
        for spec, result in zip(specs, results, strict=True):
            if spec.target in self._read and self._is_state(spec.kind.name, result):
                self._problem(f"assignment to {spec.target}", Origin(spec.target.rpartition(".")[0]), _STATEFUL)
        return [result for result, spec in zip(results, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]

    def _is_state(self, kind: str, result: Any) -> bool:
        """True if the next call would read this mutation. A weight computed from weights alone is the same in each
        call."""
        if not isinstance(result, Value) or self._builder.node_of(result) is None:
            return False
        return kind == "BUFFER_MUTATION" or (kind == "PARAMETER_MUTATION" and self._depends_on_inputs(result))

    def _depends_on_inputs(self, result: Value) -> bool:
        stack, seen = [result], {result}
        while stack:
            value = stack.pop()
            node = self._builder.node_of(value)
            if node is None and self._builder.is_input(value):
                return True
            fresh = [operand for operand in (node.operands if node else ()) if operand not in seen]
            seen.update(fresh)
            stack += fresh
        return False

    def _argument(self, node: Any, spec: Any) -> Any:
        """A placeholder as an input, a parameter or a constant; unused parameters are left out."""
        kind, state = spec.kind.name, self._program.state_dict
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if kind != "USER_INPUT" and not node.users:
            return None
        if kind != "USER_INPUT" and spec.target in self._program.constants and spec.target not in state:
            return self._constant(self._program.constants[spec.target])
        try:
            type_ = tensor_type(node.meta["val"])
        except ValueError:
            self._problem(node.name, Origin(spec.target or node.name), _no_type(node.meta["val"]))
            return _POISON
        if kind == "USER_INPUT":
            return self._builder.input(node.name, type_)
        return self._builder.parameter(self._names.get(spec.target, spec.target), type_)

    def _constant(self, numbers: Any) -> Any:
        """Tensors known at compile time, as constants of the graph if the hardware has their element type."""
        if isinstance(numbers, tuple | list):
            return [self._constant(part) for part in numbers]
        if numbers.dtype is torch.complex64:
            return Complex(self._constant(numbers.real.contiguous()), self._constant(numbers.imag.contiguous()))
        try:
            return self._builder.constant(_numbers(numbers), tensor_type(numbers).dtype)
        except ValueError:
            return _Unrounded(numbers)

    def _to_hardware_type(self, operand: Any) -> Any:
        """A constant operand of a computed tensor, rounded to a type of the hardware."""
        if not isinstance(operand, _Unrounded):
            return operand
        return self._constant(operand.numbers.to(torch.complex64 if operand.numbers.is_complex() else torch.float32))

    def _run(self, module: Any, arguments: list[Any]) -> list[Any]:
        """Import the calls of one graph module; called again for the bodies of higher-order operators."""
        values: dict[Any, Any] = {}
        remaining = iter(arguments)
        needed, host = _needed(module.graph), HostValues(module.graph, self._lifted)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif node.op == "call_function" and node in needed:
                values[node] = self._call(node, values, host)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], lambda operand: values[operand])
                return list(results) if isinstance(results, tuple | list) else [results]
        raise CaptureError("the traced program has no output")

    def _call(self, node: Any, values: Mapping[Any, Any], host: HostValues) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: values[operand])
        if node.target.__name__ == "getitem":
            return self._getitem(node, *args)
        if _needs_host(node, args, kwargs):
            numbers = host.of(node)
            if numbers is not None:
                return self._constant(numbers)
            args, kwargs = pytree.tree_map(self._to_hardware_type, (args, kwargs))
        poisoned = _POISON in pytree.tree_leaves((args, kwargs))
        if isinstance(node.target, torch._ops.OpOverload):
            return self._operator(node, args, kwargs, None if poisoned else host)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, args)
        if not poisoned:  # Python arithmetic on sizes, which are static unless an operand was reported
            self._problem(str(node.target), origin_of(node.meta), _NO_IMPORTER)
        return _POISON

    def _getitem(self, node: Any, parts: Any, number: int) -> Any:
        """One of several results; importers do not compute all secondary results."""
        if parts is _POISON or number < len(parts):
            return parts if parts is _POISON else parts[number]
        if node.users:
            self._problem(f"{node.args[0].target}, result {number}", origin_of(node.meta), _UNSUPPORTED_RESULT)
        return _POISON

    def _higher_order(self, node: Any, args: Any) -> Any:
        """Inline the body of a higher-order operator for a context manager that does not change values."""
        bodies = [position for position, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)]
        name = node.target.__name__
        inlined = name == "wrap_with_set_grad_enabled" or (name == "wrap_with_autocast" and args[2] is False)
        if not inlined or len(bodies) != 1:
            self._problem(_TORCH_NAMES.get(name, name), origin_of(node.meta), _CONTROL_FLOW.get(name, _NOT_INLINED))
            return _POISON
        return self._run(args[bodies[0]], list(args[bodies[0] + 1 :]))

    def _operator(self, node: Any, args: Any, kwargs: Any, host: HostValues | None) -> Any:
        """Import one operator; `host` is None if an operand could not be imported, which was reported."""
        if is_assertion(node.target):
            return _POISON
        operands = pytree.tree_leaves((args, kwargs))
        complex_ = any(isinstance(operand, Complex) for operand in operands)
        importer: Any = (complex_importer_of if complex_ else importer_of)(node.target)
        origin = origin_of(node.meta)
        try:
            site = Site(self._builder, _result_types(node.meta["val"]), origin)
            if importer is None:
                raise NotExpressible(_NO_IMPORTER)
            imported = _POISON if host is None else importer(site, *_bound(node.target, args, kwargs))
        except (NotExpressible, IllTyped) as problem:
            numbers = host.of(node) if host else None
            if isinstance(numbers, torch.Tensor):
                return self._constant(numbers)
            if importer is None or host:
                self._problem(str(node.target), origin, str(problem))
            return _POISON
        if isinstance(imported, _Poison):
            return imported
        if isinstance(imported, list):
            return [
                _with_declared_type(site, value, type_) for value, type_ in zip(imported, site.results, strict=False)
            ]
        return _with_declared_type(site, _with_declared_parts(site, imported, node.meta["val"]), site.result)

    def _problem(self, operator: str, origin: Origin, advice: str) -> None:
        self._problems[operator, origin, advice] += 1


def _bound(target: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments in the order of the operator's schema, defaults filled in."""
    schema = target._schema.arguments
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in schema[len(args) :])]


def _needed(graph: Any) -> set[Any]:
    """The calls whose results reach an output; operands of assertions alone are left out."""
    needed: set[Any] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update((node, *node.all_input_nodes))
    return needed


def _needs_host(node: Any, args: Any, kwargs: Any) -> bool:
    """True if an operand or a result of a call has an element type that only the host has."""
    results = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(tensor, torch.Tensor) and tensor.dtype in _HOST_TYPES for tensor in results) or any(
        isinstance(operand, _Unrounded) for operand in pytree.tree_leaves((args, kwargs))
    )


def _with_declared_parts(site: Site, imported: Any, result: Any) -> Any:
    """Convert between real and complex: add a zero imaginary part, or drop the imaginary part."""
    if result.is_complex() and isinstance(imported, Value):
        return Complex(imported, site.filled(0, site.result))
    return imported.real if isinstance(imported, Complex) and not result.is_complex() else imported


def _no_type(*tensors: Any) -> str:
    names = sorted({str(each.dtype).removeprefix("torch.") for each in tensors if not _is_supported(each)})
    return f"the hardware has no such element type ({', '.join(names)}); {_TYPES}"


def _is_supported(tensor: Any) -> bool:
    try:
        tensor_type(tensor)
    except ValueError:
        return tensor.dtype is torch.complex64
    return True


def _result_types(result: Any) -> tuple[TensorType, ...]:
    parts = result if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise NotExpressible(_VALUE_ESCAPES)
    if not all(type(size) is int for part in parts for size in part.shape):
        raise NotExpressible(_SIZE_DEPENDS_ON_DATA)
    try:
        return tuple(tensor_type(part.real if part.dtype is torch.complex64 else part) for part in parts)
    except ValueError:
        raise NotExpressible(_no_type(*parts)) from None


def _with_declared_type(site: Site, value: Any, expected: TensorType) -> Any:
    """Cast a result to the element type that PyTorch computed, and check its shape."""
    if isinstance(value, Complex):
        return Complex(
            _with_declared_type(site, value.real, expected), _with_declared_type(site, value.imaginary, expected)
        )
    if value.type.shape != expected.shape:
        raise CaptureError(f"an importer returned {value.type} at {site.origin}, where PyTorch has {expected}")
    return site.cast(value, expected.dtype)


def _numbers(tensor: Any) -> Array:
    exact = tensor.float() if tensor.is_floating_point() else tensor
    numbers: Array = exact.detach().numpy()
    return numbers


def _named_outputs(structure: Any, name: str) -> Iterator[tuple[str, Value]]:
    """Outputs with their names in the model's result; elements of sequences are named by position."""
    if isinstance(structure, Value):
        yield name or "output", structure
    elif isinstance(structure, _Poison):
        raise CaptureError(f"output {name!r} is not a tensor")
    elif isinstance(structure, Mapping):
        for key, part in structure.items():
            yield from _named_outputs(part, f"{name}.{key}" if name else str(key))
    elif isinstance(structure, tuple | list):
        for position, part in enumerate(structure):
            yield from _named_outputs(part, f"{name or 'output'}.{position}")


def _findings(problems: Counter[tuple[str, Origin, str]]) -> list[Finding]:
    return [
        Finding(operator, origin.module, origin.source, count, advice)
        for (operator, origin, advice), count in problems.items()
    ]
