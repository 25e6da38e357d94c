"""Constant folding by PyTorch during capture, with the same bits on every processor.

Models compute tables of positions in float64, or as complex numbers, before they round them to a type that the
hardware has. Where no input and no parameter takes part, that is host work, and only the rounded table is compiled.
PyTorch has one kernel for each set of vector instructions, so transcendental functions go through
`emulator.ops.portable`.
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
_SAYS_NO_NUMBER: Final = ("device", "dtype", "layout", "memory_format", "pin_memory")


class Portable(TorchDispatchMode):
    """Lets PyTorch say what a call returns, and puts in numbers that any processor would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        function = _FUNCTIONS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        operands = [each for each in tree_leaves((args, given)) if isinstance(each, torch.Tensor)]
        if function is None or "out" in given or not all(map(_is_known, operands)):
            return func(*args, **given)
        # Before the call, which may write its result over an operand.
        wide, named = tree_map(_widened, (args, {name: given[name] for name in given if name not in _SAYS_NO_NUMBER}))
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


_SMALL = 2**18  # elements: the mask of an image, and less
_FACTORIES = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)


class HostValues:
    """The results of the calls in one traced graph that depend on neither inputs nor parameters."""

    def __init__(self, graph: Any, constants: Mapping[Any, Any]) -> None:
        """`constants` are the numbers of those placeholders that have some."""
        self._graph = graph
        self._numbers: dict[Any, Any] = dict(constants)

    def of(self, node: Any) -> Any:
        """The result of a call, or nothing if it is not known before the program runs."""
        if node not in self._fixed:
            return None
        for each in _in_order(node, self._numbers):
            args, kwargs = torch.fx.map_arg((each.args, each.kwargs), self._numbers.__getitem__)
            with Portable():
                self._numbers[each] = each.target(*args, **kwargs)
        return self._numbers[node]

    @cached_property
    def _fixed(self) -> set[Any]:
        fixed: set[Any] = set(self._numbers)
        for node in self._graph.nodes:
            if node.op == "call_function" and _repeatable(node) and fixed.issuperset(node.all_input_nodes):
                fixed.add(node)
        return fixed


def _repeatable(node: Any) -> bool:
    """Whether the same call always gives the same tensors."""
    if node.target.__name__ == "getitem":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable


def _in_order(node: Any, known: Mapping[Any, Any]) -> list[Any]:
    """A call after all that it needs and that is not known yet."""
    ordered: dict[Any, None] = {}
    waiting = [node]
    while waiting:
        first = waiting[-1]
        missing = [used for used in first.all_input_nodes if used not in known and used not in ordered]
        if missing:
            waiting += missing
        else:
            waiting.pop()
            if first not in known:
                ordered[first] = None
    return list(ordered)


@contextlib.contextmanager
def track_small_constants() -> Iterator[None]:
    """While tracing, let PyTorch follow the numbers of constants as far as they are small tables.

    It does so for single numbers by itself, for instance in `torch.tensor(3).item()`; the grid of an image has more.
    A fake tensor forgets its numbers when anything unknown is written to it or to a view of it.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = _SMALL
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def retry_with_known_constants(trace: Callable[[], Graph]) -> Graph:
    """Trace; a model that asks for a tensor's value is traced once more with the numbers of its own tables known.

    Then ranges and fillings are numbers in the graph rather than operators, so it is not the first thing to try. What
    depends on an input stays unknown, and the first answer stands.
    """
    try:
        return trace()
    except (GraphBreak, UnsupportedOperators) as refusal:
        if isinstance(refusal, UnsupportedOperators) and not any(map(_asks_for_a_value, refusal.findings)):
            raise
        try:
            with _KnownFactories():
                return trace()
        except CompileError:
            raise refusal from None


def _asks_for_a_value(finding: Finding) -> bool:
    return finding.operator.startswith(("aten._local_scalar_dense", "aten.index", "aten.repeat_interleave"))


class _KnownFactories(TorchFunctionMode):
    """Makes small ranges and fillings as `torch.tensor` makes constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func not in _FACTORIES or "out" in given:
            return func(*args, **given)
        with _disable_current_modes():
            numbers = func(*args, **(given | {"device": "cpu"}))
        return torch.ops.aten.lift_fresh(numbers) if numbers.numel() <= _SMALL else func(*args, **given)
