"""Matmuls of rows by weights, alone or batched; matmuls that read the same rows are emitted as one kernel."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, prod

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.collective import CollectiveAllGather
from nxpipe.emulator.isa.constraints import MOST_SIZE
from nxpipe.emulator.isa.cost import START_NS, cost, moved
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Memory, Tile, contiguous
from nxpipe.emulator.lower.grouping import EpilogueFusion, RowSharding, has_one_weight
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, RunMajorBlock, Span
from nxpipe.emulator.lower.kernel_cost import KernelCost
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.chain import Following, MatmulPlan, can_follow
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.tiling import (
    HbmRows,
    LoadableRows,
    LoadRows,
    OutputGroup,
    WeightOperand,
    allocate_rows,
)
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import TiledView, View, line, whole
from nxpipe.emulator.ops import Linear, MatMul


@lowers(Linear, MatMul)
def _matmul(low: Lowering, node: Node, op: Linear | MatMul) -> None:
    if not has_one_weight(node):
        _batched_matmul(low, node)
        return
    x, *_ = node.operands
    rows = HbmRows(low.k, row_matrix(low, x), x.type.dtype.on_device)
    matmul_plan(low, low.groups.matmuls_of(x, node.result)).kernel(rows).write()


def _batched_matmul(low: Lowering, node: Node) -> None:
    a, b = node.operands
    *batch, rows, columns = node.result.type.shape
    epilogue = low.epilogue(node.result, columns)
    left, right = low.stored_view(a), low.weight(b)
    views = [left.broadcast((*batch, *left.shape[-2:])), right.broadcast((*batch, *right.shape[-2:]))]
    for index, (left, right) in batch_loop(low.k, views, len(batch)):
        operand = WeightOperand(node.result, right, None, b.type.dtype.on_device, node.result.type.dtype.on_device)
        row_source = HbmRows(low.k, left, a.type.dtype.on_device)
        MatmulKernel(low.k, row_source, (OutputGroup((operand,), epilogue, low.note(node)),), index * rows).write()


def matmul_plan(low: Lowering, nodes: Sequence[Node], stored: Mapping[Value, View] | None = None) -> MatmulPlan:
    """The plan of matmuls that read the same rows. If they form a single group, whose results only matmuls read after
    elementwise nodes, these are part of it. `stored` are values that the kernel itself stores before it reads those of
    the same rows: the epilogue of the last matmuls may load them."""
    fusion = low.groups.common_epilogue(nodes) if nodes else None
    if fusion is None or any(low.groups.reduce_scatter_of(node) for node in nodes):
        return MatmulPlan(low.k, output_groups(low, nodes))
    first, width = nodes[0], nodes[0].result.type.shape[-1]
    consumers = low.groups.consumers(fusion, first.result, width)
    operands = tuple(_operand(low, node) for node in nodes)
    if consumers.gather or not can_follow(fusion, operands, consumers.matmuls):
        return MatmulPlan(low.k, output_groups(low, nodes))
    epilogue = low.fuse_epilogue(fusion, first.result, consumers.matmuls)
    group = OutputGroup(operands, epilogue, low.note(first))
    tile = fusion.known[consumers.value]
    if not any(low.groups.reduce_scatter_of(node) for node in consumers.matmuls):  # rows are those of other ranks
        low.places.views |= stored or {}
    shape = (tile.type.elements // width, width)
    following = output_groups(low, consumers.matmuls)
    scratch = partial(low.scratch, tile.type.dtype, shape)
    return MatmulPlan(low.k, (group,), Following(consumers.value, tile, following, scratch))


def output_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Output groups of matmuls that read the same rows: matmuls whose results are operands of one fused node share a
    group."""
    scatters = {node: low.groups.reduce_scatter_of(node) for node in nodes}
    sharded = [_sharded_group(low, node, scatter) for node, scatter in scatters.items() if scatter is not None]
    return (*sharded, *_fused_groups(low, [node for node, scatter in scatters.items() if scatter is None]))


def _sharded_group(low: Lowering, node: Node, scatter: Node) -> OutputGroup:
    """The group of a matmul with a fused reduce-scatter; each rank applies the epilogue to its share of the rows."""
    result = scatter.result
    epilogue = low.fuse_epilogue(low.groups.epilogue(result, result.type.shape[-1]), result, [node])
    operand = replace(_operand(low, node), result=result)
    return OutputGroup((operand,), epilogue, low.note(node), low.groups.row_sharding(scatter))


def _fused_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Each matmul joins the first group with which it has a common epilogue, else it starts a new group."""
    groups: list[tuple[list[Node], EpilogueFusion]] = []
    for node in nodes:
        for number, (others, _) in enumerate(groups):
            epilogue = low.groups.common_epilogue([*others, node])
            if epilogue is not None:
                groups[number] = ([*others, node], epilogue)
                break
        else:
            own_epilogue = low.groups.common_epilogue([node])
            assert own_epilogue is not None  # one result always has an epilogue
            groups.append(([node], own_epilogue))
    return tuple(
        OutputGroup(
            tuple(_operand(low, node) for node in members),
            low.fuse_epilogue(epilogue, members[0].result),
            low.note(members[0]),
        )
        for members, epilogue in groups
    )


def _operand(low: Lowering, node: Node) -> WeightOperand:
    _, weight, *bias = node.operands
    view = low.weight(weight)
    if isinstance(view, TiledView):
        matrix: View | None = view
    else:
        matrix = view.transposed((1, 0)) if isinstance(node.op, Linear) else view.reshaped(view.shape[-2:])
    assert matrix is not None  # the batch axes have size 1
    out = node.result.type.dtype.on_device
    return WeightOperand(node.result, matrix, low.view(bias[0]) if bias else None, weight.type.dtype.on_device, out)


def row_matrix(low: Lowering, x: Value) -> View:
    """A value as a matrix [rows, last axis], in its stored type."""
    return as_matrix(low, low.stored_view(x), prod(x.type.shape[:-1]), x.type.shape[-1])


def as_matrix(low: Lowering, view: View, rows: int, width: int) -> View:
    """A view as a matrix; copied to contiguous rows if strides cannot express it."""
    matrix = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert matrix is not None  # contiguous elements have every shape
    return matrix


def batch_loop(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """Loops over the leading axes; yields the linear index and the views at it."""
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
    """The rows of all ranks, all-gathered in SBUF run by run; each rank has an equal part of a run."""

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
        """True if the rank's own rows, transposed, fit SBUF in whole chunks, and a run of all ranks' rows is within the
        size of an axis. A partial chunk would leave uninitialized bytes on the remaining partitions, which the
        collective would transfer."""
        whole_chunks = self.shape[1] % PARTITIONS == 0 < self.shape[1]
        if chunks_of(self.shape[1]) * self.run > MOST_SIZE:
            return False
        budget = self.resident_bytes + self.own.resident_bytes + self.own.transient_bytes
        return whole_chunks and self.dtype.itemsize > 1 and budget <= self.k.free_bytes(Memory.SBUF)

    @property
    def resident_bytes(self) -> int:
        return chunks_of(self.shape[1]) * self.own.shape[0] * self.dtype.itemsize

    @property
    def transient_bytes(self) -> int:
        return 0

    def preparation(self, core: CoreSpec) -> KernelCost:
        return self.own.preparation(core) + self.own.work(core, self.own.shape[0])

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
            assert isinstance(transposed, RunMajorBlock)  # allocated by `block`
            for start, count in self.k.spans(rows[1], self.run):
                own_run = own.run(divided(start + rows[0], self.sharing.ranks), self.sharing.rows)
                gather = CollectiveAllGather(engine=Engine.COLLECTIVE, dst=transposed.run(start, count), src=own_run)
                self.k.emit(gather)

        return fill

    def _tiled(self, block: Block) -> RunMajorBlock:
        return RunMajorBlock(**vars(block), rows=self.sharing.rows)


@dataclass(frozen=True)
class GatheredMatmuls:
    """Matmuls of all ranks' rows, of which each rank has stored its own. The rows are all-gathered in SBUF, run by run,
    or in HBM before the matmuls if that is cheaper or SBUF lacks space."""

    k: Kernel
    own: HbmRows
    groups: tuple[OutputGroup, ...]
    sharing: RowSharding

    @property
    def ns(self) -> float:
        return min(self._in_sbuf_ns, self._via_hbm_ns)

    @property
    def is_in_sbuf(self) -> bool:
        return self._in_sbuf_ns < inf and self._in_sbuf_ns <= self._via_hbm_ns

    @cached_property
    def in_sbuf(self) -> MatmulKernel:
        return MatmulKernel(self.k, self._rows, self.groups)

    def via_hbm(self, home: View) -> MatmulKernel:
        return MatmulKernel(self.k, HbmRows(self.k, home, self.own.dtype), self.groups)

    @property
    def _rows(self) -> GatheredRows:
        return GatheredRows(self.k, self.own, self.sharing)

    @cached_property
    def _in_sbuf_ns(self) -> float:
        return self.in_sbuf.ns if self._rows.fits else inf

    @cached_property
    def _via_hbm_ns(self) -> float:
        home = whole(0, self.own.view.dtype, self._rows.shape)
        return self.via_hbm(home).ns + KernelCost(bytes=moved(home.far())).ns(self.k.core)


def write_gathered_matmuls(
    low: Lowering, own: View, dtype: DType, groups: tuple[OutputGroup, ...], sharing: RowSharding
) -> None:
    """Emit matmuls of all ranks' rows."""
    k, own = low.k, low.packed(own)
    matmuls = GatheredMatmuls(k, HbmRows(k, own, dtype), groups, sharing)
    if matmuls.is_in_sbuf:
        matmuls.in_sbuf.write()
        return
    rows, width = own.shape
    whole_rows, run = low.scratch(own.dtype, (rows * sharing.ranks, width)), sharing.rows * sharing.ranks
    for row, count in k.spans(whole_rows.shape[0], run):
        own_run = own.cut((divided(row, sharing.ranks), sharing.rows))
        contiguous = (line(whole_rows.cut((row, count))), line(own_run))
        k.emit(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=contiguous[0], src=contiguous[1]))
    matmuls.via_hbm(whole_rows).write()
