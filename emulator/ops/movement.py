"""Operators that move elements, at static or at computed positions."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require, require_axes, require_indices


@dataclass(frozen=True)
class Reshape(Operator, name="reshape"):
    """The same elements, in row-major order, with another shape."""

    shape: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        fits = min(self.shape, default=0) >= 0 and math.prod(self.shape) == x.elements
        require(fits, self, f"the {x.elements} elements of {x} do not fill the shape {list(self.shape)}")
        return x.with_shape(self.shape)

    def compute(self, x: Array) -> Array:
        return x.reshape(self.shape)


@dataclass(frozen=True)
class Transpose(Operator, name="transpose"):
    """Axes in another order: axis i of the result is axis `order[i]` of the operand."""

    order: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require(
            sorted(self.order) == list(range(x.rank)), self, f"{self.order} is not a permutation of the axes of {x}"
        )
        return x.with_shape(tuple(x.shape[axis] for axis in self.order))

    def compute(self, x: Array) -> Array:
        return x.transpose(self.order)


@dataclass(frozen=True)
class Broadcast(Operator, name="broadcast"):
    """Axes of size one, and missing leading axes, repeated up to a shape."""

    shape: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require(min(self.shape, default=0) >= 0, self, f"{list(self.shape)} is not a shape")
        broadcast = broadcast_shape(self, (x.shape, self.shape))
        require(broadcast == self.shape, self, f"{x} does not broadcast to {list(self.shape)}")
        return x.with_shape(self.shape)

    def compute(self, x: Array) -> Array:
        return np.broadcast_to(x, self.shape)


class _Window:
    """A strided window of a tensor: on each axis from `starts` to `stops` by `steps`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]

    def window_shape(self, op: Operator, x: TensorType) -> tuple[int, ...]:
        lengths = {len(self.starts), len(self.stops), len(self.steps)}
        require(lengths == {x.rank}, op, f"a window into {x} needs bounds on each of its axes")
        bounds = list(zip(self.starts, self.stops, self.steps, x.shape, strict=True))
        inside = all(0 <= start <= stop <= size and step > 0 for start, stop, step, size in bounds)
        require(inside, op, f"the window {self.starts} to {self.stops} by {self.steps} is not inside {x}")
        return tuple((stop - start + step - 1) // step for start, stop, step, _ in bounds)

    @property
    def window(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.starts, self.stops, self.steps))


@dataclass(frozen=True)
class Slice(_Window, Operator, name="slice"):
    """The elements of a window."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        return x.with_shape(self.window_shape(self, x))

    def compute(self, x: Array) -> Array:
        return x[self.window]


@dataclass(frozen=True)
class SliceUpdate(_Window, Operator, name="slice_update"):
    """The first operand, with the elements of a window replaced by the second."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType, update: TensorType) -> TensorType:
        window_type = x.with_shape(self.window_shape(self, x))
        require(update == window_type, self, f"the window holds {window_type}, but the update is {update}")
        return x

    def compute(self, x: Array, update: Array) -> Array:
        result = x.copy()
        result[self.window] = update
        return result


@dataclass(frozen=True)
class Concat(Operator, name="concat"):
    """The concatenation of operands of equal type along an axis."""

    axis: int
    moves_only: ClassVar[bool] = True

    def infer(self, first: TensorType, *others: TensorType) -> TensorType:
        require_axes(self, (self.axis,), first.rank)
        for other in others:
            require(
                self._type_without_axis(other) == self._type_without_axis(first),
                self,
                f"{other} does not continue {first} along axis {self.axis}",
            )
        total = first.shape[self.axis] + sum(other.shape[self.axis] for other in others)
        return first.with_shape((*first.shape[: self.axis], total, *first.shape[self.axis + 1 :]))

    def _type_without_axis(self, x: TensorType) -> tuple[object, ...]:
        return x.dtype, x.rank, x.shape[: self.axis], x.shape[self.axis + 1 :]

    def compute(self, *parts: Array) -> Array:
        return np.concatenate(parts, axis=self.axis)


@dataclass(frozen=True)
class Pad(Operator, name="pad"):
    """The first operand surrounded by copies of a scalar."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType, filling: TensorType) -> TensorType:
        require(filling == TensorType((), x.dtype), self, f"{x} cannot be padded with {filling}")
        require(len(self.before) == len(self.after) == x.rank, self, f"{x} needs a padding on each of its axes")
        require(min(self.before + self.after, default=0) >= 0, self, "padding cannot be negative")
        return x.with_shape(tuple(map(sum, zip(self.before, x.shape, self.after, strict=True))))

    def compute(self, x: Array, filling: Array) -> Array:
        return np.pad(x, list(zip(self.before, self.after, strict=True)), constant_values=filling.item())


@dataclass(frozen=True)
class Bitcast(Operator, name="bitcast"):
    """The same bytes as another element type. If element sizes differ, the length of the last axis changes."""

    source: DType
    dtype: DType
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require(x.dtype is self.source, self, f"{x} is not of {self.source}")
        before, after = self.source.itemsize, self.dtype.itemsize
        if before == after:
            return x.with_dtype(self.dtype)
        require(
            x.rank > 0 and x.shape[-1] * before % after == 0,
            self,
            f"the bytes of the last axis of {x} are not a multiple of the size of {self.dtype}",
        )
        return TensorType((*x.shape[:-1], x.shape[-1] * before // after), self.dtype)

    def compute(self, x: Array) -> Array:
        stored = np.ascontiguousarray(x, self.source.stored).reshape(x.shape)
        return np.asarray(stored.view(self.dtype.stored).astype(self.dtype.held))


@dataclass(frozen=True)
class Flip(Operator, name="flip"):
    """The elements in reverse order along some axes."""

    axes: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        require_axes(self, self.axes, x.rank)
        return x

    def compute(self, x: Array) -> Array:
        return np.flip(x, self.axes)


@dataclass(frozen=True)
class Iota(Operator, name="iota"):
    """The integers start, start + step, ... along a single axis."""

    length: int
    start: int
    step: int
    dtype: DType

    def infer(self) -> TensorType:
        require(self.length >= 0, self, f"the length {self.length} is negative")
        require(self.dtype.is_integer, self, f"{self.dtype} is not an integer type")
        return TensorType((self.length,), self.dtype)

    def compute(self) -> Array:
        return (self.start + self.step * np.arange(self.length, dtype=np.int64)).astype(self.dtype.held)


def _require_integers(op: Operator, indices: TensorType) -> None:
    require(indices.dtype.is_integer, op, f"the indices are {indices}, not integers")


@dataclass(frozen=True)
class Gather(Operator, name="gather"):
    """Rows of a table, selected by index along one axis (embedding, index_select)."""

    axis: int
    moves_only: ClassVar[bool] = True

    def infer(self, table: TensorType, indices: TensorType) -> TensorType:
        require_axes(self, (self.axis,), table.rank)
        _require_integers(self, indices)
        return table.with_shape(table.shape[: self.axis] + indices.shape + table.shape[self.axis + 1 :])

    def compute(self, table: Array, indices: Array) -> Array:
        require_indices(indices, table.shape[self.axis])
        return np.take(table, indices, axis=self.axis)


@dataclass(frozen=True)
class TakeAlong(Operator, name="take_along"):
    """One element per index; the index replaces the coordinate on one axis (torch.gather)."""

    axis: int
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:
        require_axes(self, (self.axis,), x.rank)
        _require_integers(self, indices)
        aligned = indices.rank == x.rank and all(
            i == self.axis or indices.shape[i] <= size for i, size in enumerate(x.shape)
        )
        require(aligned, self, f"indices {indices} reach outside of {x}")
        return x.with_shape(indices.shape)

    def compute(self, x: Array, indices: Array) -> Array:
        require_indices(indices, x.shape[self.axis])
        whole = slice(None)
        corner = tuple(whole if i == self.axis else slice(size) for i, size in enumerate(indices.shape))
        return np.take_along_axis(x[corner], indices.astype(np.int64, copy=False), axis=self.axis)


_SCATTERS = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum, "multiply": np.multiply}


@dataclass(frozen=True)
class ScatterAlong(Operator, name="scatter_along"):
    """The first operand with elements replaced by, or combined with, those of an update: the inverse of `take_along`.

    With `combine` empty, the last of several updates of an element determines it.
    """

    axis: int
    combine: str

    def infer(self, x: TensorType, update: TensorType, indices: TensorType) -> TensorType:
        require(not self.combine or self.combine in _SCATTERS, self, "unknown combination")
        require_axes(self, (self.axis,), x.rank)
        _require_integers(self, indices)
        inside = indices.rank == x.rank and all(
            i == self.axis or indices.shape[i] <= size for i, size in enumerate(x.shape)
        )
        require(inside, self, f"indices {indices} reach outside of {x}")
        fits = update == x.with_shape(indices.shape)
        require(fits, self, f"the update {update} does not match {indices.elements} elements of {x}")
        return x

    def compute(self, x: Array, update: Array, indices: Array) -> Array:
        require_indices(indices, x.shape[self.axis])
        where: list[Any] = list(np.indices(indices.shape, sparse=True))
        where[self.axis] = indices
        result = x.copy()
        if self.combine:
            _SCATTERS[self.combine].at(result, tuple(where), update)
        else:
            result[tuple(where)] = update
        return result


class _Addressed:
    """Several axes indexed together by integer tensors, which are broadcast; the other axes are whole.

    The indices' common shape replaces the indexed axes: in their place if they are adjacent, else in front.
    """

    axes: tuple[int, ...]

    def addressed_shape(self, op: Operator, x: TensorType, indices: tuple[TensorType, ...]) -> tuple[int, ...]:
        require_axes(op, self.axes, x.rank)
        require(list(self.axes) == sorted(self.axes), op, f"axes {self.axes} are not in order")
        require(len(indices) == len(self.axes) > 0, op, f"{len(indices)} indices for {len(self.axes)} axes")
        for index in indices:
            _require_integers(op, index)
        common = broadcast_shape(op, [index.shape for index in indices])
        adjacent = self.axes[-1] - self.axes[0] == len(self.axes) - 1
        position = self.axes[0] if adjacent else 0
        remaining = tuple(size for axis, size in enumerate(x.shape) if axis not in self.axes)
        return remaining[:position] + common + remaining[position:]

    def address(self, x: Array, indices: tuple[Array, ...]) -> tuple[Any, ...]:
        where: list[Any] = [slice(None)] * x.ndim
        for axis, index in zip(self.axes, indices, strict=True):
            size = x.shape[axis]
            wrapped = np.where(index < 0, index + size, index)  # PyTorch counts negative indices from the end
            require_indices(wrapped, size)
            where[axis] = np.asarray(wrapped, order="C")
        return tuple(where)


@dataclass(frozen=True)
class Index(_Addressed, Operator, name="index"):
    """The elements at computed indices (advanced indexing)."""

    axes: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType, *indices: TensorType) -> TensorType:
        return x.with_shape(self.addressed_shape(self, x, indices))

    def compute(self, x: Array, *indices: Array) -> Array:
        return np.asarray(x[self.address(x, indices)])


@dataclass(frozen=True)
class IndexUpdate(_Addressed, Operator, name="index_update"):
    """The first operand with the elements at computed indices replaced by, or combined with, those of the second."""

    axes: tuple[int, ...]
    combine: str

    def infer(self, x: TensorType, update: TensorType, *indices: TensorType) -> TensorType:
        require(not self.combine or self.combine in _SCATTERS, self, "unknown combination")
        indexed_shape = self.addressed_shape(self, x, indices)
        fits = update.dtype is x.dtype and broadcast_shape(self, (update.shape, indexed_shape)) == indexed_shape
        require(fits, self, f"the update {update} does not match the indexed {x.with_shape(indexed_shape)}")
        return x

    def compute(self, x: Array, update: Array, *indices: Array) -> Array:
        result = x.copy()
        where = self.address(x, indices)
        # numpy visits elements in memory order: of contiguous operands, the last update in row-major order wins.
        update = np.asarray(update, order="C")
        if self.combine:
            _SCATTERS[self.combine].at(result, where, update)
        else:
            result[where] = update
        return result
