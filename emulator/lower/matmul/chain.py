"""Chained matmuls: a matmul whose results, after elementwise nodes, only other matmuls read (the MLP of a transformer).

The first matmul keeps its weights stationary and streams the rows past them, so that its results have the columns on
the partitions: the layout in which the next matmul takes its rows. The results never leave SBUF and need no transpose,
a bias is one number per partition, and the elementwise nodes use all lanes even for the single row of a decoder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, divided
from nxpipe.emulator.isa.cost import ISSUE, moved
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import TensorScalar
from nxpipe.emulator.lower.elementwise import LOOKED_UP, apply
from nxpipe.emulator.lower.epilogue import is_single_instruction
from nxpipe.emulator.lower.grouping import ChainNode, EpilogueFusion, HbmOperand
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span, TiledBlock
from nxpipe.emulator.lower.kernel_cost import KernelCost, load_cost
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel, load_weight
from nxpipe.emulator.lower.matmul.tiling import (
    BANK,
    HbmRows,
    LoadableRows,
    LoadRows,
    OutputGroup,
    WeightOperand,
    allocate_rows,
)
from nxpipe.emulator.lower.transpose import chunks_of, each_chunk, load_column, must_transpose
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.ops import AllReduce

_SHARE_OF_SBUF = 3  # a third of the free bytes, at most, for the weights of the first matmul


@dataclass(frozen=True)
class Following:
    """The matmuls that read what a group of matmuls computes: the value and the one whose tile holds it."""

    value: Value
    tile: Value
    groups: tuple[OutputGroup, ...]
    scratch: Callable[[], View]  # [rows, columns] for the tile, if the matmuls do not share a kernel


@dataclass(frozen=True)
class MatmulPlan:
    """Matmuls that read the same rows, with those that read their results."""

    k: Kernel
    groups: tuple[OutputGroup, ...]
    following: Following | None = None

    def kernel(self, rows: LoadableRows) -> "MatmulKernel | SeparateKernels":
        """The fastest kernel for rows of this source."""
        if self.following is None:
            return MatmulKernel(self.k, rows, self.groups)
        separate = SeparateKernels(self.k, rows, self.groups[0], self.following)
        kernels: list[MatmulKernel | SeparateKernels] = [
            MatmulKernel(self.k, source, self.following.groups) for source in self._chained(rows)
        ]
        return min([*kernels, separate], key=lambda kernel: kernel.ns)

    def _chained(self, rows: LoadableRows) -> Iterator["MatmulRows"]:
        """Row sources with all weights of the first matmuls in SBUF, and with as many columns as fit twice."""
        assert self.following is not None
        (group,), limit = self.groups, self.k.free_bytes(Memory.SBUF) // _SHARE_OF_SBUF
        chunks, step = chunks_of(rows.shape[1]), max(group.sizes.tile, BANK)
        blocks = limit // max(2 * group.sizes.weight(chunks, step), 1)
        for width, resident in ((group.columns, True), (min(blocks * step, group.columns), False)):
            source = MatmulRows(self.k, rows, group, self.following, width, resident)
            if source.is_possible and (not resident or group.sizes.weight(chunks, width) <= limit):
                yield source


@dataclass(frozen=True)
class SeparateKernels:
    """A kernel that stores what the next one loads."""

    k: Kernel
    rows: LoadableRows
    group: OutputGroup
    following: Following

    @cached_property
    def ns(self) -> float:
        """Expected time in ns, with that of the store."""
        home = whole(0, self.following.tile.type.dtype.on_device, (self.rows.shape[0], self.group.columns))
        kernels = self._kernels(home)
        return sum(kernel.ns for kernel in kernels) + KernelCost(bytes=moved(home.far())).ns(self.k.core)

    def write(self) -> None:
        first, second = self._kernels(self.following.scratch())
        with self.k.scope():
            first.write()
        second.write()

    def _kernels(self, home: View) -> tuple[MatmulKernel, MatmulKernel]:
        epilogue = self.group.epilogue
        chain = replace(epilogue.chain, homes=((self.following.tile, home),))
        group = replace(self.group, epilogue=replace(epilogue, chain=chain))
        second = HbmRows(self.k, home, self.following.value.type.dtype.on_device)
        return MatmulKernel(self.k, self.rows, (group,)), MatmulKernel(self.k, second, self.following.groups)


@dataclass(frozen=True)
class MatmulRows:
    """Rows that a matmul computes, transposed, in SBUF. Its weights are `resident`, or stream past each span of
    rows."""

    k: Kernel
    own: LoadableRows
    group: OutputGroup
    following: Following
    width: int  # columns of a block of weights
    resident: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.own.shape[0], self.group.columns

    @property
    def dtype(self) -> DType:
        return self.following.value.type.dtype.on_device

    @property
    def run(self) -> int:
        return self.own.run

    @property
    def is_possible(self) -> bool:
        """True if there is something to compute, and any number of rows can be computed."""
        return self.run == 1 and self.own.shape[0] > 0 and self.own.shape[1] > 0 and self.width > 0

    @property
    def resident_bytes(self) -> int:
        columns = chunks_of(self.group.columns) * DType.FLOAT32.itemsize
        biases = sum(columns for operand in self.group.operands if operand.bias)
        return self.own.resident_bytes + biases + (self._weight_bytes(self.width) if self.resident else 0)

    @property
    def transient_bytes(self) -> int:
        weights = 0 if self.resident else 2 * self._weight_bytes(self.width)
        rows = 2 * self._chunks * self._span * self.own.dtype.itemsize
        results = 2 * len(self.group.operands) + len(self.group.epilogue.chain.links) * 2 + 1
        return max(self.own.transient_bytes, weights + results * self._span * DType.FLOAT32.itemsize) + rows

    def preparation(self, core: CoreSpec) -> KernelCost:
        own = self.own.preparation(core)
        return own + self._load_weights(core) if self.resident else own

    def work(self, core: CoreSpec, height: int) -> KernelCost:
        passes = ceil(height / self._span)
        blocks = chunks_of(self.group.columns)
        columns = max(ISSUE, self._span) * blocks
        slow = core.fp32_cycle_factor if self.own.dtype is DType.FLOAT32 else 1
        tensor = slow * columns * self._chunks * len(self.group.operands) / core.tensor_ghz
        steps = len(self.group.operands) + len(self.group.epilogue.chain.links)
        work = self.own.work(core, self._span) + KernelCost(0.0, tensor, steps * columns / core.vector_ghz)
        return (work if self.resident else work + self._load_weights(core)) * passes

    def block(self, height: int, buffers: int) -> Block:
        return allocate_rows(self.k, self, height, buffers)

    def begin(self) -> LoadRows:
        k, note = self.k, self.k.note
        own_fill = self.own.begin()
        k.note = self.group.note
        k.tilings.append(f"rows computed by the matmul before, {self._span} at a time, {self.width} columns of it")
        columns = (Affine(), self.group.columns)
        biases = [load_column(k, operand.bias) if operand.bias else None for operand in self.group.operands]
        resident = self._weights(columns, 1) if self.resident else None

        def fill(transposed: Block, rows: Span) -> None:
            for row, count in k.spans(rows[1], self._span):
                with k.scope():
                    own_rows = self.own.block(count, 2)
                    k.note = note
                    with k.scope():
                        own_fill(own_rows, (row + rows[0], count))
                    k.note = self.group.note
                    for block in k.spans(self.group.columns, self.width):
                        with k.scope():
                            weights = resident or self._weights(block, 2)
                            self._write_block(own_rows, weights, biases, block, transposed, (row, count))

        return fill

    @property
    def _span(self) -> int:
        """Rows that one matmul streams."""
        return min(BANK, self.own.shape[0])

    @property
    def _chunks(self) -> int:
        return chunks_of(self.own.shape[1])

    def _weight_bytes(self, width: int) -> int:
        return self.group.sizes.weight(self._chunks, width)

    def _load_weights(self, core: CoreSpec) -> KernelCost:
        blocks = ceil(self.group.columns / self.width)
        views = [operand.weight for operand in self.group.operands]
        return sum((load_cost(core, view, self._chunks, self.width) for view in views), KernelCost()) * blocks

    def _weights(self, columns: Span, buffers: int) -> list[Block]:
        depth = self.own.shape[1]
        return [
            load_weight(self.k, operand, (Affine(), depth), columns, columns, buffers)
            for operand in self.group.operands
        ]

    def _write_block(
        self,
        own_rows: Block,
        weights: Sequence[Block],
        biases: Sequence[Block | None],
        columns: Span,
        transposed: Block,
        rows: Span,
    ) -> None:
        """Compute the results of a block of columns for a span of rows."""
        k = self.k
        for left, tile_width in k.spans(columns[1], min(self.group.sizes.tile or columns[1], columns[1])):
            for inner, count in k.spans(tile_width, PARTITIONS):
                with k.scope():
                    chunk = divided(columns[0] + left + inner, PARTITIONS)
                    sums = {
                        operand.result: self._multiply(own_rows, weight, (left, tile_width), (inner, count), rows[1])
                        for operand, weight in zip(self.group.operands, weights, strict=True)
                    }
                    shifts = {
                        operand.result: bias.cut(count, (0, 1), (chunk, 1)) if bias else None
                        for operand, bias in zip(self.group.operands, biases, strict=True)
                    }
                    _Results(self, sums, shifts).write(transposed.cut(count, (chunk, 1), rows))

    def _multiply(self, own_rows: Block, weight: Block, tile: Span, inside: Span, rows: int) -> Tile:
        k, sums = self.k, self.k.psum(inside[1], rows).whole
        for chunk, depth in each_chunk(k, self.own.shape[1]):
            stationary = (
                weight.cut_tile(depth, chunk, tile, inside)
                if isinstance(weight, TiledBlock)
                else weight.cut(depth, (chunk, 1), (inside[0] + tile[0], inside[1]))
            )
            moving = own_rows.cut(depth, (chunk, 1), (0, rows))
            k.emit(Matmul(engine=Engine.TENSOR, dst=sums, stationary=stationary, moving=moving, accumulate=chunk))
        return sums


@dataclass(frozen=True)
class _Results:
    """The sums of 128 columns for a span of rows, and the columns of biases, by the matmuls' results."""

    rows: MatmulRows
    sums: dict[Value, Tile]
    shifts: dict[Value, Tile | None]

    def write(self, dst: Tile) -> None:
        """Add the biases, apply the elementwise nodes, and write the value of the next matmul."""
        chain, tile = self.rows.group.epilogue.chain, self.rows.following.tile
        links = chain.links
        first = self._folds(links)
        operands = () if first else self.rows.group.operands
        computed = {each.result: self._result(each, dst if each.result == tile else None) for each in operands}
        for number, link in enumerate(links):
            if link.node.result in computed:
                continue  # the instruction of the node before has cast it
            result = chain.rounded(link)
            out = self._tile(result, dst)
            if number == 0 and first:
                self._activation(link, out)
            else:
                apply(self.rows.k, link.node, out, [_operand(each, computed) for each in link.operands])
            computed[result] = out
        if computed[tile] != dst:
            self._copy(dst, computed[tile])

    def _folds(self, links: Sequence[ChainNode]) -> bool:
        """True if the first node is a function that the scalar engine applies as it adds the only bias."""
        (operand, *others) = self.rows.group.operands
        is_function = bool(links) and links[0].node.op.label in LOOKED_UP and is_single_instruction(links[0].node)
        readers = sum(link.operands.count(operand.result) for link in links)
        if not is_function or others or readers != 1 or operand.out is not DType.FLOAT32:
            return False
        # v2 has no reciprocal with a bias.
        return self.shifts[operand.result] is None or LOOKED_UP[links[0].node.op.label] is not Function.RECIPROCAL

    def _activation(self, link: ChainNode, out: Tile) -> None:
        ((result, sums),) = self.sums.items()
        shift = self.shifts[result]
        function = LOOKED_UP[link.node.op.label]
        bias = 0.0 if shift is None else shift
        self.rows.k.emit(Activation(engine=Engine.SCALAR, dst=out, src=sums, function=function, bias=bias))

    def _result(self, operand: WeightOperand, dst: Tile | None) -> Tile:
        """The result of a matmul in its own type. Sums without a bias are read from PSUM if they are the result."""
        sums, shift, k = self.sums[operand.result], self.shifts[operand.result], self.rows.k
        if shift is None and operand.out is DType.FLOAT32 and self.rows.group.epilogue.chain.reads_sums(operand.result):
            return sums
        if dst is None or dst.dtype is not operand.out:
            out = k.tile(operand.out, sums.partitions, sums.elements, buffers=2).whole
        else:
            out = dst
        if shift is None:
            self._copy(out, sums)
        else:
            k.emit(TensorScalar(engine=Engine.VECTOR, dst=out, src=sums, op0=Alu.ADD, operand0=shift))
        return out

    def _tile(self, value: Value, dst: Tile) -> Tile:
        dtype = value.type.dtype.on_device
        if value == self.rows.following.tile and dtype is dst.dtype:
            return dst
        return self.rows.k.tile(dtype, dst.partitions, dst.elements, buffers=2).whole

    def _copy(self, dst: Tile, src: Tile) -> None:
        self.rows.k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=src, function=Function.COPY))


def _operand(operand: Value | HbmOperand | float, computed: Mapping[Value, Tile]) -> Tile | float:
    if isinstance(operand, Value):
        return computed[operand]
    assert not isinstance(operand, HbmOperand)  # `can_follow` refuses epilogues that load
    return operand


def can_follow(fusion: EpilogueFusion, operands: Sequence[WeightOperand], matmuls: Sequence[Node]) -> bool:
    """True if matmuls can read the results of a group in SBUF: no other node reads them, the elementwise nodes between
    load nothing, and exchange nothing with other ranks, and the weights need no transpose."""
    if any(must_transpose(operand.weight) for operand in operands):
        return False
    exchanged = any(isinstance(link.node.op, AllReduce) for link in fusion.links)
    return bool(matmuls) and not fusion.sources and not exchanged and not fusion.finished(matmuls)[1]
