"""What instructions work on: tiles in the core's own memories, and stretches of tensors in HBM.

An access pattern is a start and up to four axes, each a size and a stride in elements. In SBUF and PSUM the partition
comes first and has no stride: neighbouring lanes read neighbouring partitions, all by the same pattern.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine


class Memory(StrEnum):
    SBUF = "sbuf"
    PSUM = "psum"


@dataclass(frozen=True, slots=True)
class Axis:
    size: int
    stride: int  # elements; 0 reads the same one again and again


@dataclass(frozen=True, slots=True)
class Tile:
    """Part of SBUF or PSUM: `partitions` lanes from `start` on, in each the elements at `offset` bytes by the axes."""

    memory: Memory
    dtype: DType
    start: int
    partitions: int
    offset: Affine  # bytes from the beginning of the partition
    axes: tuple[Axis, ...]

    @property
    def elements(self) -> int:
        """In each partition."""
        return prod(axis.size for axis in self.axes)

    @property
    def reach(self) -> tuple[int, int]:
        """The first byte and the one behind the last, seen from `offset`."""
        low, high = extent(self.axes)
        return low * self.dtype.itemsize, (high + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Far:
    """Part of a tensor in HBM. With `rows`, a tile of uint32 of one element a partition, the first axis has no stride
    of its own: its element p begins `rows[p]` times its stride behind the offset."""

    buffer: int  # number in the program's table
    dtype: DType
    offset: Affine  # elements from the beginning of the buffer
    axes: tuple[Axis, ...]
    rows: Tile | None = None

    @property
    def elements(self) -> int:
        return prod(axis.size for axis in self.axes)


Place = Tile | Far


def extent(axes: tuple[Axis, ...]) -> tuple[int, int]:
    """The least and the greatest element that the axes reach, seen from their start."""
    low = sum(min((axis.size - 1) * axis.stride, 0) for axis in axes)
    high = sum(max((axis.size - 1) * axis.stride, 0) for axis in axes)
    return low, high


def contiguous(*sizes: int) -> tuple[Axis, ...]:
    """Axes of elements that lie one behind the other, the last axis fastest."""
    axes: list[Axis] = []
    stride = 1
    for size in reversed(sizes):
        axes.append(Axis(size, stride))
        stride *= size
    return tuple(reversed(axes))
