"""Numbers that follow from constants alone, computed by PyTorch while compiling.

Models make tables of positions in float64, or as complex numbers, before they round them to a type that the hardware
has. Where no input and no parameter takes part, that is work for the host, and only the rounded table is compiled.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from nxpipe.emulator.capture.portable import Portable
from nxpipe.emulator.errors import CompileError, Finding, GraphBreak, UnsupportedOperators
from nxpipe.emulator.ir.graph import Graph

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
def small_constants_known() -> Iterator[None]:
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


def with_constants_if_needed(trace: Callable[[], Graph]) -> Graph:
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
