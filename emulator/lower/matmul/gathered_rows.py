"""Gathered rows: rows of which each rank has a share, exchanged from SBUF to SBUF.

Each rank transposes its own rows and receives those of the others transposed. So no row is transposed twice, and the
whole of them need never be in HBM.
"""

from dataclasses import dataclass, replace

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveAllGather
from nxpipe.emulator.isa.cost import START_NS, cost, moved
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Memory, Tile, contiguous
from nxpipe.emulator.lower.grouping import RowSharding
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, RunMajorBlock, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.operands import (
    HbmRows,
    LoadableRows,
    LoadRows,
    OutputGroup,
    allocate_rows,
)
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import View, line, whole


@dataclass(frozen=True)
class GatheredRows:
    """The rows of all ranks, in runs of which each rank has an equal part."""

    k: Kernel
    own: LoadableRows
    sharing: RowSharding

    @property
    def shape(self) -> tuple[int, int]:
        rows, summed = self.own.shape
        return rows * self.sharing.ranks, summed

    @property
    def dtype(self) -> DType:
        return self.own.dtype

    @property
    def run(self) -> int:
        return self.sharing.rows * self.sharing.ranks

    @property
    def fits(self) -> bool:
        """True if SBUF has space for the rank's own rows, transposed, in whole chunks: a partial chunk would leave
        undefined bytes on the other partitions."""
        whole = self.shape[1] % PARTITIONS == 0 < self.shape[1]
        budget = self.resident_bytes + self.own.resident_bytes + self.own.transient_bytes
        return whole and self.dtype.itemsize > 1 and budget <= self.k.left(Memory.SBUF)

    @property
    def resident_bytes(self) -> int:
        return chunks_of(self.shape[1]) * self.own.shape[0] * self.dtype.itemsize

    @property
    def transient_bytes(self) -> int:
        return 0

    def begun(self, core: CoreSpec) -> KernelCost:
        return self.own.begun(core) + self.own.work(core, self.own.shape[0])

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        size = chunks_of(self.shape[1]) * self.sharing.rows
        own = Tile(Memory.SBUF, self.dtype, 0, PARTITIONS, Affine(), contiguous(size))
        run = replace(own, axes=contiguous(size * self.sharing.ranks))
        gather = cost(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=run, src=own), core).ns
        return KernelCost(links=(START_NS + gather) * (height // self.run))

    def block(self, height: int, buffers: int) -> Block:
        return self._tiled(allocate_rows(self.k, self, height, buffers))

    def begin(self) -> LoadRows:
        own = self._tiled(allocate_rows(self.k, self.own, self.own.shape[0], 1))
        with self.k.scope():
            self.own.begin()(own, (0, self.own.shape[0]))

        def fill(transposed: Block, rows: Span) -> None:
            assert isinstance(transposed, RunMajorBlock)  # as `block` made it
            for at, count in self.k.spans(rows[1], self.run):
                mine = own.run(divided(at + rows[0], self.sharing.ranks), self.sharing.rows)
                gather = CollectiveAllGather(engine=Engine.COLLECTIVE, dst=transposed.run(at, count), src=mine)
                self.k.emit(gather)

        return fill

    def _tiled(self, block: Block) -> RunMajorBlock:
        return RunMajorBlock(block.memory, block.dtype, block.partitions, block.shape, block.offset, self.sharing.rows)


def write_gathered_matmuls(
    low: Lowering, own: View, dtype: DType, parts: tuple[OutputGroup, ...], sharing: RowSharding
) -> None:
    """Emit matmuls of all ranks' rows, which are exchanged as they are needed; or, where that is cheaper or SBUF has no
    space, gathered in HBM first."""
    k = low.k
    own = low.packed(own)
    near = GatheredRows(k, HbmRows(k, own, dtype), sharing)
    all_ = whole(0, own.dtype, near.shape)
    storing = KernelCost(bytes=moved(all_.far()))
    later = MatmulKernel(k, HbmRows(k, all_, dtype), parts).ns + storing.ns(k.core)
    if near.fits and MatmulKernel(k, near, parts).ns <= later:
        MatmulKernel(k, near, parts).write()
        return
    all_ = low.scratch(own.dtype, near.shape)
    for row, count in k.spans(near.shape[0], near.run):
        mine = own.cut((divided(row, sharing.ranks), sharing.rows))
        lines = (line(all_.cut((row, count))), line(mine))
        k.emit(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=lines[0], src=lines[1]))
    MatmulKernel(k, HbmRows(k, all_, dtype), parts).write()
