"""Rows of which each rank has its share: it turns its own, and takes those of all ranks as they have been turned. So
nobody turns what others have turned, and the whole of them need never lie in HBM."""

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
    """All ranks' rows, in runs of which each rank has a few."""

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
        """Whether a rank's own rows can be turned and kept: whole chunks of them, since a part of one has nothing on
        the other partitions."""
        whole = self.shape[1] % PARTITIONS == 0 < self.shape[1]
        room = self.kept + self.own.kept + self.own.room
        return whole and self.dtype.itemsize > 1 and room <= self.k.left(Memory.SBUF)

    @property
    def kept(self) -> int:
        return chunks_of(self.shape[1]) * self.own.shape[0] * self.dtype.itemsize

    @property
    def room(self) -> int:
        return 0

    def begun(self, core: CoreSpec) -> KernelCost:
        return self.own.begun(core) + self.own.work(core, self.own.shape[0])

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        size = chunks_of(self.shape[1]) * self.sharing.rows
        own = Tile(Memory.SBUF, self.dtype, 0, PARTITIONS, Affine(), contiguous(size))
        run = replace(own, axes=contiguous(size * self.sharing.ranks))
        gather = cost(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=run, src=own), core).ns
        return KernelCost(links=(START_NS + gather) * (height // self.run))

    def block(self, height: int, turns: int) -> Block:
        return self._tiled(allocate_rows(self.k, self, height, turns))

    def begin(self) -> LoadRows:
        own = self._tiled(allocate_rows(self.k, self.own, self.own.shape[0], 1))
        with self.k.scope():
            self.own.begin()(own, (0, self.own.shape[0]))

        def fill(turned: Block, rows: Span) -> None:
            assert isinstance(turned, RunMajorBlock)  # as `block` made it
            for at, count in self.k.spans(rows[1], self.run):
                mine = own.run(divided(at + rows[0], self.sharing.ranks), self.sharing.rows)
                gather = CollectiveAllGather(engine=Engine.COLLECTIVE, dst=turned.run(at, count), src=mine)
                self.k.emit(gather)

        return fill

    def _tiled(self, block: Block) -> RunMajorBlock:
        return RunMajorBlock(block.memory, block.dtype, block.partitions, block.shape, block.offset, self.sharing.rows)


def write_gathered_matmuls(
    low: Lowering, own: View, dtype: DType, parts: tuple[OutputGroup, ...], sharing: RowSharding
) -> None:
    """Products of all ranks' rows, which are turned and exchanged as they are wanted, or meet in HBM first."""
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
