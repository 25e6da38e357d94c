"""Import site: one call in the source model and the graph it is imported into; with the size limit of constant tables.

The limit is checked from sizes alone, before a table is allocated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Origin, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, Broadcast, Cast, Operator, Reshape, Slice, Unary

# The mask of 8,192 tokens takes 64 MiB. What makes a table holds several like it for a moment.
MOST_TABLE_BYTES: Final = 256 * 2**20


def require_table_fits(sizes: Sequence[int], itemsize: int = 8) -> None:
    """A table of these sizes is about to be made. A size of nothing excuses no other: parts of it are made first."""
    need = math.prod(max(size, 1) for size in sizes) * itemsize
    if need > MOST_TABLE_BYTES:
        raise NotExpressible(
            f"it needs a table of {need:,} bytes, and the limit is {MOST_TABLE_BYTES:,}; use smaller sizes"
        )


class NotExpressible(Exception):
    """A call uses an operator in a way that has no counterpart; the message is advice to the model's author."""


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


def present(operands: Sequence[Value | None]) -> list[Value]:
    """Optional operands come last and are left out."""
    return [operand for operand in operands if operand is not None]
