"""What is multiplied: rows, wherever they come from, and the weights that they meet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.lower import plan
from nxpipe.emulator.lower.ending import Ending, room_of
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.plan import Sizes
from nxpipe.emulator.lower.turned import chunks_of, load, must_turn, room_to_turn
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.work import Work, load_work, turning_work

Fill = Callable[[Block, Span], None]  # writes some rows, turned, into [128, chunks, rows]


class Rows(plan.Rows, Protocol):
    def begin(self) -> Fill:
        """With what all rows need at hand, for as long as the room around is there."""

    def block(self, height: int, turns: int) -> Block:
        """Room for so many, turned."""


@dataclass(frozen=True)
class Loaded:
    """Rows that lie in HBM."""

    k: Kernel
    view: View  # [rows, summed]
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        rows, summed = self.view.shape
        return rows, summed

    @property
    def run(self) -> int:
        return 1

    @property
    def kept(self) -> int:
        return 0

    @property
    def room(self) -> int:
        return room_to_turn(self.dtype) if self._must_turn else 0

    def begun(self, core: CoreSpec) -> Work:
        return Work()

    def block(self, height: int, turns: int) -> Block:
        return room_for(self.k, self, height, turns)

    def work(self, core: CoreSpec, height: int) -> Work:
        chunks = chunks_of(self.view.shape[1])
        loading = load_work(core, self.view.transposed((1, 0)), chunks, height)
        return loading + turning_work(core, self.dtype, chunks, height) if self._must_turn else loading

    def begin(self) -> Fill:
        return lambda turned, rows: load(self.k, turned, self.view.cut(rows).transposed((1, 0)))

    @property
    def _must_turn(self) -> bool:
        return must_turn(self.view.transposed((1, 0)))


def room_for(k: Kernel, rows: plan.Rows, height: int, turns: int) -> Block:
    return k.tile(rows.dtype, PARTITIONS, chunks_of(rows.shape[1]), height, turns=turns)


@dataclass(frozen=True)
class Factor:
    """What rows are multiplied by, and the type that the sums are rounded to."""

    result: Value  # or what ranks make of it together
    weight: View  # [summed, columns]
    bias: View | None
    dtype: DType
    out: DType


@dataclass(frozen=True)
class Sharing:
    """Of each run of rows, every rank has so many."""

    ranks: int
    rows: int


@dataclass(frozen=True)
class Part:
    """Factors whose results meet, and all that follows them."""

    factors: tuple[Factor, ...]
    ending: Ending
    note: int
    sharing: Sharing | None = None  # of ranks that add up the results

    @property
    def ranks(self) -> int:
        return self.sharing.ranks if self.sharing else 1

    @property
    def columns(self) -> int:
        return self.factors[0].weight.shape[1]

    @property
    def sizes(self) -> Sizes:
        biases = sum(factor.bias.dtype.itemsize for factor in self.factors if factor.bias)
        shares = self.ranks + 1 if self.sharing else 1
        results = sum(2 * factor.out.itemsize * shares for factor in self.factors)
        return Sizes(
            tuple(factor.weight for factor in self.factors),
            max((factor.dtype for factor in self.factors), key=lambda dtype: dtype.itemsize),
            2 * biases,
            results + room_of(self.ending),
            self.factors[0].out,
            self.ranks,
        )
