"""The table from PyTorch's operators to ours, and what an importer works with.

An importer is a function of a `Site` (one call in the traced program) and the call's arguments in the order of the
operator's schema, defaults filled in, tensors already values of the graph. The type that PyTorch gives the result is
known, so shapes such as `view(-1, 64)` need no arithmetic here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from emulator.builder import GraphBuilder
from emulator.graph import Origin, Value
from emulator.ops import Binary, Broadcast, Cast, Operator, Reshape, Slice, Unary
from emulator.types import DType, TensorType

Importer = Callable[..., Value | list[Value]]
_Importer = TypeVar("_Importer", bound=Importer)

_IMPORTERS: dict[str, Importer] = {}


class NotExpressible(Exception):
    """A call uses an operator in a way that has no counterpart; the message is advice to the model's author."""


def imports(*names: str) -> Callable[[_Importer], _Importer]:
    """Register an importer for ATen operators: by name (`add`), or for one overload of it (`sum.dim_IntList`)."""

    def register(importer: _Importer) -> _Importer:
        for name in names:
            if name in _IMPORTERS:
                raise ValueError(f"operator {name} has two importers")
            _IMPORTERS[name] = importer
        return importer

    return register


def importer_of(target: Any) -> Importer | None:
    """The importer of an operator overload, the overload's own before that of all overloads.

    Libraries' own operators go by their full names, as in `transformers::grouped_mm_fallback`.
    """
    packet, _, overload = target.name().removeprefix("aten::").partition(".")
    return _IMPORTERS.get(f"{packet}.{overload or 'default'}") or _IMPORTERS.get(packet)


def is_known(target: Any) -> bool:
    """Whether the importer takes this operator as it is; assertions it takes by leaving them out."""
    return importer_of(target) is not None or states_a_fact(target)


def states_a_fact(target: Any) -> bool:
    """Assertions and sizes: what they say about shapes and types, the shape rules establish anyway."""
    return str(target.name()).startswith(("aten::_assert", "aten::sym_"))


@dataclass(frozen=True)
class Site:
    """One call of the traced program: the types that PyTorch says it returns, and where it came from."""

    builder: GraphBuilder
    results: tuple[TensorType, ...]
    origin: Origin

    @property
    def result(self) -> TensorType:
        return self.results[0]

    def emit(self, op: Operator, *operands: Value) -> Value:
        return self.builder.add(op, *operands, origin=self.origin)

    def value(self, operand: Value | float) -> Value:
        """A tensor as it is, a Python number as a constant."""
        return operand if isinstance(operand, Value) else self.builder.scalar(operand)

    def unary(self, function: str, x: Value) -> Value:
        return self.emit(Unary(function), x)

    def binary(self, function: str, a: Value | float, b: Value | float) -> Value:
        return self.emit(Binary(function), self.value(a), self.value(b))

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.type.dtype is dtype else self.emit(Cast(dtype), x)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.type.shape == tuple(shape) else self.emit(Reshape(tuple(shape)), x)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.type.shape == tuple(shape) else self.emit(Broadcast(tuple(shape)), x)

    def filled(self, number: float, type_: TensorType) -> Value:
        return self.broadcast(self.builder.scalar(number, type_.dtype), type_.shape)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """A window on one axis, all of the others."""
        starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
        starts[axis], stops[axis], steps[axis] = start, stop, step
        return self.emit(Slice(tuple(starts), tuple(stops), tuple(steps)), x)


def given(operands: Sequence[Value | None]) -> list[Value]:
    """Optional operands come last and are left out."""
    return [operand for operand in operands if operand is not None]


def axis_of(x: Value, axis: int) -> int:
    """PyTorch counts axes from the end too; the graph does not."""
    return axis % max(x.type.rank, 1)


def axes_of(x: Value, axes: Sequence[int] | int | None) -> tuple[int, ...]:
    """The axes of a reduction in order; none means all."""
    if isinstance(axes, int):
        axes = (axes,)
    return tuple(sorted(axis_of(x, axis) for axis in axes)) if axes else tuple(range(x.type.rank))
