"""Operators between neighbours that are divided among ranks: what they are given comes from linear layers that the
shard pass divides by outputs, and what they make goes into one that it divides by inputs.

The layers multiply by the identity, so that whatever an operator is drawn with reaches it, and what it makes is seen
again, to the bit.
"""

from collections.abc import Sequence
from random import Random

import numpy as np

from nxpipe.emulator.compile import emit, shard_graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Cast, Linear, Operator, Transpose, Unary, Where
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.shard import divide
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks, degree_of, execute
from nxpipe.emulator.run.isa import Isa
from tests.lower.harness import ORDERS, Case, require_close, require_equal, unit
from tests.lower.sweep import GENERATIONS, Draw, Row, drawn
from tests.lower.test_reduce import SUMS

DEGREES = (1, 2, 4)
EXACT = 2**24  # whole numbers that a float32 layer preserves


class DividedDraw(Draw):
    """Sizes that ranks can divide, and inputs from sharded layers."""

    def shape(self, least: int = 1, most: int = 4, largest: int = 9) -> tuple[int, ...]:
        sizes = [self.integer(1, largest) for _ in range(self.integer(least, most))]
        return tuple(4 * -(-size // 4) if self.integer(0, 1) else size for size in sizes)

    def size(self) -> int:
        return self.one_of((self.integer(1, 12), 4 * self.integer(1, 4), 4 * self.integer(25, 75)))

    def _input(self, array: Array, dtype: DType) -> Value:
        exact = bool(np.isfinite(array).all() and np.abs(array.astype(np.float64)).max(initial=0) <= EXACT)
        if not array.ndim or not array.size or not exact or self.integer(0, 3) == 0:
            return super()._input(array, dtype)
        axis = self.integer(0, array.ndim - 1)
        moved = np.moveaxis(array, axis, -1).astype(np.float32)
        value = self._layer(super()._input(moved, DType.FLOAT32))
        order = list(range(array.ndim - 1))
        order.insert(axis, array.ndim - 1)
        return self._cast(self.builder.add(Transpose(tuple(order)), value), dtype)

    def divided_case(self, result: Value) -> Case:
        """The result, and the output of the next layer; and two layers that can be sharded for any result."""
        self.builder.output("result", result)
        if result.type.elements and result.type.rank:
            axis = self.integer(0, result.type.rank - 1)
            order = (*(other for other in range(result.type.rank) if other != axis), axis)
            moved = self._finite(self.builder.add(Transpose(order), self._cast(result, DType.FLOAT32)))
            kept = result.type.dtype if result.type.dtype.is_float else DType.FLOAT32
            self.builder.output("next", self._cast(self._layer(moved), kept))
        beside = super()._input(self.numbers((3, 8), DType.FLOAT32), DType.FLOAT32)
        self.builder.output("beside", self._layer(self._layer(beside)))
        return Case(self.builder.build(), self.parameters, self.inputs)

    def _finite(self, value: Value) -> Value:
        """Finite values: a row with a NaN has no sum; before v3 neither have its neighbours."""
        is_finite = self.builder.add(Unary("isfinite"), value)
        return self.builder.add(Where(), is_finite, value, self.builder.scalar(0.0))

    def _layer(self, value: Value) -> Value:
        weight = self.parameter(np.eye(value.type.shape[-1], dtype=np.float32), DType.FLOAT32)
        return self.builder.add(Linear(DType.FLOAT32), value, weight)

    def _cast(self, value: Value, dtype: DType) -> Value:
        return value if value.type.dtype is dtype else self.builder.add(Cast(dtype), value)


def require_equal_on_ranks(of: Case, row: Row, degree: int, core: str, orders: Sequence[str] = ORDERS) -> None:
    """Require that the ranks' programs agree with their graphs, and with the unsharded graph."""
    program = shard_graph(of.graph, PassOptions(tensor_parallel=degree))
    executable = emit(program, core)
    expected = LoadedProgram(program, LoadedRanks(program.graph, of.parameters)).run(of.inputs)
    whole = execute(of.graph, of.parameters, of.inputs)
    rounded = _rounding_of_partial_sums(of, degree) if row.name in SUMS else dict.fromkeys(whole, 0.0)
    for order in orders:
        found = LoadedProgram(program, Isa(executable, order=order).load(of.parameters)).run(of.inputs)
        for name, value in of.graph.outputs.items():
            where = f"{name} on {degree} ranks of {core}"
            require_close(where, value.type.dtype, found[name], expected[name], row.units, row.noise)
            noise = row.noise + rounded[name]
            require_close(f"{where}, undivided", value.type.dtype, found[name], whole[name], row.units, noise)


def _rounding_of_partial_sums(of: Case, degree: int) -> dict[str, float]:
    """The rounding error of the partial sums before the all-reduce, which may be larger than the sum."""
    magnitudes = {name: np.abs(array) if array.dtype.kind == "f" else array for name, array in of.inputs.items()}
    largest = execute(of.graph, of.parameters, magnitudes)
    types = {name: value.type.dtype for name, value in of.graph.outputs.items()}
    return {
        name: degree * float(unit(np.max(np.abs(array), initial=0), types[name])) if types[name].is_float else 0.0
        for name, array in largest.items()
    }


def sweep_divided(kind: type[Operator], rows: Sequence[Row], examples: int) -> None:
    """Members of an operator's family in turn, on one generation each, on one, two or four ranks."""

    def hold(chance: Random) -> None:
        draw = DividedDraw(chance)
        row, core = draw.one_of([row for row in rows if row.kind is kind]), draw.one_of(GENERATIONS)
        case = draw.divided_case(row.draw(draw))
        if degree_of(case.graph) > 1:  # a collective operator
            require_equal(case, units=row.units, noise=row.noise, cores=(core,))
            return
        possible = divide(case.graph).degrees()
        wanted = draw.one_of(DEGREES)
        degree = max(entry for entry in DEGREES if entry <= wanted and entry in possible)
        require_equal_on_ranks(case, row, degree, core)

    drawn(examples, hold)
