"""Random graphs: tensors of every type behind views, to cover all strides.

Hypothesis provides the random generator of an example, not each of its choices: it would repeat small shapes, so that
two hundred examples have eighty different ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, round_to
from nxpipe.emulator.ops import Operator, Slice, Transpose
from tests.lower.harness import ORDERS, Case, require_equal

T = TypeVar("T")

GENERATIONS = ("v2", "v3", "v4")
FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
BYTES = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
UNSIGNED = (DType.UINT32, DType.UINT16, DType.UINT8)
INTEGERS = (DType.INT64, DType.INT32, DType.INT16, DType.INT8, *UNSIGNED)


class Draw:
    """The generator of one example."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.builder = GraphBuilder()
        self.inputs: dict[str, Array] = {}
        self.parameters: dict[str, Array] = {}
        self.random = np.random.default_rng(self.integer(0, 2**32 - 1))

    def integer(self, low: int, high: int) -> int:
        return self._chance.randint(low, high)

    def one_of(self, choices: Sequence[T]) -> T:
        return self._chance.choice(choices)

    def shape(self, least: int = 1, most: int = 4, largest: int = 9) -> tuple[int, ...]:
        """A mostly small shape, sometimes with an axis of more than 128 partitions."""
        sizes = [self.integer(1, largest) for _ in range(self.integer(least, most))]
        if sizes and self.integer(0, 4) == 0:
            sizes[self.integer(0, len(sizes) - 1)] = self.integer(120, 300)
        return tuple(sizes)

    def size(self) -> int:
        """The size of an axis: mostly small, sometimes around the number of partitions."""
        return self.integer(1, 12) if self.integer(0, 2) else self.integer(100, 300)

    def numbers(self, shape: tuple[int, ...], dtype: DType, most: int = 40) -> Array:
        """Floats, half of them whole, and integers away from the limits of 32 bits."""
        if dtype is DType.BOOL:
            return self.random.random(shape) < 0.5
        if dtype.is_integer:
            least = 0 if np.iinfo(dtype.value).min == 0 else -most
            return self.random.integers(least, most + 1, shape).astype(dtype.held)
        whole = self.random.integers(-most, most + 1, shape).astype(np.float32)
        mixed = np.where(self.random.random(shape) < 0.5, whole, self.random.normal(size=shape) * 3)
        return round_to(mixed.astype(np.float32), dtype)

    def factors(self, shape: tuple[int, ...], dtype: DType, *, whole: bool) -> Array:
        """Factors of products: whole numbers, whose sums are exact in any order, or any."""
        if whole:
            return self.random.integers(-2, 3, shape).astype(np.float32)
        return round_to(self.random.normal(size=shape).astype(np.float32), dtype)

    def tensor(self, shape: tuple[int, ...], dtype: DType, most: int = 40, numbers: Array | None = None) -> Value:
        """An input as it is, with its axes in another order, or as part of a larger one."""
        array = self.numbers(shape, dtype, most) if numbers is None else numbers
        how = self.integer(0, 3) if shape else 0
        if how == 2:
            order = tuple(self.random.permutation(len(shape)).tolist())
            lies = self._input(array.transpose(np.argsort(order)), dtype)
            return self.builder.add(Transpose(tuple(np.argsort(np.argsort(order)).tolist())), lies)
        if how == 3:
            step = self.integer(1, 2)
            larger = np.zeros(tuple(size * step + 2 for size in shape), array.dtype)
            window = tuple(slice(1, 1 + size * step, step) for size in shape)
            larger[window] = array
            rank = len(shape)
            op = Slice((1,) * rank, tuple(1 + size * step for size in shape), (step,) * rank)
            return self.builder.add(op, self._input(larger, dtype))
        return self._input(array, dtype)

    def parameter(self, array: Array, dtype: DType) -> Value:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = array
        return self.builder.parameter(name, TensorType(array.shape, dtype))

    def _input(self, array: Array, dtype: DType) -> Value:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = np.ascontiguousarray(array).reshape(array.shape)
        return self.builder.input(name, TensorType(array.shape, dtype))

    def case(self, result: Value) -> Case:
        self.builder.output("result", result)
        return Case(self.builder.build(), self.parameters, self.inputs)


@dataclass(frozen=True)
class Row:
    """An operator, or a member of a family, in a table: how it is drawn, and how far its result may be off: so many
    units of the last place, and so much beside."""

    name: str
    kind: type[Operator]
    draw: Callable[[Draw], Value]
    units: float = 0
    noise: float = 0


def drawn(examples: int, hold: Callable[[Random], None]) -> None:
    """So many examples. A failing one is reported by its seed and not shrunk, because a core is too slow for that."""
    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    limits(given(st.randoms(use_true_random=True))(hold))()


def sweep(row: Row, examples: int) -> None:
    """Each example on one generation, in two orders."""

    def hold(chance: Random) -> None:
        draw = Draw(chance)
        case = draw.case(row.draw(draw))
        assert any(isinstance(node.op, row.kind) for node in case.graph.nodes)
        require_equal(case, units=row.units, noise=row.noise, cores=(draw.one_of(GENERATIONS),), orders=ORDERS)

    drawn(examples, hold)
