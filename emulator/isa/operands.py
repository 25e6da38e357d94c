"""Operands of instructions: tiles in SBUF and PSUM, and parts of buffers in HBM.

An access pattern is an offset and up to four axes, each with a size and a stride in elements. In SBUF and PSUM the
partition is the first axis and has no stride: neighbouring lanes access neighbouring partitions with the same pattern.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine


class Memory(StrEnum):
    SBUF = "sbuf"
    PSUM = "psum"

    __hash__ = str.__hash__  # that of Enum is a function in Python


@dataclass(frozen=True, slots=True)
class Axis:
    size: int
    stride: int  # elements; 0 repeats one element


@dataclass(frozen=True, slots=True)
class Tile:
    """An operand in SBUF or PSUM: `partitions` lanes from `start` on; in each lane, the elements from `offset` on.

    `allocation` is the number of the allocation that contains it, for the compiler only: it is neither stored nor
    compared; 0 is unknown."""

    memory: Memory
    dtype: DType
    start: int
    partitions: int
    offset: Affine  # bytes from the beginning of the partition
    axes: tuple[Axis, ...]
    allocation: int = field(default=0, compare=False, repr=False)

    def at(self, offset: Affine) -> "Tile":
        """The tile at another offset."""
        return Tile(self.memory, self.dtype, self.start, self.partitions, offset, self.axes, self.allocation)

    @property
    def elements(self) -> int:
        """Elements in each partition."""
        return prod(axis.size for axis in self.axes)

    @property
    def reach(self) -> tuple[int, int]:
        """The first accessed byte and the end, relative to `offset`."""
        (low, high), size = extent(self.axes), self.dtype.itemsize
        return low * size, (high + 1) * size


@dataclass(frozen=True, slots=True)
class Far:
    """An operand in HBM: a part of a buffer. `rows` (indirect DMA) is a tile with one uint32 row number in each
    partition: element p of the first axis begins `rows[p]` times the stride of that axis after the offset."""

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
    """The least and the greatest element index that the axes reach, relative to the offset."""
    low = high = 0
    for axis in axes:
        reach = (axis.size - 1) * axis.stride
        if reach > 0:
            high += reach
        else:
            low += reach
    return low, high


def contiguous(*sizes: int) -> tuple[Axis, ...]:
    """Axes of contiguous elements in row-major order."""
    axes: list[Axis] = []
    stride = 1
    for size in reversed(sizes):
        axes.append(Axis(size, stride))
        stride *= size
    return tuple(reversed(axes))
