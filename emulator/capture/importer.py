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
_REMEMBERS = "a model may not remember anything from call to call; pass it in, and return it"
_BY_PRODUCT = "this result is a by-product that the compiler leaves out; use the first result alone"
_SIZE_DEPENDS_ON_DATA = "the size of its result depends on data; use torch.where, or pad to a fixed size"
_VALUE_ESCAPES = "a tensor's value becomes a Python number, which a compiled program cannot do; keep it a tensor"
_NO_TYPE = "the hardware has no such element type; use float32, bfloat16, float16, an integer or a boolean"
# Types that models compute constants in; other types than these have no use before a program runs.
_HOST_TYPES = (torch.float64, torch.complex128)


class _Poison:
    """Stands for the result of a call that could not be imported, so that its users are not reported as well."""


_POISON = _Poison()


@dataclass(frozen=True)
class _Unrounded:
    """Numbers known while compiling, in a type that the hardware does not have."""

    numbers: Any


def import_program(program: Any, names: Mapping[str, str]) -> Graph:
    """The graph of an exported program; UnsupportedOperators lists everything in it that has no counterpart.

    `names` says which name a parameter goes by, because the exporter picks any of a tied parameter's.
    """
    return _Importer(program, names).graph()


class _Importer:
    def __init__(self, program: Any, names: Mapping[str, str]) -> None:
        self._program = program
        self._names = names
        self._builder = GraphBuilder()
        self._problems: Counter[tuple[str, Origin, str]] = Counter()
        self._lifted: dict[Any, Any] = {}
        self._read: set[str] = set()  # what is written before anything reads it, no call remembers

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
        results = self._kept(self._run(module, arguments))
        if self._problems:
            raise UnsupportedOperators(_findings(self._problems))
        structure = pytree.tree_unflatten(results, self._program.call_spec.out_spec)
        for name, value in _named_outputs(structure, ""):
            self._builder.output(name, value)
        return self._builder.build()

    def _kept(self, results: list[Any]) -> list[Any]:
        """The model's own results. What it wrote to its arguments is dropped; what it wrote to buffers is reported."""
        specs = self._program.graph_signature.output_specs
        for spec, result in zip(specs, results, strict=True):
            if spec.target in self._read and self._is_remembered(spec.kind.name, result):
                self._problem(f"assignment to {spec.target}", Origin(spec.target.rpartition(".")[0]), _REMEMBERS)
        return [result for result, spec in zip(results, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]

    def _is_remembered(self, kind: str, result: Any) -> bool:
        """Whether the next call would see it. Of weights rewritten from weights, a call has the checkpoint's."""
        if not isinstance(result, Value) or self._builder.node_of(result) is None:
            return False
        return kind == "BUFFER_MUTATION" or (kind == "PARAMETER_MUTATION" and self._follows_from_inputs(result))

    def _follows_from_inputs(self, result: Value) -> bool:
        waiting, seen = [result], {result}
        while waiting:
            value = waiting.pop()
            node = self._builder.node_of(value)
            if node is None and self._builder.is_input(value):
                return True
            fresh = [operand for operand in (node.operands if node else ()) if operand not in seen]
            seen.update(fresh)
            waiting += fresh
        return False

    def _argument(self, node: Any, spec: Any) -> Any:
        """A placeholder as an input, a parameter or a constant; a parameter that nothing uses stays out."""
        kind, state = spec.kind.name, self._program.state_dict
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if kind != "USER_INPUT" and not node.users:
            return None
        if kind != "USER_INPUT" and spec.target in self._program.constants and spec.target not in state:
            return self._held(self._program.constants[spec.target])
        try:
            type_ = tensor_type(node.meta["val"])
        except ValueError:
            self._problem(node.name, Origin(spec.target or node.name), _NO_TYPE)
            return _POISON
        if kind == "USER_INPUT":
            return self._builder.input(node.name, type_)
        return self._builder.parameter(self._names.get(spec.target, spec.target), type_)

    def _held(self, numbers: Any) -> Any:
        """Numbers that are known, as constants of the graph where the hardware has their type."""
        if isinstance(numbers, tuple | list):
            return [self._held(part) for part in numbers]
        if numbers.dtype is torch.complex64:
            return Complex(self._held(numbers.real.contiguous()), self._held(numbers.imag.contiguous()))
        try:
            return self._builder.constant(_numbers(numbers), tensor_type(numbers).dtype)
        except ValueError:
            return _Unrounded(numbers)

    def _rounded(self, operand: Any) -> Any:
        """A number that meets a computed tensor, in the type that such tensors have."""
        if not isinstance(operand, _Unrounded):
            return operand
        return self._held(operand.numbers.to(torch.complex64 if operand.numbers.is_complex() else torch.float32))

    def _run(self, module: Any, arguments: list[Any]) -> list[Any]:
        """Import the calls of one graph module; higher-order operators come back here for their bodies."""
        known: dict[Any, Any] = {}
        remaining = iter(arguments)
        needed, host = _needed(module.graph), HostValues(module.graph, self._lifted)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(remaining)
            elif node.op == "get_attr":
                known[node] = getattr(module, node.target)
            elif node.op == "call_function" and node in needed:
                known[node] = self._call(node, known, host)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], lambda used: known[used])
                return list(results) if isinstance(results, tuple | list) else [results]
        raise CaptureError("the traced program has no output")

    def _call(self, node: Any, known: Mapping[Any, Any], host: HostValues) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda used: known[used])
        if node.target.__name__ == "getitem":
            return self._part(node, *args)
        if _needs_host(node, args, kwargs):
            numbers = host.of(node)
            if numbers is not None:
                return self._held(numbers)
            args, kwargs = pytree.tree_map(self._rounded, (args, kwargs))
        poisoned = _POISON in pytree.tree_leaves((args, kwargs))
        if isinstance(node.target, torch._ops.OpOverload):
            return self._operator(node, args, kwargs, None if poisoned else host)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(node, args)
        if not poisoned:  # Python arithmetic on sizes, which are fixed unless they follow from something reported
            self._problem(str(node.target), origin_of(node.meta), _NO_IMPORTER)
        return _POISON

    def _part(self, node: Any, parts: Any, number: int) -> Any:
        """One of several results; an importer leaves out by-products that compiled programs have no use for."""
        if parts is _POISON or number < len(parts):
            return parts if parts is _POISON else parts[number]
        if node.users:
            self._problem(f"{node.args[0].target}, result {number}", origin_of(node.meta), _BY_PRODUCT)
        return _POISON

    def _region(self, node: Any, args: Any) -> Any:
        """A block under a context manager that does not change numbers is imported in place."""
        bodies = [position for position, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)]
        name = node.target.__name__
        harmless = name == "wrap_with_set_grad_enabled" or (name == "wrap_with_autocast" and args[2] is False)
        if not harmless or len(bodies) != 1:
            self._problem(name, origin_of(node.meta), "a block under this context or control flow is not compiled")
            return _POISON
        return self._run(args[bodies[0]], list(args[bodies[0] + 1 :]))

    def _operator(self, node: Any, args: Any, kwargs: Any, host: HostValues | None) -> Any:
        """One operator; `host` is missing if an operand could not be imported, which was reported."""
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
                return self._held(numbers)
            if importer is None or host:
                self._problem(str(node.target), origin, str(problem))
            return _POISON
        if isinstance(imported, _Poison):
            return imported
        if isinstance(imported, list):
            return [_agreed(site, value, type_) for value, type_ in zip(imported, site.results, strict=False)]
        return _agreed(site, _as_declared(site, imported, node.meta["val"]), site.result)

    def _problem(self, operator: str, origin: Origin, advice: str) -> None:
        self._problems[operator, origin, advice] += 1


def _bound(target: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments in the order of the operator's schema, defaults filled in."""
    schema = target._schema.arguments
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in schema[len(args) :])]


def _needed(graph: Any) -> set[Any]:
    """The calls whose results reach an output; what only an assertion reads decides nothing."""
    needed: set[Any] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update((node, *node.all_input_nodes))
    return needed


def _needs_host(node: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call takes or gives numbers of a type that the hardware does not have."""
    given = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(tensor, torch.Tensor) and tensor.dtype in _HOST_TYPES for tensor in given) or any(
        isinstance(operand, _Unrounded) for operand in pytree.tree_leaves((args, kwargs))
    )


def _as_declared(site: Site, imported: Any, result: Any) -> Any:
    """Casts between real and complex numbers add a part of zeros, or drop one."""
    if result.is_complex() and isinstance(imported, Value):
        return Complex(imported, site.filled(0, site.result))
    return imported.real if isinstance(imported, Complex) and not result.is_complex() else imported


def _result_types(result: Any) -> tuple[TensorType, ...]:
    parts = result if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise NotExpressible(_VALUE_ESCAPES)
    if not all(type(size) is int for part in parts for size in part.shape):
        raise NotExpressible(_SIZE_DEPENDS_ON_DATA)
    try:
        return tuple(tensor_type(part.real if part.dtype is torch.complex64 else part) for part in parts)
    except ValueError:
        raise NotExpressible(_NO_TYPE) from None


def _agreed(site: Site, value: Any, expected: TensorType) -> Any:
    """PyTorch's own verdict on the result is the last word on its element type, and a check on its shape."""
    if isinstance(value, Complex):
        return Complex(_agreed(site, value.real, expected), _agreed(site, value.imaginary, expected))
    if value.type.shape != expected.shape:
        raise CaptureError(f"an importer made {value.type} at {site.origin}, where PyTorch has {expected}")
    return site.cast(value, expected.dtype)


def _numbers(tensor: Any) -> Array:
    exact = tensor.float() if tensor.is_floating_point() else tensor
    numbers: Array = exact.detach().numpy()
    return numbers


def _named_outputs(structure: Any, name: str) -> Iterator[tuple[str, Value]]:
    """Outputs under the names that the model gives them; positions name what has none."""
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
