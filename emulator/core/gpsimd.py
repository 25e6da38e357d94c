"""What GpSimd alone does: numbers that count along a tile, and gathers inside of partitions."""

import numpy as np

from nxpipe.emulator.core.alu import WORDS, combine
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import encode, floats, signed
from nxpipe.emulator.core.vector import bits
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import AffineSelect, GatherFree, Iota
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import require_indices


def iota(instruction: Iota, at: Bound) -> None:
    dst = at.window("dst")
    numbers = _counted(instruction.dst, instruction.start, instruction.by_partition, instruction.steps, at)
    dst.put(numbers if dst.dtype in WORDS else floats(numbers))


def affine_select(instruction: AffineSelect, at: Bound) -> None:
    dst = at.window("dst")
    numbers = _counted(instruction.src, instruction.start, instruction.by_partition, instruction.steps, at)
    chosen = combine(instruction.compare, floats(np.sign(numbers)), np.zeros(1, np.float32)) != 0
    same = dst.dtype is instruction.src.dtype
    source = bits(at, "src") if same else encode(at.floats("src"), dst.dtype)
    dst.put_bits(np.where(chosen, source, encode(np.full(1, instruction.otherwise), dst.dtype)))


def gather_free(_: GatherFree, at: Bound) -> None:
    source, indices = bits(at, "src"), signed(at.numbers("indices"))
    require_indices(indices, source.shape[1])
    at.window("dst").put_bits(np.take_along_axis(source, indices.astype(np.int64), axis=1))


def _counted(tile: Tile, start: Affine, by_partition: int, steps: tuple[int, ...], at: Bound) -> Array:
    """In int32, a row for each partition."""
    numbers = start.at(at.indices) + np.arange(tile.partitions, dtype=np.int64) * by_partition
    for axis, step in zip(tile.axes, steps, strict=True):
        numbers = np.add.outer(numbers, np.arange(axis.size, dtype=np.int64) * step)
    return numbers.astype(np.int32).reshape(tile.partitions, -1)
