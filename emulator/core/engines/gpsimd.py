"""Semantics of GpSimd: index patterns, gathers inside partitions and reductions across them."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from nxpipe.emulator.core.access import Bound, Handler
from nxpipe.emulator.core.arithmetic import (
    WORDS,
    combine,
    encode,
    floats,
    fold,
    raw,
    signed,
)
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import AffineSelect, GatherFree, IotaPattern, PartitionReduce
from nxpipe.emulator.isa.instruction import BITS, Instruction
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import require_indices


def iota(instruction: IotaPattern, at: Bound) -> None:
    dst = at.window("dst")
    numbers = _pattern(instruction.dst, instruction.start, instruction.by_partition, instruction.steps, at)
    dst.put(numbers if dst.dtype in WORDS else floats(numbers))


def affine_select(instruction: AffineSelect, at: Bound) -> None:
    dst = at.window("dst")
    numbers = _pattern(instruction.src, instruction.start, instruction.by_partition, instruction.steps, at)
    chosen = combine(instruction.compare, floats(np.sign(numbers)), np.zeros(1, np.float32)) != 0
    same = dst.dtype is instruction.src.dtype
    source = at.bits("src") if same else encode(at.floats("src"), dst.dtype)
    dst.put_bits(np.where(chosen, source, encode(np.full(1, instruction.otherwise), dst.dtype)))


def gather_free(_: GatherFree, at: Bound) -> None:
    source, indices = at.bits("src"), signed(at.numbers("indices"))
    require_indices(indices, source.shape[1])
    at.window("dst").put_bits(np.take_along_axis(source, indices.astype(np.int64), axis=1))


def _pattern(tile: Tile, start: Affine, by_partition: int, steps: tuple[int, ...], at: Bound) -> Array:
    """`start + p * by_partition + sum of index * step` in int32: a row for each partition."""
    numbers = start.at(at.indices) + np.arange(tile.partitions, dtype=np.int64) * by_partition
    for axis, step in zip(tile.axes, steps, strict=True):
        numbers = np.add.outer(numbers, np.arange(axis.size, dtype=np.int64) * step)
    return numbers.astype(np.int32).reshape(tile.partitions, -1)


def partition_reduce(instruction: PartitionReduce, at: Bound) -> None:
    dst, op = at.window("dst"), instruction.op
    if op in BITS:
        dst.put_bits(fold(op, at.bits("src"), 0).astype(raw(dst.dtype)))
    else:
        dst.put(fold(op, at.floats("src"), 0))


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
    IotaPattern: iota,
    AffineSelect: affine_select,
    GatherFree: gather_free,
    PartitionReduce: partition_reduce,
}
