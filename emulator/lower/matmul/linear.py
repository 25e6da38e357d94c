"""Matmuls of rows by weights, alone or batched; matmuls that read the same rows are emitted as one kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveAllGather
from nxpipe.emulator.isa.cost import START_NS, cost, moved
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile, contiguous
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import CopyPredicated, Memset, TensorCopy, TensorScalar
from nxpipe.emulator.lower.epilogue import Epilogue, epilogue_bytes
from nxpipe.emulator.lower.grouping import EpilogueFusion, RowSharding, has_one_weight
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, RunMajorBlock, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost
from nxpipe.emulator.lower.lanes import repeated
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.tiling import (
    BANK,
    HbmRows,
    LoadableRows,
    LoadRows,
    OutputGroup,
    WeightOperand,
    allocate_rows,
)
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, load_matrix
from nxpipe.emulator.lower.view import View, line, whole
from nxpipe.emulator.ops import GroupedMatMul, Linear, MatMul


@lowers(Linear, MatMul)
def _matmul(low: Lowering, node: Node, op: Linear | MatMul) -> None:
    if not has_one_weight(node):
        _batched_matmul(low, node)
        return
    x, *_ = node.operands
    rows = HbmRows(low.k, row_matrix(low, x), x.type.dtype.on_device)
    MatmulKernel(low.k, rows, output_groups(low, low.groups.matmuls_of(x, node.result))).write()


def _batched_matmul(low: Lowering, node: Node) -> None:
    a, b = node.operands
    *batch, rows, columns = node.result.type.shape
    epilogue = low.epilogue(node.result, columns)
    left, right = low.stored_view(a), low.view(b)
    views = [left.broadcast((*batch, *left.shape[-2:])), right.broadcast((*batch, *right.shape[-2:]))]
    for at, (left, right) in batch_loop(low.k, views, len(batch)):
        factor = WeightOperand(node.result, right, None, b.type.dtype.on_device, node.result.type.dtype.on_device)
        loaded = HbmRows(low.k, left, a.type.dtype.on_device)
        MatmulKernel(low.k, loaded, (OutputGroup((factor,), epilogue, low.note(node)),), at * rows).write()


def output_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Output groups of matmuls that read the same rows: those share a group whose results meet in an epilogue."""
    sums = {node: low.groups.reduce_scatter_of(node) for node in nodes}
    sharded = [_sharded_group(low, node, found) for node, found in sums.items() if found is not None]
    return (*sharded, *_fused_groups(low, [node for node, found in sums.items() if found is None]))


def _sharded_group(low: Lowering, node: Node, scatter: Node) -> OutputGroup:
    """A matmul whose results ranks reduce-scatter; each rank applies the epilogue to its share of the rows."""
    result = scatter.result
    epilogue = low.fuse_epilogue(low.groups.epilogue(result, result.type.shape[-1]), result, [node])
    operand = replace(_operand(low, node), result=result)
    return OutputGroup((operand,), epilogue, low.note(node), low.groups.row_sharding(scatter))


def _fused_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Each matmul joins the first group with which its result meets in a common epilogue, else begins a new one."""
    meeting: list[tuple[list[Node], EpilogueFusion]] = []
    for node in nodes:
        for number, (others, _) in enumerate(meeting):
            found = low.groups.common_epilogue([*others, node])
            if found is not None:
                meeting[number] = ([*others, node], found)
                break
        else:
            alone = low.groups.common_epilogue([node])
            assert alone is not None  # a single result meets itself
            meeting.append(([node], alone))
    return tuple(
        OutputGroup(
            tuple(_operand(low, node) for node in group), low.fuse_epilogue(found, group[0].result), low.note(group[0])
        )
        for group, found in meeting
    )


def _operand(low: Lowering, node: Node) -> WeightOperand:
    _, weight, *bias = node.operands
    view = low.view(weight)
    stands = view.transposed((1, 0)) if isinstance(node.op, Linear) else view.reshaped(view.shape[-2:])
    assert stands is not None  # axes of size 1 are always gone
    out = node.result.type.dtype.on_device
    return WeightOperand(node.result, stands, low.view(bias[0]) if bias else None, weight.type.dtype.on_device, out)


def row_matrix(low: Lowering, x: Value) -> View:
    """A value as a matrix of rows, in the type in which it is stored."""
    return as_matrix(low, low.stored_view(x), prod(x.type.shape[:-1]), x.type.shape[-1])


def as_matrix(low: Lowering, view: View, rows: int, width: int) -> View:
    """A view as a matrix; copied to contiguous rows where strides cannot express it."""
    made = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert made is not None  # packed rows are a matrix
    return made


def batch_loop(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """Loops over the leading axes: the flat index of each combination, with the views there."""
    if not axes:
        yield Affine(), list(views)
        return
    size = views[0].shape[0]
    if not size:
        return
    with k.loop(size) as index:
        for inner, inside in batch_loop(k, [view.pick(0, index) for view in views], axes - 1):
            yield index * prod(views[0].shape[1:axes]) + inner, inside


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
        return whole and self.dtype.itemsize > 1 and budget <= self.k.free_bytes(Memory.SBUF)

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


@lowers(GroupedMatMul)
def _grouped(low: Lowering, node: Node, op: GroupedMatMul) -> None:
    rows, matrices, ends = map(low.view, node.operands)
    x = as_matrix(low, rows, *rows.shape)
    epilogue = low.epilogue(node.result, matrices.shape[2])
    if node.result.type.elements:
        _Groups(low.k, x, matrices, ends, epilogue, node.result.type.dtype.on_device).write()


@dataclass(frozen=True)
class _Groups:
    """One grouped matmul."""

    k: Kernel
    x: View  # [rows, summed]
    matrices: View  # [groups, summed, columns]
    ends: View
    epilogue: Epilogue
    out: DType

    def write(self) -> None:
        k, rows = self.k, self.x.shape[0]
        chunks = chunks_of(self.x.shape[1])
        for top, height in k.spans(rows, self._height(chunks)):
            with k.scope():
                transposed = k.tile(self.x.dtype, PARTITIONS, max(chunks, 1), height)
                load_matrix(k, transposed, self.x.cut((top, height)).transposed((1, 0)))
                owned = self._owned(top, height)
                for left, width in k.spans(self.matrices.shape[2], self._width(chunks, height)):
                    with k.scope():
                        self._write_block(transposed, owned, (top, height), (left, width))

    def _height(self, chunks: int) -> int:
        """Rows whose sums fit half of SBUF, one PSUM bank wide: the more rows, the fewer times each matrix is
        loaded."""
        by_row = chunks * self.x.dtype.itemsize
        by_tile = BANK * DType.FLOAT32.itemsize + self.ends.shape[0]
        tiles = (self.k.free_bytes(Memory.SBUF) // 2) // (by_row * PARTITIONS + by_tile)
        return min(max(tiles, 1), chunks_of(self.x.shape[0])) * PARTITIONS

    def _width(self, chunks: int, height: int) -> int:
        by_column = 2 * chunks * self.matrices.dtype.itemsize + chunks_of(height) * DType.FLOAT32.itemsize
        by_column += 2 * self.out.itemsize + epilogue_bytes(self.epilogue)
        most = (self.k.free_bytes(Memory.SBUF) - (20 << 10)) // by_column
        return max(min(most // 64 * 64, BANK), 1)

    def _owned(self, top: Affine, height: int) -> Block:
        """For each row, the groups that end behind it: [128, tiles, groups] of bytes."""
        k, groups, tiles = self.k, self.ends.shape[0], chunks_of(height)
        owned = k.tile(DType.UINT8, PARTITIONS, tiles, max(groups, 1))
        ends = k.tile(self.ends.dtype, PARTITIONS, max(groups, 1))
        if groups:
            k.copy(ends.whole, self.ends.broadcast((PARTITIONS, groups)).far())
        with k.loop(tiles) as tile, k.scope():
            number = k.tile(DType.FLOAT32, PARTITIONS, 1, buffers=2).whole
            start = top + tile * PARTITIONS
            k.emit(IotaPattern(engine=Engine.GPSIMD, dst=number, start=start, by_partition=1, steps=(0,)))
            if groups:
                k.emit(
                    TensorScalar(
                        engine=Engine.VECTOR,
                        dst=owned.cut(PARTITIONS, (tile, 1)),
                        src=ends.whole,
                        op0=Alu.GREATER,
                        operand0=number,
                    )
                )
        return owned

    def _write_block(self, transposed: Block, owned: Block, rows: Span, columns: Span) -> None:
        k, height, width, (groups, inner, _) = self.k, rows[1], columns[1], self.matrices.shape
        kept = k.tile(DType.FLOAT32, PARTITIONS, chunks_of(height), width)
        k.emit(Memset(engine=Engine.VECTOR, dst=kept.whole, value=0.0))
        if groups and inner:
            with k.loop(groups) as index, k.scope():
                group = index * -1 + (groups - 1)
                weight = k.tile(self.matrices.dtype, PARTITIONS, transposed.shape[0], width, buffers=2)
                load_matrix(k, weight, self.matrices.pick(0, group).cut((0, inner), columns))
                for row, count in self._tiles(height):
                    with k.scope():
                        self._keep(self._sums(transposed, weight, (row * PARTITIONS, count)), kept, owned, row, group)
        for row, count in self._tiles(height):
            with k.scope():
                made = k.tile(self.out, count, width, buffers=2).whole
                k.emit(TensorCopy(engine=Engine.VECTOR, dst=made, src=kept.cut(count, (row, 1))))
                self.epilogue.store(made, (row * PARTITIONS + rows[0], count), columns)

    def _sums(self, transposed: Block, weight: Block, row: Span) -> Tile:
        sums = self.k.psum(row[1], weight.shape[1]).whole
        for chunk, depth in each_chunk(self.k, self.x.shape[1]):
            self.k.emit(
                Matmul(
                    engine=Engine.TENSOR,
                    dst=sums,
                    stationary=transposed.cut(depth, (chunk, 1), row),
                    moving=weight.cut(depth, (chunk, 1)),
                    accumulate=chunk,
                )
            )
        return sums

    def _keep(self, sums: Tile, kept: Block, owned: Block, row: Affine, group: Affine) -> None:
        mask = owned.cut(sums.partitions, (row, 1), (group, 1))
        predicate = repeated(mask, kept.shape[1])
        dst = kept.cut(sums.partitions, (row, 1))
        self.k.emit(CopyPredicated(engine=Engine.VECTOR, dst=dst, src=sums, predicate=predicate))

    def _tiles(self, height: int) -> Iterator[tuple[Affine, int]]:
        return each_chunk(self.k, height)
