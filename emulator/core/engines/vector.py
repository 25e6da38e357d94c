"""Semantics of the vector engine, and of its instructions that the scalar engine and GpSimd execute too."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from nxpipe.emulator.core.access import Bound, Handler, move
from nxpipe.emulator.core.arithmetic import WORDS, combine, combine_bits, combine_words, encode, floats, fold, raw
from nxpipe.emulator.core.faults import MalformedInstruction
from nxpipe.emulator.isa.instruction import BITS, UNARY, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Tile
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
from nxpipe.emulator.ops.elementwise import Unary

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
    """`values op operand`, or reversed; an operator of one operand ignores the other."""
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
        raise MalformedInstruction(f"{operand} is no integer, and bit operators take integers")
    return np.asarray(int(operand) & int(np.iinfo(values.dtype).max), values.dtype)


def _all_words(instruction: TensorTensor) -> bool:
    return all(each.dtype in WORDS for each in (instruction.dst, instruction.left, instruction.right))


def tensor_reduce(instruction: TensorReduce, at: Bound) -> None:
    src, dst, op = instruction.src, at.window("dst"), instruction.op
    kept = [axis.size for axis in src.axes[: len(src.axes) - instruction.axes]]
    values = at.bits("src") if op in BITS else at.floats("src")
    folded = fold(op, values.reshape(src.partitions, *kept, -1), -1)
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


def max8(_: Max8, at: Bound) -> None:
    at.put(np.sort(at.floats("src"), axis=1)[:, :-9:-1])


def find_index8(_: FindIndex8, at: Bound) -> None:
    dst = at.window("dst")
    places = _first_matches(at)[0]
    dst.put_bits(places.astype(raw(dst.dtype)))  # -1 has all bits set


def match_replace8(instruction: MatchReplace8, at: Bound) -> None:
    dst = at.window("dst")
    matched = _first_matches(at)[1]
    same = dst.dtype is instruction.src.dtype
    source = at.bits("src") if same else encode(at.floats("src"), dst.dtype)
    number = encode(np.full(1, instruction.number, np.float32), dst.dtype)
    dst.put_bits(np.where(matched, number, source))


def _first_matches(at: Bound) -> tuple[Array, Array]:
    """For each value the place of its first match that no equal value before it has, or -1; and all these places."""
    x, values = at.floats("src"), at.floats("values")
    matched = np.zeros(x.shape, np.bool_)
    lanes = np.arange(len(x))
    places = np.full(values.shape, -1, np.int64)
    for number in range(values.shape[1]):
        matches = (x == values[:, number : number + 1]) & ~matched
        first = matches.argmax(axis=1)
        found = matches[lanes, first]
        places[found, number] = first[found]
        matched[lanes[found], first[found]] = True
    return places, matched


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
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
