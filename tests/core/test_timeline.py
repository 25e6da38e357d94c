"""The duration of a program equals that of a step-by-step execution, and of a count by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import utilisation
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.cost import cost, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction, Wait
from nxpipe.emulator.isa.program import Loop, Program, Step, executed, only
from nxpipe.emulator.schedule.timeline import latency_ns
from tests.core.hands import in_order, with_waits
from tests.core.test_orders import bodies, program
from tests.isa.assembler import program as parsed
from tests.tiers import examples

HEAD = "core v2, ranks 1\ninput x: f32[128,2048] at 0\noutput y: f32[128,2048] at 1048576\n\n"
COPY = 1300 + 128 * 2048 / (272 * 0.81)  # nanoseconds of 2 KiB a partition on all sixteen engines
A, B = (f"sbuf[0:128, {place} : f32 512]" for place in (0, 8192))
PLUS = f"tensor_tensor {B} <- left={A}, right={A}, op=add"
VECTOR, GPSIMD = 1024 / 1.12, (150 + 1024) / 1.4


def of(*lines: str) -> float | None:
    return latency_ns(parsed(HEAD + "\n".join(lines) + "\n"))


def test_what_waits_for_nobody_runs_at_once() -> None:
    assert of(f"vector {PLUS}", f"gpsimd {PLUS}") == pytest.approx(max(VECTOR, GPSIMD), abs=0.01)


def test_what_waits_begins_when_the_other_is_done() -> None:
    assert of(f"vector {PLUS}", f"gpsimd {PLUS}  after vector>=1") == pytest.approx(VECTOR + GPSIMD, abs=0.01)


def test_an_engine_does_one_after_the_other() -> None:
    assert of("loop i0 < 3:", f"  vector {PLUS}") == pytest.approx(3 * VECTOR, abs=0.01)


def test_copies_of_two_queues_start_together_and_share_the_engines() -> None:
    copy = f"dma_copy {A} <- x[0 : f32 128@2048 x 512]"
    assert of(f"dma0 {copy}") == pytest.approx(COPY, rel=1e-3)
    assert of(f"dma0 {copy}", f"dma0 {copy}") == pytest.approx(2 * COPY, rel=1e-3)
    assert of(f"dma0 {copy}", f"dma1 {copy}") == pytest.approx(1300 + 2 * (COPY - 1300), rel=1e-3)


def test_two_buffers_hide_the_shorter_of_two_kinds_of_work() -> None:
    """A turn is loaded while the one before is added up."""
    here = "sbuf[0:128, 2048*(i0 % 2) : f32 512]"
    load = f"  dma0 dma_copy {here} <- x[0 : f32 128@2048 x 512]  after vector>=-1+i0"
    add = f"  vector tensor_tensor {B} <- left={here}, right={here}, op=add  after dma0>=1+i0"
    assert of("loop i0 < 100:", load, add) == pytest.approx(100 * COPY + VECTOR, rel=1e-3)


def test_a_loop_that_nobody_could_go_through_is_costed_by_its_steady_turns() -> None:
    assert of("loop i0 < 1000000007:", f"  vector {PLUS}") == pytest.approx(1000000007 * VECTOR, rel=1e-6)


def test_who_waits_outside_for_the_middle_of_a_loop_begins_there() -> None:
    lines = ("loop i0 < 100:", f"  vector {PLUS}", "loop i0 < 100:", f"  gpsimd {PLUS}  after vector>=50")
    assert of(*lines) == pytest.approx(50 * VECTOR + 100 * GPSIMD, abs=0.1)


def test_a_program_without_instructions_takes_no_time() -> None:
    assert of("") == 0.0


@st.composite
def repeated(draw: st.DrawFn) -> Program:
    """A body with repetitions; waits as the compiler inserts them, or for all earlier instructions."""
    first, more = draw(bodies()), draw(bodies())
    many = Loop(draw(st.integers(1, 12)), tuple(_deeper(more)))
    body = (*first, many, *draw(st.sampled_from(((), more))))
    waiting = in_order(body) if draw(st.booleans()) else with_waits(program(body)).body
    less = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)) if draw(st.booleans()) else (0, 0)
    return program(tuple(_for_less(waiting, *less)))


def _for_less(body: Sequence[Step], base: int, by_turn: int, depth: int = 0) -> Iterator[Step]:
    """Waits with decreasing counts, also within loops."""
    less = Affine(-base) + (index(0) * -by_turn if depth else 0)
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_for_less(step.body, base, by_turn, depth + 1)))
        else:
            yield step.after(*(Wait(wait.engine, wait.done + less) for wait in step.waits))


def _deeper(body: Sequence[Step]) -> Iterator[Step]:
    """The body inside of another loop, which changes none of its operands."""
    for step in body:
        if isinstance(step, Loop):
            yield Loop(step.count, tuple(_deeper(step.body)))
        else:
            moved: dict[str, Any] = {
                name: replace(place, offset=_inner(place.offset)) for name, place in step.places.items()
            }
            yield replace(step, **moved)


def _inner(number: Affine) -> Affine:
    terms = tuple((depth + 1, factor) for depth, factor in number.terms)
    return Affine(number.base, terms, tuple(replace(turn, of=_inner(turn.of)) for turn in number.rotations))


_Next = tuple[Instruction, list[tuple[Engine, int]]] | None


def _step_by_step(one: Program) -> float:
    """Nanoseconds; among the next instructions the earliest starts first, then the first engine's."""
    core, streams = CORES[one.core], {engine: _stream(one, engine) for engine in Engine}
    heads: dict[Engine, _Next] = {engine: next(stream, None) for engine, stream in streams.items()}
    ends: dict[Engine, list[float]] = {engine: [0.0] for engine in Engine}
    dma = 0.0
    while any(heads.values()):
        ready = []
        for number, (engine, head) in enumerate(heads.items()):
            if head and all(count < len(ends[other]) for other, count in head[1]):
                begin = max([ends[engine][-1], *(ends[other][count] for other, count in head[1])])
                ready.append((begin, number, engine, head[0]))
        now, _, engine, step = min(ready, key=lambda each: each[:2])
        price = cost(step, core)
        end = now + price.start_ns + price.ns
        if engine in DMA_QUEUES:
            dma = max(dma, now + price.start_ns) + price.ns * share_of_dma(step, core)
            end = max(end, dma)
        ends[engine].append(end)
        heads[engine] = next(streams[engine], None)
    return max(entry[-1] for entry in ends.values())


def _stream(one: Program, engine: Engine) -> Iterator[_Next]:
    for step, indices in executed(only(one.body, engine)):
        yield step, [(wait.engine, max(wait.done.at(indices), 0)) for wait in step.waits]


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_any_program_takes_as_long_as_going_through_it_step_by_step(one: Program) -> None:
    assert latency_ns(one) == pytest.approx(_step_by_step(one), abs=1.0)


@settings(max_examples=25, deadline=None)
@given(repeated())
def test_no_program_is_faster_than_its_busiest_engine_or_slower_than_all_its_work_in_a_row(one: Program) -> None:
    core, found = CORES[one.core], utilisation(one)
    prices = [cost(step, core) for step, _ in executed(one.body)]
    rounded = 1e-3 * len(prices)  # picoseconds
    assert found.latency_ns is not None
    assert max(found.busy_ns.values()) - rounded <= found.latency_ns
    assert found.latency_ns <= sum(price.ns + price.start_ns for price in prices) + rounded
