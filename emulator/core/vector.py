"""What the vector engine does to each element by itself, alone or with its partners in other tiles."""

import numpy as np

from nxpipe.emulator.core.alu import WORDS, combine, combine_bits, combine_words
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import encode, floats, raw
from nxpipe.emulator.core.dma import move
from nxpipe.emulator.core.faults import Malformed
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.instruction import BITS, UNARY
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.vector import (
    CopyPredicated,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorScalar,
    TensorTensor,
)
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.elementwise import Unary

_reciprocal = Unary("reciprocal").compute


def tensor_tensor(instruction: TensorTensor, at: Bound) -> None:
    op, dst = instruction.op, at.window("dst")
    if op in BITS:
        dst.put_bits(combine_bits(op, bits(at, "left"), bits(at, "right")).astype(raw(dst.dtype)))
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
        values = bits(at, "src")
        for op, name, reverse in steps:
            values = _in_turn(op, values, _bit_operand(at, name, values), reverse)
        at.window("dst").put_bits(values.astype(raw(instruction.dst.dtype)))
        return
    numbers = at.floats("src")
    for op, name, reverse in steps:
        numbers = in_order(op, numbers, at.scalar(name), reverse)
    at.put(numbers)


def scalar_tensor_tensor(instruction: ScalarTensorTensor, at: Bound) -> None:
    first = in_order(instruction.op0, at.floats("src"), at.scalar("operand0"), instruction.reverse0)
    at.put(in_order(instruction.op1, first, at.floats("right"), instruction.reverse1))


def tensor_copy(_: TensorCopy, at: Bound) -> None:
    move(at.window("src"), at.window("dst"))


def copy_predicated(instruction: CopyPredicated, at: Bound) -> None:
    chosen = np.not_equal(at.numbers("predicate"), 0)
    if instruction.reverse:
        chosen = ~chosen
    dst = at.window("dst")
    source = encode(at.numbers("src"), dst.dtype) if dst.dtype is not instruction.src.dtype else bits(at, "src")
    dst.put_bits(np.where(chosen, source, bits(at, "dst")))


def memset(instruction: Memset, at: Bound) -> None:
    dst = at.window("dst")
    dst.put_bits(np.broadcast_to(encode(np.full(1, instruction.value), dst.dtype), dst.flat))


def reciprocal(_: Reciprocal, at: Bound) -> None:
    at.put(_reciprocal(at.floats("src")))


def in_order(op: Alu, values: Floats, operand: Array, reverse: bool) -> Floats:
    """Reversed, the operand comes first; an operator of one operand has only values."""
    if reverse and op not in UNARY:
        return combine(op, floats(np.broadcast_to(operand, values.shape)), values)
    return combine(op, values, operand)


def bits(at: Bound, name: str) -> Array:
    found = at.window(name)
    return found.bits().reshape(found.flat)


def _in_turn(op: Alu, values: Array, operand: Array, reverse: bool) -> Array:
    return combine_bits(op, operand, values) if reverse and op not in UNARY else combine_bits(op, values, operand)


def _bit_operand(at: Bound, name: str, values: Array) -> Array:
    operand = getattr(at.instruction, name)
    if isinstance(operand, Tile):
        return bits(at, name)
    if operand != int(operand):
        raise Malformed(f"{operand} has no bits to combine")
    return np.asarray(int(operand) & int(np.iinfo(values.dtype).max), values.dtype)


def _all_words(instruction: TensorTensor) -> bool:
    return all(each.dtype in WORDS for each in (instruction.dst, instruction.left, instruction.right))
