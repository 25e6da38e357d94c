"""View: a tensor's layout in HBM as a buffer, an offset, and a stride for each axis. Most reshapes and transposes are
views and move no data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.operands import Axis, Far
from nxpipe.emulator.lower.kernel import PARTITIONS, Span


@dataclass(frozen=True)
class View:
    buffer: int
    dtype: DType
    offset: Affine  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return self == replace(self, strides=packed(self.shape)) or self.elements <= 1

    def far(self) -> Far:
        """The whole view as an operand."""
        return Far(self.buffer, self.dtype, self.offset, tuple(map(Axis, self.shape, self.strides)))

    def cut(self, *spans: Span) -> "View":
        """A span of each axis; axes without a span are whole."""
        offset, shape = self.offset, list(self.shape)
        for axis, (start, size) in enumerate(spans):
            offset = offset + affine(start) * self.strides[axis]
            shape[axis] = size
        return replace(self, offset=offset, shape=tuple(shape))

    def pick(self, axis: int, index: Affine | int) -> "View":
        """The view at one index of an axis, without that axis."""
        return replace(
            self,
            offset=self.offset + affine(index) * self.strides[axis],
            shape=self.shape[:axis] + self.shape[axis + 1 :],
            strides=self.strides[:axis] + self.strides[axis + 1 :],
        )

    def transposed(self, axes: Sequence[int]) -> "View":
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in axes),
            strides=tuple(self.strides[axis] for axis in axes),
        )

    def broadcast(self, shape: tuple[int, ...]) -> "View":
        """Broadcast by numpy's rules: a repeated axis has stride 0."""
        missing = len(shape) - self.rank
        strides = (0,) * missing + tuple(
            0 if old == 1 and new != 1 else stride
            for old, new, stride in zip(self.shape, shape[missing:], self.strides, strict=True)
        )
        return replace(self, shape=shape, strides=strides)

    def reshaped(self, shape: tuple[int, ...]) -> "View | None":
        """The same elements in the same order with another shape; None if strides cannot express it."""
        if self.elements == 0 or prod(shape) != self.elements:
            return None if self.elements else replace(self, shape=shape, strides=packed(shape))
        strides: list[int] = []
        groups = _groups(self.shape, shape)
        for old, new in groups:
            stride = _common_stride([(self.shape[axis], self.strides[axis]) for axis in old])
            if stride is None:
                return None
            strides += [stride * step for step in packed(tuple(shape[axis] for axis in new))]
        return replace(self, shape=shape, strides=tuple(strides))

    def packed_as(self, shape: tuple[int, ...]) -> "View":
        """Contiguous elements with another shape."""
        return replace(self, shape=shape, strides=packed(shape))

    def merged(self, others: Sequence["View"] = ()) -> tuple["View", ...]:
        """This view and others of the same shape with as few axes as possible: axes of size 1 are dropped, and adjacent
        axes are merged if a single stride expresses both in every view."""
        views = (self, *others)
        axes = [axis for axis in range(self.rank) if self.shape[axis] != 1]
        merged_axes: list[tuple[int, tuple[int, ...]]] = []
        for axis in axes:
            size, strides = self.shape[axis], tuple(view.strides[axis] for view in views)
            if merged_axes and all(
                outer == inner * size for outer, inner in zip(merged_axes[-1][1], strides, strict=True)
            ):
                merged_axes[-1] = (merged_axes[-1][0] * size, strides)
            else:
                merged_axes.append((size, strides))
        return tuple(
            replace(
                view,
                shape=tuple(size for size, _ in merged_axes),
                strides=tuple(strides[number] for _, strides in merged_axes),
            )
            for number, view in enumerate(views)
        )


@dataclass(frozen=True)
class TiledView(View):
    """A parameter [contraction, columns] stored in tiles (`Buffer.tile`), or several such matrices, of which `pick`
    gives one. Strides cannot express it: only matmuls read it, through `loads`."""

    tile: int

    def loads(self, chunk: Affine | int, depth: int, columns: Span, inside: Span) -> list[tuple[int, int, Far]]:
        """The reads that fill a `TiledBlock` with `depth` rows from `chunk` on: the first element of each in a
        partition of the block, its number of partitions, and the operand. `columns` begin at a tile, or lie within the
        tile `inside` (its first column and its width)."""
        (rows, total), (column, width), (first, tile) = self.shape, columns, inside
        chunks, rest = divmod(depth, PARTITIONS)
        all_chunks = rows // PARTITIONS
        lanes = Axis(PARTITIONS, all_chunks * total)
        reads: list[tuple[int, int, Affine, tuple[Axis, ...]]] = []
        if width < tile:
            start = affine(first) * all_chunks + affine(chunk) * tile + (affine(column) + affine(first) * -1)
            reads.append((0, PARTITIONS, start, (lanes, Axis(chunks, tile), Axis(width, 1))))
        elif chunks == all_chunks:
            start = affine(column) * all_chunks
            reads.append((0, PARTITIONS, start, (lanes, Axis(chunks, width), Axis(width, 1))))
        else:
            whole, last = divmod(width, self.tile)
            start = affine(column) * all_chunks + affine(chunk) * self.tile
            tiles = (lanes, Axis(whole, all_chunks * self.tile), Axis(chunks * self.tile, 1))
            reads.append((0, PARTITIONS, start, tiles))
            start = (affine(column) + whole * self.tile) * all_chunks + affine(chunk) * last
            tiles = (lanes, Axis(chunks, last), Axis(last, 1))
            reads.append((whole * self.tile * chunks, PARTITIONS, start, tiles))
        start = affine(column) + all_chunks * PARTITIONS * total
        reads.append((chunks * width, rest, start, (Axis(rest, total), Axis(width, 1))))
        return [
            (at, lanes_read, Far(self.buffer, self.dtype, self.offset + start, axes))
            for at, lanes_read, start, axes in reads
            if all(axis.size for axis in axes)
        ]


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def whole(buffer: int, dtype: DType, shape: tuple[int, ...], offset: Affine | int = 0) -> View:
    """The contiguous view of a buffer."""
    return View(buffer, dtype, affine(offset), shape, packed(shape))


def line(view: View) -> Far:
    """A contiguous view as an operand with a single axis."""
    return Far(view.buffer, view.dtype, view.offset, (Axis(view.elements, 1),))


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of old and new axes with equal numbers of elements. Each run can be reshaped independently."""
    groups: list[tuple[list[int], list[int]]] = []
    old_axis, new_axis = 0, 0
    while old_axis < len(old) or new_axis < len(new):
        left, right = [old_axis] if old_axis < len(old) else [], [new_axis] if new_axis < len(new) else []
        sizes = [old[old_axis] if left else 1, new[new_axis] if right else 1]
        old_axis, new_axis = old_axis + len(left), new_axis + len(right)
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(old_axis)
                sizes[0] *= old[old_axis]
                old_axis += 1
            else:
                right.append(new_axis)
                sizes[1] *= new[new_axis]
                new_axis += 1
        groups.append((left, right))
    return groups


def _common_stride(axes: Sequence[tuple[int, int]]) -> int | None:
    """The stride of several axes merged into one; None if a single stride cannot express them."""
    nontrivial = [(size, stride) for size, stride in axes if size != 1]
    for (_, outer), (size, inner) in pairwise(nontrivial):
        if outer != inner * size:
            return None
    return nontrivial[-1][1] if nontrivial else 1
