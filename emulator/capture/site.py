"""Import site: one call of the source model and the builder of the graph; and the size limit of constant tables.

The limit is checked before a table is allocated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Origin, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, Broadcast, Cast, Operator, Reshape, Slice, Unary

# The mask of 8,192 tokens takes 64 MiB. Creating a table takes several times its size for a moment.
MOST_TABLE_BYTES: Final = 256 * 2**20


def require_table_fits(sizes: Sequence[int], itemsize: int = 8) -> None:
    """Raise NotExpressible if a table of these sizes exceeds the limit. A size of zero counts as 1, because
    intermediate tables may lack that axis."""
    need = math.prod(max(size, 1) for size in sizes) * itemsize
    if need > MOST_TABLE_BYTES:
        raise NotExpressible(
            f"it needs a table of {need:,} bytes, and the limit is {MOST_TABLE_BYTES:,}; use smaller sizes"
        )


class NotExpressible(Exception):
    """A call cannot be expressed in the graph IR; the message advises the model's author."""


@dataclass(frozen=True)
class Site:
    """One call of the traced program: its result types as PyTorch computed them, and its origin."""

    builder: GraphBuilder
    results: tuple[TensorType, ...]
    origin: Origin

    @property
    def result(self) -> TensorType:
        return self.results[0]

    def emit(self, op: Operator, *operands: Value) -> Value:
        return self.builder.add(op, *operands, origin=self.origin)

    def value(self, operand: Value | float) -> Value:
        """A tensor unchanged, a Python number as a constant."""
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
        """A slice of one axis; the other axes are whole."""
        starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
        starts[axis], stops[axis], steps[axis] = start, stop, step
        return self.emit(Slice(tuple(starts), tuple(stops), tuple(steps)), x)


def present(operands: Sequence[Value | None]) -> list[Value]:
    """The operands without absent optional ones, which come last."""
    return [operand for operand in operands if operand is not None]
