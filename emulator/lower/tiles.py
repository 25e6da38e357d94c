"""Tiles of tensors [partition, free], the same for several tensors of one shape."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Final

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel, Span
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.view import View

_LEAST_ROW: Final = 128  # elements of a row of a line
WIDEST: Final = 2048  # free elements of a tile: enough to make fixed costs per instruction negligible


def each_tile(
    k: Kernel, views: Sequence[View], widest: int = WIDEST, by_row: bool = False
) -> Iterator[tuple[int, int, list[View]]]:
    """Tile several views of one shape; yields partitions and free elements of each tile, and its part of every view.
    The body of the `for` statement is emitted once per tile size. With `by_row`, rows are not merged into longer
    ones."""
    merged = _by_row(views) if by_row and views[0].rank > 1 else views[0].merged(views[1:])
    if not merged[0].elements:
        return
    if merged[0].rank == 0:
        yield 1, 1, [_with_axes(view, 2) for view in merged]
    elif merged[0].rank == 1:
        yield from _line_tiles(k, merged, widest)
    else:
        yield from _box_tiles(k, merged, widest)


def _by_row(views: Sequence[View]) -> tuple[View, ...]:
    """The views with as few axes as possible before the last axis, which stays as it is."""
    first, *others = [replace(view, shape=view.shape[:-1], strides=view.strides[:-1]) for view in views]
    merged = first.merged(others)
    return tuple(
        replace(view, shape=(*view.shape, original.shape[-1]), strides=(*view.strides, original.strides[-1]))
        for view, original in zip(merged, views, strict=True)
    )


def _line_tiles(k: Kernel, views: Sequence[View], widest: int) -> Iterator[tuple[int, int, list[View]]]:
    """Split a line into rows, one per partition; the remainder is a single row. A short line fills few partitions, with
    rows long enough for DMA: runs of a few bytes on all partitions would occupy all of its engines."""
    size = views[0].shape[0]
    width = min(max(-(-size // PARTITIONS), min(size, _LEAST_ROW)), widest)
    rows, remainder = divmod(size, width)
    folded = [_folded(view, Affine(), rows, width) for view in views]
    for start, count in k.spans(rows, PARTITIONS):
        yield count, width, [view.cut((start, count)) for view in folded]
    if remainder:
        yield 1, remainder, [_folded(view, Affine(rows * width), 1, remainder) for view in views]


def _box_tiles(k: Kernel, views: Sequence[View], widest: int) -> Iterator[tuple[int, int, list[View]]]:
    """The last axis becomes the free dimension, the largest of the other axes the partition dimension."""
    shape = views[0].shape
    partition_axis = max(range(len(shape) - 1), key=lambda axis: shape[axis])
    others = [axis for axis in range(len(shape) - 1) if axis != partition_axis]
    ordered = [view.transposed((*others, partition_axis, len(shape) - 1)) for view in views]
    yield from _inside(k, ordered, widest)


def _inside(k: Kernel, views: Sequence[View], widest: int) -> Iterator[tuple[int, int, list[View]]]:
    if views[0].rank > 2:
        with k.loop(views[0].shape[0]) as index:
            yield from _inside(k, [view.pick(0, index) for view in views], widest)
        return
    rows, columns = views[0].shape
    for top, height in k.spans(rows, PARTITIONS):
        for left, width in k.spans(columns, widest):
            yield height, width, [view.cut((top, height), (left, width)) for view in views]


def _folded(view: View, start: Affine, rows: int, width: int) -> View:
    stride = view.strides[0]
    return replace(view, offset=view.offset + start * stride, shape=(rows, width), strides=(width * stride, stride))


def _with_axes(view: View, rank: int) -> View:
    return replace(view, shape=(1,) * rank, strides=(0,) * rank)


def over_lanes(view: View, rows: Span) -> View:
    """Some rows of a view [rows, ...] as [lanes, chunks, ...]: row r is on lane r modulo 128. More than 128 rows are
    whole chunks."""
    part = view.cut(rows)
    chunks = max(rows[1] // PARTITIONS, 1)
    lanes = rows[1] // chunks
    (_, *shape), (stride, *strides) = part.shape, part.strides
    return replace(part, shape=(lanes, chunks, *shape), strides=(stride, stride * lanes, *strides))


def chunk_spans(k: Kernel, rows: int, chunks: int) -> Iterator[Span]:
    """Spans of rows: `chunks` chunks of 128 at a time, whole chunks, and the remaining rows."""
    full = rows // PARTITIONS
    for first, count in k.spans(full, chunks):
        yield first * PARTITIONS, count * PARTITIONS
    if rows % PARTITIONS:
        yield Affine(full * PARTITIONS), rows % PARTITIONS


def channel_tiles(k: Kernel, views: Sequence[View], widest: int) -> Iterator[list[View]]:
    """Tile views [channels, batch, positions] as [lanes, chunks, ...], with channels on lanes."""
    rows, width = views[0].shape[0], prod(views[0].shape[1:])
    flat = [view.reshaped((rows, 1, width)) for view in views]
    known = [view for view in flat if view is not None]
    whole = known if len(known) == len(views) else views
    for lanes in chunk_spans(k, rows, max(widest // max(width, 1), 1)):
        parts = [over_lanes(view, lanes) for view in whole]
        size = max(widest // parts[0].shape[1], 1)
        every = [(0, extent) for extent in parts[0].shape[:2]]
        with k.loop(parts[0].shape[2]) as image:
            for columns in k.spans(parts[0].shape[3], size):
                yield [part.cut(*every, (image, 1), columns) for part in parts]


def fill(k: Kernel, view: View, number: float) -> None:
    """Write a number to all elements of a view. The source tile holds whole rows, because a DMA that repeats a single
    element needs a descriptor per element."""
    for rows, width, (piece,) in each_tile(k, [view]):
        with k.scope():
            block = k.tile(view.dtype, rows, width)
            k.emit(Memset(engine=Engine.GPSIMD, dst=block.whole, value=stored_number(number, view.dtype)))
            k.copy(piece.far(), block.whole)
