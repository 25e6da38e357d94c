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

# What an attribute of an operator may be; the canonical bytes know how to write exactly these.
Attribute = bool | int | float | str | DType | tuple[int, ...]


@dataclass(frozen=True)
class Operator(ABC):
    """One kind of work with one result. Attributes are the fields of the subclass; operands come as arguments."""

    name: ClassVar[str]
    # How many leading operands stream through the tensor engine; autocast narrows exactly these.
    matrix_operands: ClassVar[int] = 0
    # The result's elements are operand elements untouched, so there is nothing to round.
    moves_only: ClassVar[bool] = False

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.name = name
        OPERATORS[name] = cls

    @property
    def label(self) -> str:
        """The name under which a reader of a graph knows this work; families show their member's."""
        return str(getattr(self, "function", self.name))

    # Subclasses spell out their operands; a checker accepts that only against fully open arguments.
    @abstractmethod
    def infer(self, *operands: Any, **_: Any) -> TensorType:
        """The shape rule: the result's type from the operands' types, or IllTyped."""

    @abstractmethod
    def compute(self, *operands: Any, **_: Any) -> Array:
        """The numerics, before the executor settles the result in its element type."""


# Layers repeat, so nearly every result type of a deep model is a cache hit.
@lru_cache(maxsize=1 << 14)
def result_type(op: Operator, operands: tuple[TensorType, ...]) -> TensorType:
    """The type of `op` applied to `operands`, with the checks that are common to all operators."""
    fewest, most = _arity(type(op))
    if not fewest <= len(operands) <= most:
        raise IllTyped(f"{op.label} takes {_span(fewest, most)} operands, but was given {len(operands)}")
    inferred = op.infer(*operands)
    require(is_reasonable(inferred), op, f"the result {inferred} is absurdly large")
    return inferred


def _span(fewest: int, most: float) -> str:
    return str(fewest) if fewest == most else f"{fewest} or more" if most == float("inf") else f"{fewest} to {most}"


@cache
def _arity(kind: type[Operator]) -> tuple[int, float]:
    """Fewest and most operands, read off the signature of the shape rule."""
    parameters = list(inspect.signature(kind.infer).parameters.values())[1:]
    fewest = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
    return fewest, float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters)


def require(condition: bool, op: Operator, otherwise: str) -> None:
    """State a rule of an operator; `otherwise` is the message of its violation."""
    if not condition:
        raise IllTyped(f"{op.label}: {otherwise}")


def require_axes(op: Operator, axes: Sequence[int], rank: int) -> None:
    """Axes in a graph are counted from the front, and each appears once."""
    require(
        all(0 <= axis < rank for axis in axes) and len(set(axes)) == len(axes),
        op,
        f"axes {tuple(axes)} do not exist, or repeat, in a tensor of rank {rank}",
    )


def broadcast_shape(op: Operator, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that several operands stretch to, by numpy's rule."""
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        stretched = {size for size in sizes if size != 1} or {1}
        require(len(stretched) == 1, op, f"shapes {', '.join(map(str, shapes))} do not broadcast together")
        result.append(stretched.pop())
    return tuple(result)


def require_indices(values: Array, size: int) -> None:
    """Refuse indices that a table of `size` rows does not have: hardware would read unrelated memory."""
    if values.size and (values.min() < 0 or values.max() >= size):
        outside = values[(values < 0) | (values >= size)]
        raise IndexOutOfRange(int(outside.flat[0]), size)


def attributes(op: Operator) -> dict[str, Attribute]:
    """An operator's attributes by name, in their declared order."""
    return {field.name: getattr(op, field.name) for field in fields(op)}
