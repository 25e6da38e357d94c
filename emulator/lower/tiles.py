"""Tiles of tensors [partition, free], the same for several tensors of one shape."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Final

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.cost import ISSUE
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel, Span
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.view import View

_LEAST_ROW: Final = 128  # elements of a row of a line
WIDEST: Final = 2048  # free elements of a tile: enough to make fixed costs per instruction negligible


def each_tile(k: Kernel, views: Sequence[View], widest: int = WIDEST) -> Iterator[tuple[int, int, list[View]]]:
    """Tile several views of one shape; yields partitions and free elements of each tile, and its part of every view.
    The body of the `for` statement is emitted once per tile size."""
    merged = views[0].merged(views[1:])
    if not merged[0].elements:
        return
    if merged[0].rank == 0:
        yield 1, 1, [_with_axes(view, 2) for view in merged]
    elif merged[0].rank == 1:
        yield from _line_tiles(k, merged, widest)
    else:
        yield from _box_tiles(k, merged, widest)


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


_MOST_FREE: Final = MOST_AXES - 1


def each_box(
    k: Kernel, views: Sequence[View], widest: int = WIDEST, rows: Sequence[int] | None = None
) -> Iterator[list[View]]:
    """Tile several views of one shape; yields the part of every view in each tile: the partition axis and up to three
    free axes. `rows` are the axes whose elements belong on different partitions; without them, the axes are chosen that
    take the fewest cycles."""
    if not views[0].elements:
        return
    if rows is None and len((merged := views[0].merged(views[1:]))[0].shape) < 2:
        if merged[0].rank and (chunks := _few_long_rows(views[0])):
            yield from _chunk_boxes(k, merged, chunks, widest)
            return
        for _, _, pieces in each_tile(k, views, widest):
            yield pieces
        return
    if rows is not None:
        arranged, partition = _rows_first(views, rows)
    else:
        arranged = list(merged)
        partition = min(range(merged[0].rank - 1), key=lambda axis: _box_cycles(merged[0].shape, axis, widest))
    others = [axis for axis in range(arranged[0].rank) if axis != partition]
    looped, step = _free_axes([arranged[0].shape[axis] for axis in others], widest)
    order = (*others[:looped], partition, *others[looped:])
    yield from _boxes(k, [view.transposed(order) for view in arranged], looped, step)


def _few_long_rows(view: View) -> int:
    """The number of chunks of 128 elements in fewer than 128 long rows; 0 if the tiles of the chunks do not fill whole
    lanes. A norm transposes such rows by their chunks."""
    chunks, remainder = divmod(view.elements, PARTITIONS)
    width = view.shape[-1] if view.rank else 1
    few = width % PARTITIONS == 0 < width and view.elements // width < PARTITIONS
    return chunks if few and not remainder and (chunks <= PARTITIONS or not chunks % PARTITIONS) else 0


def _chunk_boxes(k: Kernel, views: Sequence[View], chunks: int, widest: int) -> Iterator[list[View]]:
    """Chunk c on partition c modulo 128."""
    lanes = min(chunks, PARTITIONS)
    boxes = [
        replace(view, shape=(lanes, chunks // lanes, PARTITIONS), strides=(PARTITIONS * s, lanes * PARTITIONS * s, s))
        for view in views
        for s in view.strides
    ]
    for first, count in k.spans(chunks // lanes, max(widest // PARTITIONS, 1)):
        yield [box.cut((0, lanes), (first, count)) for box in boxes]


def _boxes(k: Kernel, views: Sequence[View], looped: int, step: int) -> Iterator[list[View]]:
    if looped:
        with k.loop(views[0].shape[0]) as index:
            yield from _boxes(k, [view.pick(0, index) for view in views], looped - 1, step)
        return
    for top, height in k.spans(views[0].shape[0], PARTITIONS):
        for left, width in k.spans(views[0].shape[1], step):
            yield [view.cut((top, height), (left, width)) for view in views]


def _rows_first(views: Sequence[View], rows: Sequence[int]) -> tuple[list[View], int]:
    """The views with as few axes as possible, those of rows before the others, and the longest axis of rows."""
    inner = [axis for axis in range(views[0].rank) if axis not in rows]
    first, *others = [view.transposed(rows) for view in views]
    outer = [view if view.rank else _with_axes(view, 1) for view in first.merged(others)]
    first, *others = [view.transposed(inner) for view in views]
    free = [view if view.rank else _with_axes(view, 1) for view in first.merged(others)]
    joined = [
        replace(row, shape=(*row.shape, *column.shape), strides=(*row.strides, *column.strides))
        for row, column in zip(outer, free, strict=True)
    ]
    return joined, max(range(outer[0].rank), key=lambda axis: outer[0].shape[axis])


def _free_axes(sizes: Sequence[int], widest: int) -> tuple[int, int]:
    """The number of axes to loop over, and how many elements of the first of the others a tile has."""
    looped, inside = len(sizes) - 1, 1
    while looped and len(sizes) - looped < _MOST_FREE and 2 * inside * sizes[looped] <= widest:
        inside *= sizes[looped]
        looped -= 1
    return looped, max(min(sizes[looped], widest // inside), 1)


def _box_cycles(shape: Sequence[int], partition: int, widest: int) -> float:
    others = [size for axis, size in enumerate(shape) if axis != partition]
    looped, step = _free_axes(others, widest)
    tiles = prod(others[:looped]) * -(-shape[partition] // PARTITIONS) * -(-others[looped] // step)
    return tiles * max(ISSUE, step * prod(others[looped + 1 :]))


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
