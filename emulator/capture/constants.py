"""Constant folding by PyTorch during capture, with the same bits on every processor.

Models compute position tables in float64 or complex numbers before they round them to a type of the hardware. Without
inputs and parameters among the operands this is done on the host, and only the rounded table is compiled. PyTorch's
kernels differ between vector instruction sets, so transcendental functions are computed by `emulator.ops.portable`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from nxpipe.emulator.errors import CompileError, Finding, GraphBreak, UnsupportedOperators
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ops.portable import WIDE

_ROUNDED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NOT_NUMERIC: Final = ("device", "dtype", "layout", "memory_format", "pin_memory")


class Portable(TorchDispatchMode):
    """Dispatch mode that overwrites the results of PyTorch's calls with values that are equal on every processor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        function = _FUNCTIONS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        operands = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if function is None or "out" in given or not all(map(_is_known, operands)):
            return func(*args, **given)
        # Operands are copied before the call, which may overwrite one of them.
        wide, named = tree_map(_widened, (args, {name: given[name] for name in given if name not in _NOT_NUMERIC}))
        result = func(*args, **given)
        if result.dtype in _ROUNDED and _is_known(result):
            with np.errstate(all="ignore"):
                numbers = np.asarray(function(*wide, **named))
            kind = np.float64 if result.dtype is torch.float64 else np.float32
            result.copy_(torch.from_numpy(np.array(np.broadcast_to(numbers, result.shape), kind)))
        return result


def _is_known(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    exact = value.double() if value.dtype in (torch.bfloat16, torch.float16) else value
    return exact.detach().resolve_conj().resolve_neg().numpy().astype(WIDE)


def _arange(*limits: Any) -> Any:
    start, end, step = (0, *limits, 1) if len(limits) == 1 else (*limits, 1)[:3]
    return start + WIDE(step) * np.arange(int(np.ceil((end - start) / step)))


def _linspace(start: Any, end: Any, steps: int) -> Any:
    return start + (end - WIDE(start)) * np.arange(steps) / max(steps - 1, 1)


def _power(base: Any, exponent: Any) -> Any:
    return np.power(WIDE(base) if isinstance(base, int | float) else base, exponent)


def _reduction(fold: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        axes = dim if isinstance(dim, int) else tuple(dim or range(x.ndim))
        return fold(x, axis=axes, keepdims=keepdim)

    return reduced


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "acos": np.arccos,
    "arange": _arange,
    "asin": np.arcsin,
    "atan": np.arctan,
    "bmm": np.matmul,
    "cos": np.cos,
    "cosh": np.cosh,
    "cumsum": lambda x, dim: np.cumsum(x, axis=dim),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "linspace": _linspace,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "matmul": np.matmul,
    "mean": _reduction(np.mean),
    "mm": np.matmul,
    "pow": _power,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "sinh": np.sinh,
    "sum": _reduction(np.sum),
    "tan": np.tan,
    "tanh": np.tanh,
}


_SMALL = 2**18  # elements: up to the mask of an image
_FACTORIES = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)


class HostValues:
    """The values of calls of an FX graph that depend on neither inputs nor parameters."""

    def __init__(self, graph: Any, constants: Mapping[Any, Any]) -> None:
        """`constants` are the tensors of lifted constant placeholders."""
        self._graph = graph
        self._numbers: dict[Any, Any] = dict(constants)

    def of(self, node: Any) -> Any:
        """The result of a call; None if it is not known at compile time."""
        if node not in self._fixed:
            return None
        for call in _in_order(node, self._numbers):
            args, kwargs = torch.fx.map_arg((call.args, call.kwargs), self._numbers.__getitem__)
            with Portable():
                self._numbers[call] = call.target(*args, **kwargs)
        return self._numbers[node]

    @cached_property
    def _fixed(self) -> set[Any]:
        fixed: set[Any] = set(self._numbers)
        for node in self._graph.nodes:
            if node.op == "call_function" and _repeatable(node) and fixed.issuperset(node.all_input_nodes):
                fixed.add(node)
        return fixed


def _repeatable(node: Any) -> bool:
    """True if a call is deterministic and without side effects."""
    if node.target.__name__ == "getitem":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable


def _in_order(node: Any, known: Mapping[Any, Any]) -> list[Any]:
    """A call and the unevaluated calls that it depends on, in topological order."""
    ordered: dict[Any, None] = {}
    stack = [node]
    while stack:
        first = stack[-1]
        missing = [used for used in first.all_input_nodes if used not in known and used not in ordered]
        if missing:
            stack += missing
        else:
            stack.pop()
            if first not in known:
                ordered[first] = None
    return list(ordered)


@contextlib.contextmanager
def track_small_constants() -> Iterator[None]:
    """Raise the size up to which fake tensors carry the value of a constant, to that of small tables.

    PyTorch does so for single elements, for instance in `torch.tensor(3).item()`; the grid of an image has more. A fake
    tensor drops its value when an unknown value is written to it or to a view of it.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = _SMALL
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def retry_with_known_constants(trace: Callable[[], Graph]) -> Graph:
    """Trace; if the model reads a tensor's value, trace again with the values of small factory calls known.

    The second trace has ranges and fills as constants rather than operators, so it is only the fallback. If it fails
    too, because the value depends on an input, the first error is raised.
    """
    try:
        return trace()
    except (GraphBreak, UnsupportedOperators) as refusal:
        if isinstance(refusal, UnsupportedOperators) and not any(map(_needs_value, refusal.findings)):
            raise
        try:
            with _KnownFactories():
                return trace()
        except CompileError:
            raise refusal from None


def _needs_value(finding: Finding) -> bool:
    return finding.operator.startswith(("aten._local_scalar_dense", "aten.index", "aten.repeat_interleave"))


class _KnownFactories(TorchFunctionMode):
    """Function mode in which small results of factory functions are constants, as those of `torch.tensor` are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func not in _FACTORIES or "out" in given:
            return func(*args, **given)
        with _disable_current_modes():
            numbers = func(*args, **(given | {"device": "cpu"}))
        return torch.ops.aten.lift_fresh(numbers) if numbers.numel() <= _SMALL else func(*args, **given)
