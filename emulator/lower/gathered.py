"""Rows of which each rank has its share: it turns its own, and takes those of all ranks as they have been turned. So
nobody turns what others have turned, and the whole of them need never lie in HBM."""

from dataclasses import dataclass, replace

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveAllGather
from nxpipe.emulator.isa.cost import START_NS, cost, moved
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Memory, Tile, contiguous
from nxpipe.emulator.lower.factors import Fill, Loaded, Part, Rows, Sharing, room_for
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span, Tiled
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.products import products_of, shared_by, sharing_of
from nxpipe.emulator.lower.together import Products
from nxpipe.emulator.lower.turned import chunks_of
from nxpipe.emulator.lower.view import View, line, whole
from nxpipe.emulator.lower.work import Work
from nxpipe.emulator.ops import AllGather as AllRanks


@dataclass(frozen=True)
class Gathered:
    """All ranks' rows, in runs of which each rank has a few."""

    k: Kernel
    own: Rows
    sharing: Sharing

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

    def begun(self, core: CoreSpec) -> Work:
        return self.own.begun(core) + self.own.work(core, self.own.shape[0])

    def work(self, core: CoreSpec, height: int) -> Work:
        size = chunks_of(self.shape[1]) * self.sharing.rows
        own = Tile(Memory.SBUF, self.dtype, 0, PARTITIONS, Affine(), contiguous(size))
        run = replace(own, axes=contiguous(size * self.sharing.ranks))
        gather = cost(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=run, src=own), core).ns
        return Work(links=(START_NS + gather) * (height // self.run))

    def block(self, height: int, turns: int) -> Block:
        return self._tiled(room_for(self.k, self, height, turns))

    def begin(self) -> Fill:
        own = self._tiled(room_for(self.k, self.own, self.own.shape[0], 1))
        with self.k.room():
            self.own.begin()(own, (0, self.own.shape[0]))

        def fill(turned: Block, rows: Span) -> None:
            assert isinstance(turned, Tiled)  # as `block` made it
            for at, count in self.k.spans(rows[1], self.run):
                mine = own.run(divided(at + rows[0], self.sharing.ranks), self.sharing.rows)
                gather = CollectiveAllGather(engine=Engine.COLLECTIVE, dst=turned.run(at, count), src=mine)
                self.k.emit(gather)

        return fill

    def _tiled(self, block: Block) -> Tiled:
        return Tiled(block.memory, block.dtype, block.partitions, block.shape, block.offset, self.sharing.rows)


def write_gathered(low: Lowering, own: View, dtype: DType, parts: tuple[Part, ...], sharing: Sharing) -> None:
    """Products of all ranks' rows, which are turned and exchanged as they are wanted, or meet in HBM first."""
    k = low.k
    own = low.packed(own)
    near = Gathered(k, Loaded(k, own, dtype), sharing)
    all_ = whole(0, own.dtype, near.shape)
    storing = Work(bytes=moved(all_.far()))
    later = Products(k, Loaded(k, all_, dtype), parts).ns + storing.ns(k.core)
    if near.fits and Products(k, near, parts).ns <= later:
        Products(k, near, parts).write()
        return
    all_ = low.scratch(own.dtype, near.shape)
    for row, count in k.spans(near.shape[0], near.run):
        mine = own.cut((divided(row, sharing.ranks), sharing.rows))
        lines = (line(all_.cut((row, count))), line(mine))
        k.emit(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=lines[0], src=lines[1]))
    Products(k, Loaded(k, all_, dtype), parts).write()


def products_gathered(low: Lowering, gather: Node, result: Value) -> list[Node]:
    """The products of what is gathered that can be made together with the result of a node, if all its readers are.
    Where ranks share their results again, it has to be in the same runs."""
    sharing = sharing_of(low, gather) if isinstance(gather.op, AllRanks) else None
    if sharing is None:
        return []
    readers = products_of(low, gather.result, result)
    sums = [sum_ for reader in readers if (sum_ := shared_by(low, reader)) is not None]
    alike = all(sharing_of(low, sum_) == sharing for sum_ in sums)
    return readers if alike and not low.is_needed(gather.result, readers) else []
