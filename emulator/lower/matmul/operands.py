"""Operands of a matmul kernel: the source of its rows, and the output groups with their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.grouping import RowSharding
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost, transpose_cost
from nxpipe.emulator.lower.matmul import tiling
from nxpipe.emulator.lower.matmul.tiling import TileCosts
from nxpipe.emulator.lower.transpose import chunks_of, load_matrix, must_transpose, transpose_bytes
from nxpipe.emulator.lower.view import View

LoadRows = Callable[[Block, Span], None]  # writes some rows, transposed, into [128, chunks, rows]


class LoadableRows(tiling.RowSource, Protocol):
    """Rows that a matmul kernel can load; `RowSource` states what that costs."""

    def begin(self) -> LoadRows:
        """Load what all rows need, until the end of the scope around; returns the function that loads some of them."""

    def block(self, height: int, buffers: int) -> Block:
        """Allocate space for transposed rows."""


@dataclass(frozen=True)
class HbmRows:
    """Rows in HBM."""

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
    def resident_bytes(self) -> int:
        return 0

    @property
    def transient_bytes(self) -> int:
        return transpose_bytes(self.dtype) if self._must_turn else 0

    def begun(self, core: CoreSpec) -> KernelCost:
        return KernelCost()

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.k, self, height, buffers)

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        chunks = chunks_of(self.view.shape[1])
        loading = load_cost(core, self.view.transposed((1, 0)), chunks, height)
        return loading + transpose_cost(core, self.dtype, chunks, height) if self._must_turn else loading

    def begin(self) -> LoadRows:
        return lambda transposed, rows: load_matrix(self.k, transposed, self.view.cut(rows).transposed((1, 0)))

    @property
    def _must_turn(self) -> bool:
        return must_transpose(self.view.transposed((1, 0)))


def allocate_rows(k: Kernel, rows: tiling.RowSource, height: int, buffers: int) -> Block:
    return k.tile(rows.dtype, PARTITIONS, chunks_of(rows.shape[1]), height, buffers=buffers)


@dataclass(frozen=True)
class WeightOperand:
    """A weight with its bias, and the type to which the sums are rounded."""

    result: Value  # or what ranks make of it together
    weight: View  # [summed, columns]
    bias: View | None
    dtype: DType
    out: DType


@dataclass(frozen=True)
class OutputGroup:
    """Weights whose results meet in one epilogue."""

    factors: tuple[WeightOperand, ...]
    epilogue: Epilogue
    note: int
    sharing: RowSharding | None = None  # of ranks that add up the results

    @property
    def ranks(self) -> int:
        return self.sharing.ranks if self.sharing else 1

    @property
    def columns(self) -> int:
        return self.factors[0].weight.shape[1]

    @property
    def sizes(self) -> TileCosts:
        biases = sum(factor.bias.dtype.itemsize for factor in self.factors if factor.bias)
        shares = self.ranks + 1 if self.sharing else 1
        results = sum(2 * factor.out.itemsize * shares for factor in self.factors)
        return TileCosts(
            tuple(factor.weight for factor in self.factors),
            max((factor.dtype for factor in self.factors), key=lambda dtype: dtype.itemsize),
            2 * biases,
            results + epilogue_bytes(self.epilogue),
            self.factors[0].out,
            self.ranks,
        )
