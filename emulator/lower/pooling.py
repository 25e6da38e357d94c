"""Pooling and resampling: channels on the partition dimension; window positions are combined one after the other."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import GatherFree
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile, contiguous
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorReduce, TensorTensor
from nxpipe.emulator.lower.epilogue import ROUNDING, Epilogue, RowAffine
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.linear import as_matrix
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.windows import (
    PIECE,
    ChannelTiles,
    Slab,
    Starts,
    Windows,
    blocks,
    by_channel,
    edge_spans,
    flat,
    interiors,
    load_slab,
    moved,
    part,
    slab_sizes,
    taps,
    windows,
)
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Pool, Resample


@lowers(Pool)
def _pool(low: Lowering, node: Node, op: Pool) -> None:
    x, places = low.view(node.operands[0]), node.result.type.shape[2:]
    fused = RowAffine.of(low.channel_epilogue(node.result), ROUNDING)
    if not node.result.type.elements:
        return
    filling = _lowest(node.operands[0].type.dtype) if op.function == "max_pool" else 0.0
    view, geometry = windows(x, op.window, op.stride, op.dilation, op.before, places)
    _Pool(
        low.k,
        by_channel(view),
        geometry,
        Alu.MAXIMUM if op.function == "max_pool" else Alu.ADD,
        filling,
        ChannelTiles(fused.epilogue, places),
        fused.value,
    ).write()


def _reduction_type(dtype: DType) -> DType:
    """The type in which windows are added: float32 for floats, which are rounded once at the end, or 32-bit
    integers."""
    if dtype.is_float:
        return DType.FLOAT32
    return dtype if dtype.itemsize == 4 else DType.INT32


def _lowest(dtype: DType) -> float:
    return -float("inf") if dtype.is_float else float(np.iinfo(dtype.on_device.value).min)


@dataclass(frozen=True)
class _Pool:
    """One pooling with its tile sizes."""

    k: Kernel
    x: View  # [channels, batch, position ...]
    geometry: Windows
    op: Alu
    filling: float
    tiles: ChannelTiles
    result: Value  # the result, or its rounding to a narrower type

    @property
    def out(self) -> DType:
        return self.result.type.dtype.on_device

    def write(self) -> None:
        k, dtype = self.k, self.x.dtype if self._is_maximum else _reduction_type(self.x.dtype)
        images, height = slab_sizes(
            min(k.free_bytes(Memory.SBUF) // 2, 2 * PIECE), self.geometry, self.x.shape[1], 2 * dtype.itemsize
        )
        for lanes in k.spans(self.x.shape[0], PARTITIONS):
            for image, count in k.spans(self.x.shape[1], images):
                source = self.x.cut(lanes, (image, count))
                for rows in edge_spans(k, self.geometry.places[0], height, self.geometry.interior(0)):
                    with k.scope():
                        slab = load_slab(k, self.geometry, source, rows, dtype)
                        self._write_outputs(slab, lanes, image, rows)

    def _write_outputs(self, slab: Slab, lanes: Span, image: Affine, rows: Span) -> None:
        k, shape = self.k, (slab.block.shape[1], *slab.geometry.places)
        inner = interiors(slab.geometry, tuple(Affine() for _ in shape), shape)
        widest = self.tiles.widest(k, self.out.itemsize + DType.FLOAT32.itemsize)
        for starts, sizes in blocks(k, shape, widest, inner):
            with k.scope():
                if self._is_maximum and sizes == shape:
                    pooled = self._maxima(slab, lanes[1])
                else:
                    pooled = self._reduce_windows(slab, lanes[1], starts, sizes)
                first = (starts[0] + image, starts[1] + rows[0], *starts[2:])
                self.tiles.store(pooled, self.result, lanes, first, sizes)

    def _reduce_windows(self, slab: Slab, count: int, starts: Starts, sizes: tuple[int, ...]) -> Tile:
        k, dtype = self.k, slab.block.dtype
        reduced = k.tile(dtype, count, prod(sizes), buffers=2)
        k.emit(Memset(engine=Engine.VECTOR, dst=reduced.whole, value=stored_number(self.filling, dtype)))
        engine = Engine.VECTOR if dtype.is_float else Engine.GPSIMD
        for tap in taps(k, slab.geometry, starts, sizes, ()):
            dst, within = part(reduced, sizes, tap.spans), moved(starts, tap.spans)
            right = slab.shifted(count, 0, within, [size for _, size in tap.spans], tap.at)
            k.emit(TensorTensor(engine=engine, dst=dst, left=dst, right=right, op=self.op))
        if self.out is dtype:
            return reduced.whole
        rounded = k.tile(self.out, count, prod(sizes), buffers=2).whole
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=rounded, src=reduced.whole))
        return rounded

    # Maxima, which do not depend on the order: by reductions over the windows of a whole slab

    @property
    def _is_maximum(self) -> bool:
        return self.op is Alu.MAXIMUM and self.x.dtype.is_float

    def _maxima(self, slab: Slab, count: int) -> Tile:
        """The maxima of windows of two axes by one instruction for each image; else axis by axis, which reads fewer
        elements for long windows, and in parts where windows reach into padding."""
        k, geometry = self.k, slab.geometry
        images, *sizes = slab.block.shape[1:]
        pooled = k.tile(self.out, count, images, *geometry.places, buffers=2)
        long = prod(geometry.window) > sizes[0] / geometry.places[0] * geometry.window[-1] + geometry.window[0]
        if len(sizes) == 2 and not geometry.fills() and not long:
            rows, columns = (
                (Axis(geometry.places[axis], geometry.stride[axis] * step), Axis(geometry.window[axis], step * spacing))
                for axis, (step, spacing) in enumerate(zip((sizes[1], 1), geometry.dilation, strict=True))
            )
            source = replace(slab.block.whole, partitions=count, axes=(rows[0], columns[0], rows[1], columns[1]))
            with k.loop(images) as image:
                offset = source.offset + image * (prod(sizes) * source.dtype.itemsize)
                dst = replace(pooled.cut(count, (image, 1)), axes=contiguous(*geometry.places))
                src = replace(source, offset=offset)
                k.emit(TensorReduce(engine=Engine.VECTOR, dst=dst, src=src, op=self.op, axes=2))
            return flat(pooled)
        current = replace(slab.block, partitions=count, shape=(images, *sizes))
        with k.scope():
            for axis in reversed(range(len(sizes))):
                shape = (*current.shape[: axis + 1], geometry.places[axis], *current.shape[axis + 2 :])
                target = k.tile(slab.block.dtype, count, *shape) if axis else pooled
                self._reduce_axis(geometry, axis, current, target)
                current = target
        return flat(pooled)

    def _reduce_axis(self, geometry: Windows, axis: int, source: Block, target: Block) -> None:
        k, stride, dilation = self.k, geometry.stride[axis], geometry.dilation[axis]
        lead, trail = prod(source.shape[: axis + 1]), prod(source.shape[axis + 2 :])
        for first, number, low, high in geometry.runs(axis):
            outer, position = Axis(lead, target.shape[axis + 1] * trail), Axis(number, trail)
            dst = replace(target.whole, axes=(outer, position, Axis(trail, 1)))
            dst = replace(dst, offset=dst.offset + first * trail * dst.dtype.itemsize)
            if high <= low:
                k.emit(Memset(engine=Engine.VECTOR, dst=dst, value=stored_number(self.filling, dst.dtype)))
                continue
            start = first * stride + low * dilation - geometry.margin[axis]
            axes = (
                Axis(lead, source.shape[axis + 1] * trail),
                Axis(number, stride * trail),
                Axis(trail, 1),
                Axis(high - low, dilation * trail),
            )
            src = replace(source.whole, axes=axes)
            src = replace(src, offset=src.offset + start * trail * src.dtype.itemsize)
            k.emit(TensorReduce(engine=Engine.VECTOR, dst=dst, src=src, op=self.op))


@lowers(Resample)
def _resample(low: Lowering, node: Node, op: Resample) -> None:
    """Resample axis by axis, the last axis last, without rounding in between."""
    view, (source,) = low.view(node.operands[0]), node.operands
    last, first = source.type.rank - 1, source.type.rank - len(op.sizes)
    intermediate = view.dtype if op.function == "nearest" else DType.FLOAT32
    for axis, size, scale in zip(range(first, last), op.sizes, op.scales, strict=False):
        shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
        resampled = low.scratch(intermediate, shape)
        _AxisResampling(low, op, view.shape[axis], size, scale, intermediate).write(view, resampled, axis)
        view = resampled
    last_axis = _AxisResampling(low, op, view.shape[last], op.sizes[-1], op.scales[-1], intermediate)
    out = node.result.type.dtype.on_device
    last_axis.write_last(
        as_matrix(low, view, prod(view.shape[:-1]), view.shape[-1]), low.epilogue(node.result, op.sizes[-1]), out
    )


@dataclass(frozen=True)
class _Tables:
    """For each neighbour, the element indices in a row, and the weights. Both are constants of the program."""

    indices: list[Tile]
    weights: list[Tile | None]


@dataclass(frozen=True)
class _AxisResampling:
    """The resampling of one axis: each new position is a weighted sum of old positions, by the tables."""

    low: Lowering
    op: Resample
    old: int
    size: int
    scale: float
    dtype: DType

    def write(self, x: View, out: View, axis: int) -> None:
        """Resample an axis other than the last; the axes after it are processed in tiles of columns."""
        k, outer, inner = self.low.k, prod(x.shape[:axis]), prod(x.shape[axis + 1 :])
        source = x.reshaped((outer, self.old, inner)) or self.low.packed(x).reshaped((outer, self.old, inner))
        dst = out.reshaped((outer, self.size, inner))
        assert source is not None  # contiguous elements have every shape
        assert dst is not None  # scratch is contiguous
        width = max(min(k.free_bytes(Memory.SBUF) // (self._column_bytes() * 2), inner), 1)
        full_tiles, remainder = divmod(inner, width)
        for tiles, columns_in_tile, start in ((full_tiles, width, 0), (1, remainder, full_tiles * width)):
            if not columns_in_tile or not tiles:
                continue
            with k.scope():
                tables = self._tables(min(outer, PARTITIONS), columns_in_tile)
                with k.loop(tiles) as index:
                    for top, count in k.spans(outer, PARTITIONS):
                        with k.scope():
                            columns = (index * columns_in_tile + start, columns_in_tile)
                            loaded = k.tile(self.dtype, count, self.old, columns_in_tile, buffers=2)
                            k.copy(loaded.whole, source.cut((top, count), (0, self.old), columns).far())
                            resampled = self._weighted_sum(loaded, tables, columns_in_tile)
                            k.copy(dst.cut((top, count), (0, self.size), columns).far(), resampled.whole)

    def write_last(self, x: View, epilogue: Epilogue, out: DType) -> None:
        k = self.low.k
        with k.scope():
            tables = self._tables(min(x.shape[0], PARTITIONS), 1)
            for top, count in k.spans(x.shape[0], PARTITIONS):
                with k.scope():
                    loaded = k.tile(self.dtype, count, self.old, 1, buffers=2)
                    k.copy(loaded.whole, x.cut((top, count)).far())
                    resampled = self._weighted_sum(loaded, tables, 1).whole
                    if out is not self.dtype:
                        rounded = k.tile(out, count, self.size, buffers=2).whole
                        k.emit(TensorCopy(engine=Engine.VECTOR, dst=rounded, src=resampled))
                        resampled = rounded
                    epilogue.store(resampled, (top, count), (0, self.size))

    def _column_bytes(self) -> int:
        """Bytes per column, an element of the axes after the resampled one."""
        taps = len(self.op.taps(self.old, self.size, np.float32(self.scale)))
        return 4 * (2 * self.old + (taps + 2 + 2 * 2) * self.size)

    def _tables(self, lanes: int, columns: int) -> _Tables:
        indices: list[Tile] = []
        weights: list[Tile | None] = []
        for neighbours, weight_values in self.op.taps(self.old, self.size, np.float32(self.scale)):
            numbers = (neighbours[:, np.newaxis] * columns + np.arange(columns)).reshape(-1)
            indices.append(self._to_partitions(numbers, DType.UINT32, lanes))
            weights.append(None if weight_values is None else self._repeated(weight_values, lanes, columns))
        return _Tables(indices, weights)

    def _repeated(self, weights: Array, lanes: int, columns: int) -> Tile:
        tile = self._to_partitions(weights, DType.FLOAT32, lanes)
        return replace(tile, axes=(Axis(self.size, 1), Axis(columns, 0)))

    def _to_partitions(self, numbers: Array, dtype: DType, lanes: int) -> Tile:
        tile = self.low.k.tile(dtype, lanes, len(numbers)).whole
        self.low.k.copy(tile, self.low.constant(numbers, dtype).broadcast((lanes, len(numbers))).far())
        return tile

    def _weighted_sum(self, loaded: Block, tables: _Tables, columns: int) -> Block:
        k, count = self.low.k, loaded.partitions
        total = k.tile(self.dtype, count, self.size, columns, buffers=2)
        for number, (indices, weight) in enumerate(zip(tables.indices, tables.weights, strict=True)):
            dst = total if weight is None else k.tile(DType.FLOAT32, count, self.size, columns)
            lanes = replace(indices, partitions=count)
            k.emit(GatherFree(engine=Engine.GPSIMD, dst=dst.whole, src=loaded.whole, indices=lanes))
            if weight is None:
                continue
            if number == 0:
                k.emit(Memset(engine=Engine.VECTOR, dst=total.whole, value=0.0))
            factor = replace(weight, partitions=count)
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst.whole, left=dst.whole, right=factor, op=Alu.MULTIPLY))
            k.emit(TensorTensor(engine=Engine.VECTOR, dst=total.whole, left=total.whole, right=dst.whole, op=Alu.ADD))
        return total
