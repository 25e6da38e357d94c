"""The operator: a frozen record of its attributes with its shape rule and its numerics."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, ClassVar

from nxpipe.emulator.errors import IllTyped, IndexOutOfRange
from nxpipe.emulator.ir.types import DType, TensorType, is_reasonable
from nxpipe.emulator.numerics import Array

OPERATORS: dict[str, type["Operator"]] = {}

# The types of an operator's attributes: exactly those that the canonical encoding of a graph supports.
Attribute = bool | int | float | str | DType | tuple[int, ...]


@dataclass(frozen=True)
class Operator(ABC):
    """An operator with one result. Attributes are the fields of the subclass; operands are arguments of its methods."""

    name: ClassVar[str]
    # The number of leading operands that are inputs of the tensor engine; autocast narrows exactly these.
    matrix_operands: ClassVar[int] = 0
    # True if the result consists of unchanged operand elements, so that no rounding is needed.
    moves_only: ClassVar[bool] = False

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.name = name
        OPERATORS[name] = cls

    @property
    def label(self) -> str:
        """The name in listings: the function of a family such as `unary`, else the operator's name."""
        return str(getattr(self, "function", self.name))

    # Subclasses declare their operands by name, which type checkers accept only for an open signature here.
    @abstractmethod
    def infer(self, *operands: Any, **_: Any) -> TensorType:
        """The shape rule: the result's type from the operands' types. Raises IllTyped."""

    @abstractmethod
    def compute(self, *operands: Any, **_: Any) -> Array:
        """The numerics. The executor rounds the result to its element type afterwards."""


# Layers repeat, so nearly every result type of a deep model is a cache hit.
@lru_cache(maxsize=1 << 14)
def result_type(op: Operator, operands: tuple[TensorType, ...]) -> TensorType:
    """The type of `op` applied to `operands`, with the checks common to all operators."""
    fewest, most = _arity(type(op))
    if not fewest <= len(operands) <= most:
        raise IllTyped(f"{op.label} takes {_span(fewest, most)} operands, but was given {len(operands)}")
    inferred = op.infer(*operands)
    require(is_reasonable(inferred), op, f"the result {inferred} exceeds the size limit")
    return inferred


def _span(fewest: int, most: float) -> str:
    return str(fewest) if fewest == most else f"{fewest} or more" if most == float("inf") else f"{fewest} to {most}"


@cache
def _arity(kind: type[Operator]) -> tuple[int, float]:
    """The minimum and maximum number of operands, from the signature of the shape rule."""
    parameters = list(inspect.signature(kind.infer).parameters.values())[1:]
    fewest = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
    return fewest, float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters)


def require(condition: bool, op: Operator, otherwise: str) -> None:
    """Raise IllTyped with the message `otherwise` unless the condition holds."""
    if not condition:
        raise IllTyped(f"{op.label}: {otherwise}")


def require_axes(op: Operator, axes: Sequence[int], rank: int) -> None:
    """Require distinct, nonnegative axes within the rank."""
    require(
        all(0 <= axis < rank for axis in axes) and len(set(axes)) == len(axes),
        op,
        f"axes {tuple(axes)} do not exist, or repeat, in a tensor of rank {rank}",
    )


def broadcast_shape(op: Operator, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of several operands, by numpy's broadcasting rules."""
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        broadcast = {size for size in sizes if size != 1} or {1}
        require(len(broadcast) == 1, op, f"shapes {', '.join(map(str, shapes))} do not broadcast together")
        result.append(broadcast.pop())
    return tuple(result)


def require_indices(values: Array, size: int) -> None:
    """Raise IndexOutOfRange for indices outside of a table of `size` rows: hardware would read unrelated memory."""
    if values.size and (values.min() < 0 or values.max() >= size):
        out_of_range = values[(values < 0) | (values >= size)]
        raise IndexOutOfRange(int(out_of_range.flat[0]), size)


def attributes(op: Operator) -> dict[str, Attribute]:
    """An operator's attributes by name, in their declared order."""
    return {field.name: getattr(op, field.name) for field in fields(op)}
