"""Tiles of tensors: pieces of partitions by free elements, the same for several tensors of one shape."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lanes import stored_number
from nxpipe.emulator.lower.view import View

WIDEST: Final = 2048  # free elements of a piece: enough that its fixed costs do not count


def each_tile(
    k: Kernel, views: Sequence[View], widest: int = WIDEST, by_row: bool = False
) -> Iterator[tuple[int, int, list[View]]]:
    """Partitions and free elements of each tile, with its part of every view. Use it as the head of a `for`, whose body
    is emitted once for each size of tile. With `by_row`, rows are not merged into longer ones."""
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
    """The views with as few axes as possible before the last."""
    first, *others = [replace(view, shape=view.shape[:-1], strides=view.strides[:-1]) for view in views]
    merged = first.merged(others)
    return tuple(
        replace(view, shape=(*view.shape, whole.shape[-1]), strides=(*view.strides, whole.strides[-1]))
        for view, whole in zip(merged, views, strict=True)
    )


def _line_tiles(k: Kernel, views: Sequence[View], widest: int) -> Iterator[tuple[int, int, list[View]]]:
    """A line is folded into rows, as many as there are partitions, and what is left over is a row by itself."""
    size = views[0].shape[0]
    width = min(-(-size // PARTITIONS), widest)
    rows, rest = divmod(size, width)
    whole = [_folded(view, Affine(), rows, width) for view in views]
    for start, count in k.spans(rows, PARTITIONS):
        yield count, width, [view.cut((start, count)) for view in whole]
    if rest:
        yield 1, rest, [_folded(view, Affine(rows * width), 1, rest) for view in views]


def _box_tiles(k: Kernel, views: Sequence[View], widest: int) -> Iterator[tuple[int, int, list[View]]]:
    """The last axis lies along the partitions' free elements, the largest of the others across partitions."""
    shape = views[0].shape
    across = max(range(len(shape) - 1), key=lambda axis: shape[axis])
    others = [axis for axis in range(len(shape) - 1) if axis != across]
    ordered = [view.transposed((*others, across, len(shape) - 1)) for view in views]
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


def fill(k: Kernel, view: View, number: float) -> None:
    """Write one number to all elements of a view. Whole rows are written: a DMA that reads one element again and again
    would need a descriptor for each."""
    for rows, width, (piece,) in each_tile(k, [view]):
        with k.scope():
            block = k.tile(view.dtype, rows, width)
            k.emit(Memset(engine=Engine.GPSIMD, dst=block.whole, value=stored_number(number, view.dtype)))
            k.copy(piece.far(), block.whole)
