"""Semantics of the instructions: a handler for each record of `emulator.isa`, in the order of the engines.

These are the plain, slow reference semantics of the hardware. Collectives need all ranks and are in `EXCHANGES`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from nxpipe.emulator.core.access import Bound, Handler, move, same_bits
from nxpipe.emulator.core.arithmetic import (
    WORDS,
    combine,
    combine_bits,
    combine_words,
    encode,
    floats,
    fold,
    raw,
    signed,
)
from nxpipe.emulator.core.faults import MalformedInstruction
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllGather, CollectiveAllReduce, CollectiveReduceScatter
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose
from nxpipe.emulator.isa.gpsimd import AffineSelect, GatherFree, IotaPattern, PartitionReduce
from nxpipe.emulator.isa.instruction import BITS, UNARY, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import (
    BnAggregate,
    BnStats,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
)
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.base import require_indices
from nxpipe.emulator.ops.elementwise import Unary


def dma_copy(_: DmaCopy, at: Bound) -> None:
    move(at.window("src"), at.window("dst"))


def dma_transpose(_: DmaTranspose, at: Bound) -> None:
    dst, src = at.window("dst"), at.window("src")
    dst.put_bits(src.bits().reshape(src.flat).T)


DMA_HANDLERS: Final[Mapping[type[Instruction], Handler]] = {DmaCopy: dma_copy, DmaTranspose: dma_transpose}


Exchange = Callable[[Any, Bound, Sequence[Array], int], None]


def contribution(at: Bound) -> Array:
    """A rank's operand of a collective: a copy of `src`, because a later instruction may overwrite it before all ranks
    have arrived. One row for each partition; an operand in HBM is one row."""
    src = at.instruction.places["src"]
    return at.numbers("src").reshape(src.partitions if isinstance(src, Tile) else 1, -1).copy()


def all_reduce(instruction: CollectiveAllReduce, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(_sum(instruction.op, contributions))


def reduce_scatter(instruction: CollectiveReduceScatter, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(np.split(_sum(instruction.op, contributions), len(contributions), axis=-1)[rank])


def all_gather(_: CollectiveAllGather, at: Bound, contributions: Sequence[Array], rank: int) -> None:
    at.put(np.concatenate(contributions, axis=-1))


def _sum(op: Alu, contributions: Sequence[Array]) -> Floats:
    """The sum from the first rank to the last, in float32, so that every rank computes the same bits."""
    return reduce(lambda total, contribution: combine(op, total, contribution), map(floats, contributions))


EXCHANGES: Final[Mapping[type[Instruction], Exchange]] = {
    CollectiveAllReduce: all_reduce,
    CollectiveReduceScatter: reduce_scatter,
    CollectiveAllGather: all_gather,
}


_SINGLE_THREADED: Final = 1 << 18  # multiplications; up to this number OpenBLAS uses one thread


def matmul(instruction: Matmul, at: Bound) -> None:
    product = multiply(at.floats("stationary").T, at.floats("moving"))
    if instruction.accumulate.at(at.indices) > 0:
        at.added += 1
        at.window("dst").add_to_sum(product)
    else:
        at.window("dst").begin_sum(product)


def transpose(instruction: NcTranspose, at: Bound) -> None:
    dst, src = at.window("dst"), at.window("src")
    if not same_bits(src.dtype, dst.dtype):
        dst.put(floats(src.numbers()).T)
        return
    transposed = src.bits().reshape(src.flat).T
    if instruction.engine is Engine.TENSOR and at.core.nki_gen < 3 and src.dtype.is_float:
        transposed = _identity_product(transposed, src.numbers().T, src.dtype)
    dst.put_bits(transposed)


def multiply(left: Floats, right: Floats) -> Floats:
    """A matrix product, in blocks of columns so small that BLAS starts no threads. The product of two tiles takes less
    time than waking a thread on a busy machine."""
    (height, inner), width = left.shape, right.shape[1]
    block = max(_SINGLE_THREADED // (height * inner), 1)
    count = width // block
    full = count * block
    result = np.empty((height, width), np.float32)
    pieces = result[:, :full].reshape(height, count, block, copy=False).transpose(1, 0, 2)
    np.matmul(left, right[:, :full].reshape(inner, count, block).transpose(1, 0, 2), out=pieces)
    np.matmul(left, right[:, full:], out=result[:, full:])
    return result


def _identity_product(bits: Array, numbers: Array, dtype: DType) -> Array:
    """Transposed bits before v3, where a transpose is a product with the identity: an infinity or a NaN makes each sum
    that contains it NaN."""
    not_finite = ~np.isfinite(numbers).all(axis=1)
    if not_finite.any():
        bits = bits.copy()
        bits[not_finite] = encode(np.full(1, np.nan, np.float32), dtype)
    return bits


TENSOR_HANDLERS: Final[Mapping[type[Instruction], Handler]] = {Matmul: matmul, NcTranspose: transpose}


_reciprocal = Unary("reciprocal").compute


def tensor_tensor(instruction: TensorTensor, at: Bound) -> None:
    op, dst = instruction.op, at.window("dst")
    if op in BITS:
        dst.put_bits(combine_bits(op, at.bits("left"), at.bits("right")).astype(raw(dst.dtype)))
    elif instruction.engine is Engine.GPSIMD and op is not Alu.POWER and _all_words(instruction):
        words = combine_words(op, at.numbers("left"), at.numbers("right"))
        dst.put_bits(words.astype(raw(dst.dtype)))
    else:
        dst.put(combine(op, at.floats("left"), at.floats("right")))


def tensor_scalar(instruction: TensorScalar, at: Bound) -> None:
    steps = [(instruction.op0, "operand0", instruction.reverse0)]
    if instruction.op1 is not None:
        steps.append((instruction.op1, "operand1", instruction.reverse1))
    if instruction.op0 in BITS:
        values = at.bits("src")
        for op, name, reverse in steps:
            values = _ordered_bits(op, values, _bit_operand(at, name, values), reverse)
        at.window("dst").put_bits(values.astype(raw(instruction.dst.dtype)))
        return
    numbers = at.floats("src")
    for op, name, reverse in steps:
        numbers = _ordered(op, numbers, at.scalar(name), reverse)
    at.put(numbers)


def scalar_tensor_tensor(instruction: ScalarTensorTensor, at: Bound) -> None:
    first = _ordered(instruction.op0, at.floats("src"), at.scalar("operand0"), instruction.reverse0)
    at.put(_ordered(instruction.op1, first, at.floats("right"), instruction.reverse1))


def tensor_copy(_: TensorCopy, at: Bound) -> None:
    move(at.window("src"), at.window("dst"))


def copy_predicated(instruction: CopyPredicated, at: Bound) -> None:
    chosen = np.not_equal(at.numbers("predicate"), 0)
    if instruction.reverse:
        chosen = ~chosen
    dst = at.window("dst")
    source = encode(at.numbers("src"), dst.dtype) if dst.dtype is not instruction.src.dtype else at.bits("src")
    dst.put_bits(np.where(chosen, source, at.bits("dst")))


def memset(instruction: Memset, at: Bound) -> None:
    dst = at.window("dst")
    dst.put_bits(np.broadcast_to(encode(np.full(1, instruction.value), dst.dtype), dst.flat))


def reciprocal(_: Reciprocal, at: Bound) -> None:
    at.put(_reciprocal(at.floats("src")))


def _ordered(op: Alu, values: Floats, operand: Array, reverse: bool) -> Floats:
    """`values op operand`, or `operand op values` if reversed; a unary operator ignores the operand."""
    if reverse and op not in UNARY:
        return combine(op, floats(np.broadcast_to(operand, values.shape)), values)
    return combine(op, values, operand)


def _ordered_bits(op: Alu, values: Array, operand: Array, reverse: bool) -> Array:
    return combine_bits(op, operand, values) if reverse and op not in UNARY else combine_bits(op, values, operand)


def _bit_operand(at: Bound, name: str, values: Array) -> Array:
    operand = getattr(at.instruction, name)
    if isinstance(operand, Tile):
        return at.bits(name)
    if operand != int(operand):
        raise MalformedInstruction(f"{operand} is not an integer, and bit operators take integers")
    return np.asarray(int(operand) & int(np.iinfo(values.dtype).max), values.dtype)


def _all_words(instruction: TensorTensor) -> bool:
    return all(tile.dtype in WORDS for tile in (instruction.dst, instruction.left, instruction.right))


def tensor_reduce(instruction: TensorReduce, at: Bound) -> None:
    src, dst, op = instruction.src, at.window("dst"), instruction.op
    kept_sizes = [axis.size for axis in src.axes[: len(src.axes) - instruction.axes]]
    values = at.bits("src") if op in BITS else at.floats("src")
    folded = fold(op, values.reshape(src.partitions, *kept_sizes, -1), -1)
    if op in BITS:
        dst.put_bits(folded.astype(raw(dst.dtype)))
    else:
        dst.put(-folded if instruction.negate else folded)


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
    counts, means, squares = x[:, 0::3], x[:, 1::3], x[:, 2::3]
    total = counts.sum(axis=1, keepdims=True)
    mean = (counts * means).sum(axis=1, keepdims=True) / total
    deviation = means - mean
    variance = (squares + counts * deviation * deviation).sum(axis=1, keepdims=True) / total
    at.put(np.concatenate([mean, variance], axis=1))


def _statistics(x: Floats) -> Floats:
    """Count, mean, and variance times count."""
    if not x.shape[1]:
        return np.zeros((len(x), 3), np.float32)
    mean = x.mean(axis=1, keepdims=True)
    deviation = x - mean
    squares = (deviation * deviation).sum(axis=1, keepdims=True)
    return np.concatenate([np.full_like(mean, x.shape[1]), mean, squares], axis=1)


def max8(_: Max8, at: Bound) -> None:
    at.put(np.sort(at.floats("src"), axis=1)[:, :-9:-1])


def find_index8(_: FindIndex8, at: Bound) -> None:
    dst = at.window("dst")
    positions = _first_matches(at)[0]
    dst.put_bits(positions.astype(raw(dst.dtype)))  # -1 has all bits set


def match_replace8(instruction: MatchReplace8, at: Bound) -> None:
    dst = at.window("dst")
    matched = _first_matches(at)[1]
    same = dst.dtype is instruction.src.dtype
    source = at.bits("src") if same else encode(at.floats("src"), dst.dtype)
    number = encode(np.full(1, instruction.number, np.float32), dst.dtype)
    dst.put_bits(np.where(matched, number, source))


def _first_matches(at: Bound) -> tuple[Array, Array]:
    """The position of each value's first match that no earlier equal value has taken, or -1; and a mask of all taken
    positions."""
    x, values = at.floats("src"), at.floats("values")
    matched = np.zeros(x.shape, np.bool_)
    lanes = np.arange(len(x))
    positions = np.full(values.shape, -1, np.int64)
    for column in range(values.shape[1]):
        matches = (x == values[:, column : column + 1]) & ~matched
        first = matches.argmax(axis=1)
        has_match = matches[lanes, first]
        positions[has_match, column] = first[has_match]
        matched[lanes[has_match], first[has_match]] = True
    return positions, matched


VECTOR_HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
    TensorTensor: tensor_tensor,
    TensorScalar: tensor_scalar,
    ScalarTensorTensor: scalar_tensor_tensor,
    TensorReduce: tensor_reduce,
    TensorCopy: tensor_copy,
    CopyPredicated: copy_predicated,
    TensorTensorScan: scan,
    Memset: memset,
    Reciprocal: reciprocal,
    BnStats: bn_stats,
    BnAggregate: bn_aggregate,
    Max8: max8,
    FindIndex8: find_index8,
    MatchReplace8: match_replace8,
}


_GRAPH_NAMES: Final = {Function.GELU_TANH: "gelu_tanh", Function.ARCTAN: "atan"}  # where the names differ
_sigmoid, _tanh, _softplus = (Unary(name).compute for name in ("sigmoid", "tanh", "softplus"))


def _graph_op(function: Function) -> Callable[[Floats], Array]:
    return Unary(_GRAPH_NAMES.get(function, function.value)).compute


def _gelu_sigmoid(x: Floats) -> Array:
    return np.asarray(x * _sigmoid(np.float32(1.702) * x))


def _mish(x: Floats) -> Array:
    return np.asarray(x * _tanh(_softplus(x)))


def _within(function: Function, most: float) -> Callable[[Floats], Array]:
    """A table with a limited range: NaN outside, so that a missing range reduction is visible in the result."""
    compute, limit = _graph_op(function), np.float32(most)

    def bounded(x: Floats) -> Array:
        return np.where(np.abs(x) <= limit, compute(x), np.float32(np.nan))

    return bounded


_FUNCTIONS: Final[dict[Function, Callable[[Floats], Array]]] = {
    **{function: _graph_op(function) for function in Function if function.value not in ("copy", "square", "mish")},
    Function.COPY: lambda x: x,
    Function.SQUARE: np.square,
    Function.MISH: _mish,
    Function.GELU_SIGMOID: _gelu_sigmoid,
    Function.SIN: _within(Function.SIN, np.pi),
    Function.ARCTAN: _within(Function.ARCTAN, np.pi / 2),
}


def activation(instruction: Activation, at: Bound) -> None:
    x = at.floats("src")
    if instruction.scale != 1.0:
        x = x * at.scalar("scale")
    if instruction.bias != 0.0:
        x = x + at.scalar("bias")
    results = floats(_FUNCTIONS[instruction.function](x))
    at.put(results)
    if instruction.total is not None:
        at.put(results.sum(axis=1, keepdims=True), "total")


SCALAR_HANDLERS: Final[Mapping[type[Instruction], Handler]] = {Activation: activation}


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
    """`start + p * by_partition + sum of index * step` in int32; one row for each partition."""
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


GPSIMD_HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
    IotaPattern: iota,
    AffineSelect: affine_select,
    GatherFree: gather_free,
    PartitionReduce: partition_reduce,
}


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
    **DMA_HANDLERS,
    **TENSOR_HANDLERS,
    **SCALAR_HANDLERS,
    **VECTOR_HANDLERS,
    **GPSIMD_HANDLERS,
}
