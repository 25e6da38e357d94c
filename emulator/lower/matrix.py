"""A matrix of rows as it lies in SBUF: row r on partition r modulo 128, and those of a partition one behind the other.

What is written for a matrix in HBM, where any pattern of strides can be said, can often be said of lanes as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile
from nxpipe.emulator.lower.kernel import PARTITIONS


@dataclass(frozen=True)
class Matrix:
    """Scratch as rows so wide, in SBUF from this byte of each partition on."""

    width: int
    address: int = 0

    @property
    def block(self) -> int:
        """Elements of 128 rows."""
        return PARTITIONS * self.width

    def tile(self, far: Far, counts: Sequence[int]) -> Tile | None:
        """Where a part of it lies; None if lanes of SBUF cannot say that."""
        if far.rows is not None or far.offset.base < 0:
            return None
        lane, start = divmod(far.offset.base % self.block, self.width)
        axes = [axis for axis in far.axes if axis.size != 1]
        rows = axes[0].size if axes and axes[0].stride == self.width else 1
        inner = [self._axis(axis) for axis in (axes[1:] if rows > 1 else axes)]
        terms = [(depth, self._inside(step)) for depth, step in far.offset.terms]
        turns = [(turn, self._inside(turn.step)) for turn in far.offset.turns]
        found = [*(axis.stride for axis in inner if axis), *(step for _, step in terms), *(step for _, step in turns)]
        if lane + rows > PARTITIONS or None in inner or None in found or len(inner) > MOST_AXES:
            return None
        ways = [(axis.size, axis.stride) for axis in axes[rows > 1 :]]
        ways += [(counts[depth], step) for depth, step in far.offset.terms]
        ways += [(turn.count, turn.step) for turn in far.offset.turns]
        if start + sum((times - 1) * (step % self.block) for times, step in ways) >= self.width:
            return None
        size = far.dtype.itemsize
        base = far.offset.base // self.block * self.width + start
        offset = Affine(
            self.address + base * size,
            tuple((depth, (step or 0) * size) for depth, step in terms),
            tuple(RotatingOffset((step or 0) * size, turn.count, turn.of) for turn, step in turns),
        )
        kept = tuple(axis for axis in inner if axis) or (Axis(1, 1),)
        return Tile(Memory.SBUF, far.dtype, lane, rows, offset, kept)

    def _inside(self, step: int) -> int | None:
        """Elements of a partition that a step within a row, or over whole blocks of rows, goes."""
        blocks, rest = divmod(step, self.block)
        return None if step < 0 or rest >= self.width else blocks * self.width + rest

    def _axis(self, axis: Axis) -> Axis | None:
        stride = self._inside(axis.stride)
        return None if stride is None else Axis(axis.size, stride)


def _by_lanes(copy: DmaCopy, buffer: int, width: int) -> DmaCopy:
    """A copy in HBM with the rows of one side as lanes of SBUF take them: in blocks of 128."""
    sides = (copy.dst, copy.src)
    if not all(isinstance(side, Far) and side.rows is None for side in sides):
        return copy
    own = copy.dst if isinstance(copy.dst, Far) and copy.dst.buffer == buffer else copy.src
    assert isinstance(own, Far)
    if [axis.size for axis in copy.dst.axes] != [axis.size for axis in copy.src.axes]:
        return copy
    split = _split(own.axes, width)
    if split is None:
        return copy
    dst, src = (_reordered(side.axes, *split) for side in sides)
    return (
        copy
        if len(dst) > MOST_AXES
        else replace(copy, dst=replace(copy.dst, axes=dst), src=replace(copy.src, axes=src))
    )


def _split(axes: Sequence[Axis], width: int) -> tuple[int, int, int] | None:
    """Which axis goes over many rows; into how many blocks of 128, and elements of a row, it is taken apart."""
    for at, axis in enumerate(axes):
        within = width if axis.stride == 1 else 1
        rows, rest = divmod(axis.size, within)
        if axis.stride * within == width and not rest and rows > PARTITIONS and not rows % PARTITIONS:
            return at, rows // PARTITIONS, within
    return None


def _reordered(axes: Sequence[Axis], at: int, blocks: int, within: int) -> tuple[Axis, ...]:
    stride = axes[at].stride
    parts = (Axis(blocks, stride * within * PARTITIONS), *([Axis(within, stride)] if within > 1 else []))
    return (Axis(PARTITIONS, stride * within), *axes[:at], *parts, *axes[at + 1 :])


def lying_in(step: Instruction, homes: Mapping[int, Matrix], counts: tuple[int, ...]) -> Instruction | None:
    """The copy between places in SBUF; None if it cannot be one."""
    if not isinstance(step, DmaCopy):
        return None
    for name in ("dst", "src"):
        far = getattr(step, name)
        if isinstance(far, Far) and far.buffer in homes:
            home = homes[far.buffer]
            step = _by_lanes(step, far.buffer, home.width)
            tile = home.tile(getattr(step, name), counts)
            if tile is None:
                return None
            step = replace(step, **{name: tile})  # type: ignore[arg-type]
    return step
