"""Mutations of one instruction or one of its operands, each with a description."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import BINARY, BITS, COMPARISONS, DMA_QUEUES, UNARY, Alu, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import TensorTensor

BANK = 2048
COMMUTATIVE = frozenset(
    {Alu.ADD, Alu.MULTIPLY, Alu.MAXIMUM, Alu.MINIMUM, Alu.EQUAL, Alu.NOT_EQUAL, Alu.LOGICAL_AND, Alu.LOGICAL_OR}
)
TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT32, DType.UINT32, DType.UINT8)
Changed = Iterator[tuple[str, Instruction]]


def having(instruction: Instruction, values: Mapping[str, Any]) -> Instruction:
    return replace(instruction, **values)


# Waits


def dropped(instruction: Instruction) -> Changed:
    for wait in instruction.waits:
        others = (other for other in instruction.waits if other is not wait)
        yield f"without its wait for {wait.engine}", instruction.after(*others)


def lowered(instruction: Instruction) -> Changed:
    for wait in instruction.waits:
        less = (Wait(entry.engine, entry.done + -1) if entry is wait else entry for entry in instruction.waits)
        yield f"waits for one less of {wait.engine}", instruction.after(*less)


# Operands


def _moved(place: Place, *steps: int) -> Iterator[tuple[str, Place]]:
    for step in dict.fromkeys(steps):
        yield f"{step:+d}", replace(place, offset=place.offset + step)


def lanes(place: Place) -> Iterator[tuple[str, Place]]:
    if isinstance(place, Tile):
        for step in (-32, -1, 1, 32):
            if place.start + step >= 0:
                yield f"{step:+d} partitions", replace(place, start=place.start + step)


def on_chip(place: Place) -> Iterator[tuple[str, Place]]:
    if isinstance(place, Tile):
        size, (low, high) = place.dtype.itemsize, place.reach
        yield from _moved(place, size, -size, high - low, low - high)


def in_hbm(place: Place) -> Iterator[tuple[str, Place]]:
    if isinstance(place, Far):
        yield from _moved(place, 1, -1, *(sign * place.axes[0].stride for sign in (1, -1) if place.axes))


def bank(place: Place) -> Iterator[tuple[str, Place]]:
    if isinstance(place, Tile) and place.memory is Memory.PSUM:
        yield from _moved(place, BANK, -BANK)


def coefficient(place: Place) -> Iterator[tuple[str, Place]]:
    unit = place.dtype.itemsize if isinstance(place, Tile) else 1
    for number, (depth, coefficient) in enumerate(place.offset.terms):
        for other in (coefficient + unit, coefficient - unit, 2 * coefficient, -coefficient, 0):
            changed = ((depth, other),) if other else ()
            terms = (*place.offset.terms[:number], *changed, *place.offset.terms[number + 1 :])
            yield f"i{depth} times {other}", replace(place, offset=replace(place.offset, terms=terms))


def turn(place: Place) -> Iterator[tuple[str, Place]]:
    unit = place.dtype.itemsize if isinstance(place, Tile) else 1
    for turn in place.offset.rotations:
        variants = (
            RotatingOffset(turn.step, turn.count, turn.of + 1),
            RotatingOffset(turn.step, turn.count + 1, turn.of),
            RotatingOffset(turn.step + unit, turn.count, turn.of),
            None,
        )
        for other in variants:
            replaced = (other if rotation is turn else rotation for rotation in place.offset.rotations)
            turns = tuple(rotation for rotation in replaced if rotation is not None)
            what = f"takes turns by {other}" if other else "takes no turns"
            yield what, replace(place, offset=replace(place.offset, rotations=turns))


def dtype(place: Place) -> Iterator[tuple[str, Place]]:
    for other in TYPES:
        if other is not place.dtype:
            yield f"as {other.short}", replace(place, dtype=other)


def axis(place: Place) -> Iterator[tuple[str, Place]]:
    for number, axis in enumerate(place.axes):
        variants = [Axis(axis.size - 1, axis.stride), Axis(axis.size + 1, axis.stride)]
        if axis.size > 1:  # the stride of a single element has no effect
            variants += [Axis(axis.size, axis.stride + step) for step in (-1, 1)]
        for other in variants:
            what = f"axis {number} is {other.size}@{other.stride}"
            yield what, replace(place, axes=(*place.axes[:number], other, *place.axes[number + 1 :]))


# Instructions


def narrower(instruction: Instruction) -> Changed:
    """Shorten all operands of one length by one, so that they still match."""
    places = instruction.places
    for lanes in {place.partitions for place in places.values() if isinstance(place, Tile)} - {1}:
        fewer = {name: _fewer_lanes(place, lanes) for name, place in places.items()}
        yield f"{lanes - 1} partitions", having(instruction, fewer)
    for size in {place.axes[-1].size for place in places.values() if place.axes} - {1}:
        fewer = {name: _fewer_columns(place, size) for name, place in places.items()}
        yield f"{size - 1} columns", having(instruction, fewer)


def _fewer_lanes(place: Place, lanes: int) -> Place:
    if isinstance(place, Tile):
        return replace(place, partitions=lanes - 1) if place.partitions == lanes else place
    rows = place.rows
    if rows and rows.partitions == lanes:
        rows = replace(rows, partitions=lanes - 1)
    first = [Axis(lanes - 1, axis.stride) if axis.size == lanes else axis for axis in place.axes[:1]]
    return replace(place, axes=(*first, *place.axes[1:]), rows=rows)


def _fewer_columns(place: Place, size: int) -> Place:
    last = [Axis(size - 1, axis.stride) if axis.size == size else axis for axis in place.axes[-1:]]
    return replace(place, axes=(*place.axes[:-1], *last))


def swapped(instruction: Instruction) -> Changed:
    if isinstance(instruction, TensorTensor) and instruction.op not in COMMUTATIVE:
        yield "left and right swapped", replace(instruction, left=instruction.right, right=instruction.left)
    if isinstance(instruction, Matmul):
        turned = replace(instruction, stationary=instruction.moving, moving=instruction.stationary)
        yield "stationary and moving swapped", turned
    for value, other in (("operand0", "operand1"), ("op0", "op1"), ("scale", "bias")):
        values = [getattr(instruction, name, None) for name in (value, other)]
        if None not in values and getattr(instruction, "op1", Alu.ADD) is not None:
            yield f"{value} and {other} swapped", having(instruction, {value: values[1], other: values[0]})


def accumulate(instruction: Instruction) -> Changed:
    if isinstance(instruction, Matmul):
        if instruction.accumulate.base <= 0:  # else the mutation has no effect
            yield "always adds", replace(instruction, accumulate=Affine(1))
        yield "never adds", replace(instruction, accumulate=Affine())


def operator(instruction: Instruction) -> Changed:
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if isinstance(value, Function):
            others: Sequence[Function | Alu] = list(Function)
        elif isinstance(value, Alu):
            kin = (COMPARISONS, UNARY, BITS, BINARY - BITS - COMPARISONS)
            others = sorted(next(family for family in kin if value in family))
        else:
            continue
        for other in others:
            yield f"{field.name} is {other}", having(instruction, {field.name: other})


def number(instruction: Instruction) -> Changed:
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name == "note" or (field.name == "operand1" and getattr(instruction, "op1", None) is None):
            continue  # has no meaning
        if isinstance(value, bool):
            op = getattr(instruction, field.name.replace("reverse", "op"), None)
            if op not in (None, *COMMUTATIVE):
                yield f"{field.name} is {not value}", having(instruction, {field.name: not value})
        elif isinstance(value, int | float):
            for other in (value + 1, -value):
                yield f"{field.name} is {other}", having(instruction, {field.name: other})


def queue(instruction: Instruction) -> Changed:
    if instruction.engine in DMA_QUEUES:
        other = DMA_QUEUES[(DMA_QUEUES.index(instruction.engine) + 1) % len(DMA_QUEUES)]
        others = tuple(wait for wait in instruction.waits if wait.engine is not other)
        yield f"on {other}", replace(instruction, engine=other, waits=others)
