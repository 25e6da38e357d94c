"""Graphs drawn by hypothesis: tensors of every type that come through views, so that no stride goes untried."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emulator.builder import GraphBuilder
from emulator.graph import Value
from emulator.numerics import Array, round_to
from emulator.ops import Slice, Transpose
from emulator.types import DType, TensorType
from tests.lower.harness import CORES, ORDERS, Case, require_equal

T = TypeVar("T")

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
INTEGERS = (DType.INT64, DType.INT32, DType.INT8, DType.UINT8)


class Draw:
    """One example in the making."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.builder = GraphBuilder()
        self.inputs: dict[str, Array] = {}
        self.parameters: dict[str, Array] = {}
        self.random = np.random.default_rng(self.integer(0, 2**32 - 1))

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def one_of(self, choices: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(choices))

    def shape(self, least: int = 1, most: int = 4, largest: int = 9) -> tuple[int, ...]:
        """Mostly small, now and then with an axis of more than there are partitions."""
        sizes = [self.integer(1, largest) for _ in range(self.integer(least, most))]
        if sizes and self.integer(0, 4) == 0:
            sizes[self.integer(0, len(sizes) - 1)] = self.integer(120, 300)
        return tuple(sizes)

    def numbers(self, shape: tuple[int, ...], dtype: DType, most: int = 40) -> Array:
        """Floats half of which are whole, integers that keep clear of 32 bits' limits."""
        if dtype is DType.BOOL:
            return self.random.random(shape) < 0.5
        if dtype.is_integer:
            least = 0 if np.iinfo(dtype.value).min == 0 else -most
            return self.random.integers(least, most + 1, shape).astype(dtype.held)
        whole = self.random.integers(-most, most + 1, shape).astype(np.float32)
        mixed = np.where(self.random.random(shape) < 0.5, whole, self.random.normal(size=shape) * 3)
        return round_to(mixed.astype(np.float32), dtype)

    def tensor(self, shape: tuple[int, ...], dtype: DType, most: int = 40, numbers: Array | None = None) -> Value:
        """An input, seen as it lies, with its axes in another order, or as part of a larger one."""
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
    """An operator in a table, with how many units of the last place its result may be off."""

    name: str
    draw: Callable[[Draw], Value]
    units: float = 0
    noise: float = 0


def sweep(row: Row, examples: int) -> None:
    """Each example on one generation, in two orders. A failing one is not made smaller: a core is too slow for that."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        draw = Draw(data)
        case = draw.case(row.draw(draw))
        require_equal(case, units=row.units, noise=row.noise, cores=(draw.one_of(CORES),), orders=ORDERS)

    hold()
