"""View: a tensor's layout in HBM as a buffer, an offset, and a stride for each axis. Most reshapes and transposes are
free, because readers follow the strides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.operands import Axis, Far
from nxpipe.emulator.lower.kernel import Span


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
        """A span of each axis; axes without a span are taken whole."""
        offset, shape = self.offset, list(self.shape)
        for axis, (start, size) in enumerate(spans):
            offset = offset + affine(start) * self.strides[axis]
            shape[axis] = size
        return replace(self, offset=offset, shape=tuple(shape))

    def pick(self, axis: int, at: Affine | int) -> "View":
        """One index of an axis, which is dropped."""
        return replace(
            self,
            offset=self.offset + affine(at) * self.strides[axis],
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
        """Broadcast by numpy's rule: a repeated axis has stride 0."""
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
        """This view and others of the same shape, with axes of size 1 dropped, and neighbours merged that are one
        stride in all of them."""
        views = (self, *others)
        axes = [axis for axis in range(self.rank) if self.shape[axis] != 1]
        found: list[tuple[int, tuple[int, ...]]] = []
        for axis in axes:
            size, strides = self.shape[axis], tuple(view.strides[axis] for view in views)
            if found and all(outer == inner * size for outer, inner in zip(found[-1][1], strides, strict=True)):
                found[-1] = (found[-1][0] * size, strides)
            else:
                found.append((size, strides))
        return tuple(
            replace(
                view,
                shape=tuple(size for size, _ in found),
                strides=tuple(strides[number] for _, strides in found),
            )
            for number, view in enumerate(views)
        )


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def whole(buffer: int, dtype: DType, shape: tuple[int, ...], offset: Affine | int = 0) -> View:
    return View(buffer, dtype, affine(offset), shape, packed(shape))


def line(view: View) -> Far:
    """All of what lies row by row, as one stretch."""
    return Far(view.buffer, view.dtype, view.offset, (Axis(view.elements, 1),))


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of old axes and runs of new ones that hold equally many elements, as short as they can be."""
    groups: list[tuple[list[int], list[int]]] = []
    at, to = 0, 0
    while at < len(old) or to < len(new):
        left, right = [at] if at < len(old) else [], [to] if to < len(new) else []
        sizes = [old[at] if left else 1, new[to] if right else 1]
        at, to = at + len(left), to + len(right)
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(at)
                sizes[0] *= old[at]
                at += 1
            else:
                right.append(to)
                sizes[1] *= new[to]
                to += 1
        groups.append((left, right))
    return groups


def _common_stride(axes: Sequence[tuple[int, int]]) -> int | None:
    """The stride of the last element of several axes that are walked through as one; None when they cannot be."""
    walked = [(size, stride) for size, stride in axes if size != 1]
    for (_, outer), (size, inner) in pairwise(walked):
        if outer != inner * size:
            return None
    return walked[-1][1] if walked else 1
