"""Copies in HBM after which another axis is the contiguous one.

By strides alone such a copy moves one element at a time, which takes a DMA queue a hundred times as long as whole runs.
So blocks of both axes are brought into SBUF as they lie, turned there, and stored as they are to lie: from v3 on the
DMA turns what it brings; before that, and for single bytes, the vector engine does, 32 x 32 elements at a time. Both
keep every bit, which the tensor engine of v2 does not where there are infinities.
"""

from typing import Final

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.tensor import NcTranspose
from nxpipe.emulator.lower.kernel import PARTITIONS, Block, Kernel, Span
from nxpipe.emulator.lower.view import View

_BLOCK: Final = 512  # elements of either axis: runs of 1 KiB for types of two bytes
_CORNER: Final = 32  # of what the vector engine turns
_LEAST: Final = 16  # elements of either axis: below, runs are hardly longer than elements


def turned_axis(dst: View, src: View) -> int | None:
    """Of two views of one shape without needless axes: the axis that is contiguous where the copy begins, if the last
    one is where it ends and both are long enough."""
    if dst.rank < 2 or dst.dtype is not src.dtype or dst.strides[-1] != 1 or src.strides[-1] == 1:
        return None
    for axis in range(src.rank - 1):
        if src.strides[axis] == 1 and min(src.shape[axis], src.shape[-1]) >= _LEAST and src.strides[-1]:
            return axis
    return None


def copy_turned(k: Kernel, dst: View, src: View, axis: int) -> None:
    others = tuple(each for each in range(src.rank - 1) if each != axis)
    _copy(k, *(view.transposed((*others, axis, src.rank - 1)) for view in (dst, src)))


def _copy(k: Kernel, dst: View, src: View) -> None:
    if dst.rank > 2:
        with k.loop(dst.shape[0]) as turn:
            _copy(k, dst.pick(0, turn), src.pick(0, turn))
        return
    rows, columns = dst.shape  # of the result; rows are contiguous in the source
    for left, width in k.spans(columns, _BLOCK):
        for top, height in k.spans(rows, _BLOCK):
            with k.room():
                part = src.cut((top, height), (left, width)).transposed((1, 0))
                block = k.tile(dst.dtype, min(height, PARTITIONS), -(-height // PARTITIONS), width, turns=2)
                _bring(k, block, part)
                for chunk, depth in k.chunks(height):
                    to = dst.cut((top + chunk * PARTITIONS, depth), (left, width))
                    k.copy(to.far(), block.cut(depth, (chunk, 1)))


def _bring(k: Kernel, block: Block, part: View) -> None:
    """A part [columns, rows] into a block [128, chunks of rows, columns]."""
    columns, rows = part.shape
    if k.core.nki_gen > 2 and part.dtype.itemsize in (2, 4):
        for chunk, depth in k.chunks(rows):
            far = part.cut((0, columns), (chunk * PARTITIONS, depth)).far()
            k.turn(block.cut(depth, (chunk, 1)), far)
        return
    for left, width in k.spans(columns, PARTITIONS):
        with k.room():
            straight = k.tile(part.dtype, width, rows, turns=2)
            k.copy(straight.whole, part.cut((left, width)).far())
            for chunk, depth in k.chunks(rows):
                _turn(k, block, straight, chunk, (left, depth))


def _turn(k: Kernel, block: Block, straight: Block, chunk: Affine, place: Span) -> None:
    left, depth = place
    for low in range(0, straight.partitions, _CORNER):
        lanes = min(_CORNER, straight.partitions - low)
        for first in range(0, depth, _CORNER):
            count = min(_CORNER, depth - first)
            dst = block.cut((first, count), (chunk, 1), (left + low, lanes))
            src = straight.cut((low, lanes), (chunk * PARTITIONS + first, count))
            k.emit(NcTranspose(engine=Engine.VECTOR, dst=dst, src=src))
