"""Every order of engines gives the same result; a program without this guarantee is refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import totals
from nxpipe.emulator.core.faults import MachineFault
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.errors import OptionsInvalid
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Loop, Program, Role, Step
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from tests.core.hands import in_order, table
from tests.tiers import examples

F32 = DType.FLOAT32
LANES, WIDTH = 8, 96  # the part of SBUF that programs use, and of PSUM
ORDERS = ("hostile", "program", "random:1", "random:2", "random:3")
Draw = Callable[[st.SearchStrategy[Any]], Any]


def _offset(draw: Draw, depth: int, most: int) -> Affine:
    """An offset in elements."""
    offset = Affine(draw(st.integers(0, most)))
    for level in range(depth):
        offset = offset + index(level) * draw(st.sampled_from((0, 0, 1, 4)))
    if depth and draw(st.booleans()):
        offset = offset + rotating_offset(index(depth - 1), 2, 16)
    return offset


def _tile(draw: Draw, depth: int, lanes: int, memory: Memory = Memory.SBUF) -> Tile:
    axis = Axis(4, draw(st.sampled_from((1, 1, 2, 3))))
    return Tile(memory, F32, 0, lanes, _offset(draw, depth, 32) * 4, (axis,))


def _far(draw: Draw, depth: int, lanes: int, buffer: int) -> Far:
    return Far(buffer, F32, _offset(draw, depth, 32), (Axis(lanes, WIDTH), Axis(4, draw(st.sampled_from((1, 2))))))


def _instruction(draw: Draw, depth: int) -> list[Step]:
    kind, lanes = draw(st.integers(0, 5)), draw(st.sampled_from((4, LANES)))
    some = draw(st.sampled_from((Engine.VECTOR, Engine.GPSIMD)))
    queue = draw(st.sampled_from(DMA_QUEUES))
    one, two, three = (_tile(draw, depth, lanes) for _ in range(3))
    if kind == 0:
        return [DmaCopy(engine=queue, dst=one, src=_far(draw, depth, lanes, draw(st.integers(0, 1))))]
    if kind == 1:
        return [DmaCopy(engine=queue, dst=_far(draw, depth, lanes, 1), src=one)]
    if kind == 2:
        return [
            TensorTensor(engine=some, dst=one, left=two, right=three, op=draw(st.sampled_from((Alu.ADD, Alu.MAXIMUM))))
        ]
    if kind == 3:
        return [Activation(engine=Engine.SCALAR, dst=one, src=two, function=Function.TANH)]
    if kind == 4:
        return [Memset(engine=some, dst=one, value=float(draw(st.integers(1, 9))))]
    sums, copy = _tile(draw, depth, 4, Memory.PSUM), _tile(draw, depth, 4)
    product = Matmul(engine=Engine.TENSOR, dst=sums, stationary=two, moving=three)
    more = [replace(product, accumulate=Affine(1))] if draw(st.booleans()) else []
    return [product, *more, TensorCopy(engine=Engine.VECTOR, dst=copy, src=sums)]


def _steps(draw: Draw, depth: int) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 5))):
        if depth < 2 and draw(st.integers(0, 3)) == 0:
            steps.append(Loop(draw(st.integers(1, 3)), tuple(_steps(draw, depth + 1))))
        else:
            steps += _instruction(draw, depth)
    return steps


@st.composite
def bodies(draw: Draw) -> tuple[Step, ...]:
    """Everything is written before anything is read, and every element of the output is."""
    whole = Tile(Memory.SBUF, F32, 0, LANES, Affine(), contiguous(WIDTH))
    first: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=whole, src=Far(0, F32, Affine(), contiguous(LANES, WIDTH))),
        Memset(engine=Engine.VECTOR, dst=replace(whole, memory=Memory.PSUM), value=1.0),
        DmaCopy(engine=Engine.DMA1, dst=Far(1, F32, Affine(), contiguous(LANES, WIDTH)), src=whole),
    ]
    return (*first, *_steps(draw, 0))


def program(body: Sequence[Step]) -> Program:
    shape = (LANES, WIDTH)
    return Program("v2", 1, table((Role.INPUT, "x", F32, shape), (Role.OUTPUT, "y", F32, shape)), tuple(body))


def run(body: Sequence[Step], order: str, *, check: bool = True) -> bytes:
    """The content of the output."""
    machine = Machine(program(body), order=order, check=check)
    machine.write("x", np.random.default_rng(3).normal(0, 1, (LANES, WIDTH)).astype(np.float32))
    found = machine.execute()
    total = totals(program(body))
    assert (found.instructions, found.read, found.written) == (total.kinds, total.read, total.written)
    return machine.read("y").tobytes()


@settings(max_examples=examples(60))
@given(bodies())
def test_every_order_gives_the_same_bytes_where_everything_waits_for_what_is_before_it(body: tuple[Step, ...]) -> None:
    assert len({run(in_order(body), order) for order in ORDERS}) == 1


@settings(max_examples=examples(150))
@given(bodies(), st.data())
def test_waits_that_are_dropped_are_missed_in_every_order_or_did_not_matter(
    body: tuple[Step, ...], data: st.DataObject
) -> None:
    safe = in_order(body)
    waiting = [number for number, step in enumerate(_flat(safe)) if step.waits]
    fewer = safe
    for at in data.draw(st.sets(st.sampled_from(waiting), min_size=1, max_size=3)):
        fewer = _mapped(fewer, at, lambda step: step.after(*data.draw(st.sets(st.sampled_from(step.waits)))))[0]
    refused = [_refused(fewer, order) for order in ORDERS]
    assert len(set(refused)) == 1
    if not refused[0]:
        assert {run(fewer, order, check=False) for order in ORDERS} == {run(safe, "program")}


def _refused(body: tuple[Step, ...], order: str) -> bool:
    try:
        run(body, order)
    except MachineFault:
        return True
    return False


def _flat(body: Sequence[Step]) -> list[Instruction]:
    return [entry for step in body for entry in (_flat(step.body) if isinstance(step, Loop) else [step])]


def _mapped(
    body: Sequence[Step], at: int, change: Callable[[Instruction], Step], number: int = 0
) -> tuple[tuple[Step, ...], int]:
    """The body with one instruction changed, by its number in the text."""
    steps: list[Step] = []
    for step in body:
        if isinstance(step, Loop):
            inner, number = _mapped(step.body, at, change, number)
            steps.append(Loop(step.count, inner))
        else:
            steps.append(change(step) if number == at else step)
            number += 1
    return tuple(steps), number


def test_an_order_that_does_not_exist_is_refused() -> None:
    machine = Machine(program([]), order="random")
    with pytest.raises(OptionsInvalid, match="random:SEED"):
        machine.execute()
