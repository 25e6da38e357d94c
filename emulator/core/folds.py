"""What the vector engine and GpSimd make of many elements: sums, running results, statistics."""

import numpy as np

from nxpipe.emulator.core.alu import combine, fold
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import raw
from nxpipe.emulator.core.vector import bits
from nxpipe.emulator.isa.gpsimd import PartitionReduce
from nxpipe.emulator.isa.instruction import BITS
from nxpipe.emulator.isa.vector import BnAggregate, BnStats, TensorReduce, TensorTensorScan
from nxpipe.emulator.numerics import Array, Floats


def tensor_reduce(instruction: TensorReduce, at: Bound) -> None:
    src, dst, op = instruction.src, at.window("dst"), instruction.op
    kept = [axis.size for axis in src.axes[: len(src.axes) - instruction.axes]]
    values = bits(at, "src") if op in BITS else at.floats("src")
    folded = fold(op, values.reshape(src.partitions, *kept, -1), -1)
    if op in BITS:
        dst.put_bits(folded.astype(raw(dst.dtype)))
    else:
        dst.put(-folded if instruction.negate else folded)


def partition_reduce(instruction: PartitionReduce, at: Bound) -> None:
    dst, op = at.window("dst"), instruction.op
    if op in BITS:
        dst.put_bits(fold(op, bits(at, "src"), 0).astype(raw(dst.dtype)))
    else:
        dst.put(fold(op, at.floats("src"), 0))


def scan(instruction: TensorTensorScan, at: Bound) -> None:
    left, right = at.floats("left"), at.floats("right")
    results = np.empty(left.shape, np.float32)
    state: Array = np.broadcast_to(at.scalar("initial"), (len(left), 1))[:, 0]
    for column in range(left.shape[1]):
        state = combine(instruction.op1, combine(instruction.op0, left[:, column], state), right[:, column])
        results[:, column] = state
    at.put(results)


def bn_stats(_: BnStats, at: Bound) -> None:
    x = at.floats("src")
    at.put(np.concatenate([_statistics(x[:, 0::2]), _statistics(x[:, 1::2])], axis=1))


def bn_aggregate(_: BnAggregate, at: Bound) -> None:
    x = at.floats("src")
    counts, means_, squares = x[:, 0::3], x[:, 1::3], x[:, 2::3]
    total = counts.sum(axis=1, keepdims=True)
    mean = (counts * means_).sum(axis=1, keepdims=True) / total
    apart = means_ - mean
    variance = (squares + counts * apart * apart).sum(axis=1, keepdims=True) / total
    at.put(np.concatenate([mean, variance], axis=1))


def _statistics(x: Floats) -> Floats:
    """Count, mean, and variance times count."""
    if not x.shape[1]:
        return np.zeros((len(x), 3), np.float32)
    mean = x.mean(axis=1, keepdims=True)
    apart = x - mean
    squares = (apart * apart).sum(axis=1, keepdims=True)
    return np.concatenate([np.full_like(mean, x.shape[1]), mean, squares], axis=1)
