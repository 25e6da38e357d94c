"""Operators with indices computed at run time: indirect DMA on the hardware."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require, require_axes, require_indices


@dataclass(frozen=True)
class Iota(Operator, name="iota"):
    """start, start + step, ...: integers counted out along one axis."""

    length: int
    start: int
    step: int
    dtype: DType

    def infer(self) -> TensorType:
        require(self.length >= 0, self, f"{self.length} is no length")
        require(self.dtype.is_integer, self, f"{self.dtype} does not count exactly")
        return TensorType((self.length,), self.dtype)

    def compute(self) -> Array:
        return (self.start + self.step * np.arange(self.length, dtype=np.int64)).astype(self.dtype.held)


def _require_integers(op: Operator, indices: TensorType) -> None:
    require(indices.dtype.is_integer, op, f"the indices are {indices}, not integers")


@dataclass(frozen=True)
class Gather(Operator, name="gather"):
    """Rows of a table by index along one axis: embeddings, and index_select."""

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
    """One element for each index, which replaces the coordinate on one axis (torch.gather)."""

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
    """The first operand, with elements replaced by (or combined with) an update's: `take_along` backwards.

    With `combine` empty, of several updates of one element the last counts.
    """

    axis: int
    combine: str

    def infer(self, x: TensorType, update: TensorType, indices: TensorType) -> TensorType:
        require(not self.combine or self.combine in _SCATTERS, self, "there is no combination of this name")
        require_axes(self, (self.axis,), x.rank)
        _require_integers(self, indices)
        inside = indices.rank == x.rank and all(
            i == self.axis or indices.shape[i] <= size for i, size in enumerate(x.shape)
        )
        require(inside, self, f"indices {indices} reach outside of {x}")
        fits = update == x.with_shape(indices.shape)
        require(fits, self, f"{update} does not fill {indices.elements} elements of {x}")
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
    """Several axes addressed at once by integer tensors that broadcast together; other axes are taken whole.

    The addressed axes give way to the indices' common shape: in place when they are adjacent, in front when not.
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
        place = self.axes[0] if adjacent else 0
        rest = tuple(size for axis, size in enumerate(x.shape) if axis not in self.axes)
        return rest[:place] + common + rest[place:]

    def address(self, x: Array, indices: tuple[Array, ...]) -> tuple[Any, ...]:
        where: list[Any] = [slice(None)] * x.ndim
        for axis, index in zip(self.axes, indices, strict=True):
            size = x.shape[axis]
            wrapped = np.where(index < 0, index + size, index)  # PyTorch counts negative indices from the end
            require_indices(wrapped, size)
            where[axis] = wrapped
        return tuple(where)


@dataclass(frozen=True)
class Index(_Addressed, Operator, name="index"):
    """The elements at computed addresses."""

    axes: tuple[int, ...]
    moves_only: ClassVar[bool] = True

    def infer(self, x: TensorType, *indices: TensorType) -> TensorType:
        return x.with_shape(self.addressed_shape(self, x, indices))

    def compute(self, x: Array, *indices: Array) -> Array:
        return np.asarray(x[self.address(x, indices)])


@dataclass(frozen=True)
class IndexUpdate(_Addressed, Operator, name="index_update"):
    """The first operand, with the elements at computed addresses replaced by (or combined with) the second's."""

    axes: tuple[int, ...]
    combine: str

    def infer(self, x: TensorType, update: TensorType, *indices: TensorType) -> TensorType:
        require(not self.combine or self.combine in _SCATTERS, self, "there is no combination of this name")
        hole = self.addressed_shape(self, x, indices)
        fits = update.dtype is x.dtype and broadcast_shape(self, (update.shape, hole)) == hole
        require(fits, self, f"{update} does not fill a place of {x.with_shape(hole)}")
        return x

    def compute(self, x: Array, update: Array, *indices: Array) -> Array:
        result = x.copy()
        where = self.address(x, indices)
        if self.combine:
            _SCATTERS[self.combine].at(result, where, update)
        else:
            result[where] = update
        return result
