"""The compiler's waits are sufficient, and none is redundant."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.isa.affine import Affine, affine, index, rotating_offset
from nxpipe.emulator.isa.constraints import Rule
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Loop, Program, Step, instructions
from nxpipe.emulator.isa.vector import Memset, TensorCopy
from nxpipe.emulator.schedule.waits import eliminate_redundant_waits
from tests.core.hands import in_order, with_waits
from tests.core.test_orders import F32, LANES, ORDERS, WIDTH, bodies, program, run
from tests.mutation.redundant import knowledge
from tests.tiers import examples


@settings(max_examples=examples(60))
@given(bodies())
def test_programs_that_were_synchronised_give_the_same_bytes_in_every_order(body: tuple[Step, ...]) -> None:
    safe = with_waits(program(body))
    assert not [fault for fault in faults(safe) if fault.rule is Rule.WAIT]
    assert {run(safe.body, order) for order in ORDERS} == {run(in_order(body), "program")}


@settings(max_examples=examples(120))
@given(bodies(), st.data())
def test_without_the_waits_that_are_implied_every_engine_knows_as_much_at_every_step(
    body: tuple[Step, ...], data: st.DataObject
) -> None:
    waiting = program(tuple(_fewer(in_order(body), (), data)))
    less = eliminate_redundant_waits(waiting)
    assert knowledge(less) == knowledge(waiting)
    for before, after in zip(instructions(waiting.body), instructions(less.body), strict=True):
        assert set(after.waits) <= set(before.waits)
        assert after.after() == before.after()


def _fewer(body: Sequence[Step], counts: tuple[int, ...], data: st.DataObject) -> Iterator[Step]:
    """Some of the waits, some of them with smaller counts: affine in all enclosing loops."""
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_fewer(step.body, (*counts, step.count), data)))
            continue
        waits = []
        for wait in step.waits:
            kept, base, *factors = data.draw(st.tuples(st.booleans(), *[st.integers(0, 4)] * (len(counts) + 1)))
            less = Affine(base, tuple((loop, factor) for loop, factor in enumerate(factors) if factor))
            if kept:
                waits.append(Wait(wait.engine, wait.done + less * data.draw(st.sampled_from((0, -1)))))
        yield step.after(*waits)


numbers = st.integers(0, 4)


@settings(max_examples=examples(60))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(2, 4),
    st.lists(st.tuples(numbers, numbers, numbers, st.integers(0, 3), st.booleans()), min_size=3, max_size=3),
    st.booleans(),
)
def test_places_that_take_turns_are_not_taken_again_too_early_however_their_turns_are_counted(
    counts: tuple[int, int], places: int, turns: list[tuple[int, int, int, int, bool]], beside: bool
) -> None:
    """Tiles of one room, in more or less of it, each with its own count of turns: often that of all turns so far."""
    outer, inner = counts
    tiles = []
    for base, by_outer, by_inner, step, is_usual in turns:
        of = index(0) * inner + index(1) if is_usual else index(0) * by_outer + index(1) * by_inner
        tiles.append(_tile(rotating_offset(of + base, places, 8 * step + 16)))
    x, y = (_rows(buffer, WIDTH) for buffer in (0, 1))
    room = Tile(Memory.SBUF, F32, 0, LANES, Affine(), contiguous(WIDTH))
    steps = (
        DmaCopy(engine=Engine.DMA0, dst=tiles[0], src=_rows(0, 4)),
        TensorCopy(engine=Engine.VECTOR, dst=_tile(512), src=tiles[1]),
        Memset(engine=Engine.GPSIMD, dst=tiles[2], value=2.0),
    )
    more = [DmaCopy(engine=Engine.DMA0, dst=_tile(768), src=_rows(0, 4))] if beside else []
    body = (
        DmaCopy(engine=Engine.DMA1, dst=room, src=x),
        Loop(outer, (Loop(inner, steps), *more)),
        DmaCopy(engine=Engine.DMA1, dst=y, src=room),
    )
    safe = with_waits(program(body))
    assert {run(safe.body, order) for order in ORDERS} == {run(in_order(body), "program")}


def test_a_wait_of_a_turn_ago_implies_what_the_one_that_is_waited_for_saw_then() -> None:
    into, through = _tile(0), _tile(64)
    load = DmaCopy(engine=Engine.DMA0, dst=into, src=_rows(0, 4))
    work = TensorCopy(engine=Engine.VECTOR, dst=through, src=into)
    store = DmaCopy(engine=Engine.DMA1, dst=_rows(1, 4), src=through)
    found = with_waits(program((Loop(5, (load, work, store)),)))
    one = Affine(1, ((0, 1),))
    assert [step.waits for step in instructions(found.body)] == [
        (Wait(Engine.VECTOR, one + -1),),
        (Wait(Engine.DMA0, one), Wait(Engine.DMA1, one + -1)),
        (Wait(Engine.VECTOR, one),),
    ]
    assert _waits(found) == _waits(eliminate_redundant_waits(_with(found, 0, Wait(Engine.DMA1, one + -2))))


@pytest.mark.parametrize("known_before", [True, False])
def test_a_wait_is_left_out_only_if_it_is_implied_in_the_first_turn_too(known_before: bool) -> None:
    """What was done a turn ago was done before the loop then, by another instruction, which knew other things."""
    turn = Affine(0, ((0, 1),))
    load = DmaCopy(engine=Engine.DMA0, dst=_tile(0), src=_rows(0, 4))
    work = TensorCopy(engine=Engine.VECTOR, dst=_tile(64), src=_tile(0))
    late = TensorCopy(engine=Engine.GPSIMD, dst=_tile(128), src=_tile(64))
    result = (Wait(Engine.VECTOR, turn + 1), Wait(Engine.DMA0, turn + 1))
    inside = (late.after(*result), load, work.after(Wait(Engine.DMA0, turn + 2)))
    before = work.after(Wait(Engine.DMA0, Affine(1))) if known_before else work
    found = eliminate_redundant_waits(program((load, before, Loop(4, inside))))
    assert _waits(found)[2] == (result[:1] if known_before else result)


def _tile(low: Affine | int) -> Tile:
    return Tile(Memory.SBUF, F32, 0, LANES, affine(low), contiguous(4))


def _rows(buffer: int, columns: int) -> Far:
    return Far(buffer, F32, Affine(), (Axis(LANES, WIDTH), Axis(columns, 1)))


def _with(made: Program, number: int, wait: Wait) -> Program:
    """One more wait, on an instruction in the only loop."""
    (loop,) = made.body
    assert isinstance(loop, Loop)
    steps = list(loop.body)
    step = steps[number]
    assert isinstance(step, Instruction)
    steps[number] = step.after(*step.waits, wait)
    return replace(made, body=(Loop(loop.count, tuple(steps)),))


def _waits(made: Program) -> list[tuple[Wait, ...]]:
    return [step.waits for step in instructions(made.body)]
