"""The duration of a program equals that of a step-by-step execution, of its loops written out, and a count by hand; and
the laws of all programs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import utilisation
from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.cost import Cost, cost, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Memory, Tile
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
VECTOR, GPSIMD, SCALAR = 1024 / 1.12, (150 + 1024) / 1.4, 512 / 1.4
COPIED = f"tensor_copy {B} <- {A}"


def of(*lines: str) -> float | None:
    return latency_ns(parsed(HEAD + "\n".join(lines) + "\n"))


def test_what_waits_for_nobody_runs_at_once() -> None:
    assert of(f"vector {PLUS}", f"scalar {COPIED}") == pytest.approx(max(VECTOR, SCALAR), abs=0.01)


def test_what_waits_begins_when_the_other_is_done() -> None:
    after = of(f"vector {PLUS}", f"scalar {COPIED}  after vector>=1")
    assert after == pytest.approx(VECTOR + SCALAR, abs=0.01)


def test_vector_and_gpsimd_share_a_port_to_sbuf_on_v2_only() -> None:
    lines = (f"vector {PLUS}", f"gpsimd {PLUS}")
    assert of(*lines) == pytest.approx(VECTOR + GPSIMD, abs=0.01)
    v3 = parsed(HEAD.replace("v2", "v3") + "\n".join(lines) + "\n")
    assert latency_ns(v3) == pytest.approx(max(1024 / 0.96, (150 + 1024) / 1.2), abs=0.01)


def test_vector_and_scalar_share_a_port_to_psum_on_v2_only() -> None:
    lines = (f"vector {COPIED}", f"scalar {COPIED}")
    psum = [line.replace("<- sbuf", "<- psum") for line in lines]
    assert of(*lines) == pytest.approx(512 / 1.12, abs=0.01)
    assert of(*psum) == pytest.approx(512 / 1.12 + SCALAR, abs=0.01)
    v3 = parsed(HEAD.replace("v2", "v3") + "\n".join(psum) + "\n")
    assert latency_ns(v3) == pytest.approx(512 / 0.96, abs=0.01)


def test_a_small_copy_shares_the_engines_with_a_large_one_instead_of_waiting_for_its_end() -> None:
    """Both move at half the rate until the small one ends; the large one then has all engines."""
    large = "dma0 dma_copy sbuf[0:128, 0 : f32 16x512] <- y[0 : f32 128@2048 x 16@0 x 512]"
    small = f"dma1 dma_copy {A} <- x[0 : f32 128@2048 x 512]"
    reader = f"vector {COPIED}  after dma1>=1"
    moves = COPY - 1300
    tail = [f"vector {PLUS}"] * 60  # longer than what is left of the large copy
    assert of(large, small, reader, *tail) == pytest.approx(1300 + 2 * moves + 512 / 1.12 + 60 * VECTOR, rel=1e-3)
    assert of(large, small) == pytest.approx(1300 + 17 * moves, rel=1e-3)


def test_a_narrow_copy_leaves_engines_to_others() -> None:
    """Eight partitions are one engine; the other fifteen are free."""
    narrow = "dma0 dma_copy sbuf[0:8, 0 : f32 512] <- x[0 : f32 8@2048 x 512]"
    wide = "dma1 dma_copy sbuf[0:120, 8192 : f32 512] <- x[0 : f32 120@2048 x 512]"
    assert of(narrow, wide) == pytest.approx(max(of(narrow) or 0, of(wide) or 0), abs=0.01)
    assert of(narrow, wide) == pytest.approx(COPY, rel=1e-3)


def test_rows_by_number_wait_for_software_to_write_their_descriptors() -> None:
    rows = "dma_copy sbuf[0:64, 64 : f32 512] <- x[0 : f32 64@2048 x 512, rows sbuf[0:64, 0 : ui32 1]]"
    plain = "dma_copy sbuf[0:64, 64 : f32 512] <- x[0 : f32 64@2048 x 512]"
    assert (of(f"dma0 {rows}") or 0) - (of(f"dma0 {plain}") or 0) == pytest.approx(64 * 57, abs=0.01)


def test_hardware_writes_descriptors_on_v3_where_types_are_equal() -> None:
    copies = [f"dma0 dma_copy sbuf[0:128, 0 : {dtype} 512] <- x[0 : f32 128@2048 x 512]" for dtype in ("f32", "bf16")]
    equal, cast = (latency_ns(parsed(HEAD.replace("v2", "v3") + copy + "\n")) or 0 for copy in copies)
    moves = 128 * 2048 / (368 * 0.81)
    assert equal == pytest.approx(600 + moves, rel=1e-3)
    assert cast > 1300


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
    lines = ("loop i0 < 100:", f"  vector {PLUS}", "loop i0 < 200:", f"  scalar {COPIED}  after vector>=50")
    assert of(*lines) == pytest.approx(50 * VECTOR + 200 * SCALAR, abs=0.1)


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
_DMA = frozenset(DMA_QUEUES)


@dataclass
class _Walk:
    """An engine that goes through its instructions one by one."""

    stream: Iterator[_Next]
    head: _Next = None
    phase: str = "idle"  # starts or moves a transfer, runs
    until: int = 0
    ended: int = 0
    done: int = 0
    left: int = 0  # of a transfer, in 1/4096 of all DMA engines times a picosecond


def _step_by_step(one: Program) -> float:
    """Nanoseconds, by events. Progress of transfers is rounded down whenever one begins or ends."""
    core = CORES[one.core]
    walks = {engine: _Walk(stream, next(stream, None)) for engine in Engine for stream in [_stream(one, engine)]}
    ports, since = {"sbuf": 0, "psum": 0}, 0
    now: int | None = 0
    while now is not None:
        for engine, walk in walks.items():
            if walk.phase == "idle" and walk.head and all(walks[e].done >= count for e, count in walk.head[1]):
                _begin(engine, walk, now, core, ports)
        moving = [walk for walk in walks.values() if walk.phase == "moves"]
        rates = _rates([_width(walk) for walk in moving])
        for walk, (amount, time) in zip(moving, rates, strict=True):
            walk.until = since - (-walk.left * time // amount)
        now = min((walk.until for walk in walks.values() if walk.phase != "idle"), default=None)
        due = [walk for walk in walks.values() if walk.phase != "idle" and walk.until == now]
        if now is not None and any(walk.phase in ("starts", "moves") for walk in due):
            for walk, (amount, time) in zip(moving, rates, strict=True):
                walk.left -= (now - since) * amount // time
            since = now
        for walk in due:
            _proceed(walk, core)
    return max(walk.ended for walk in walks.values()) / 1000


def _proceed(walk: _Walk, core: CoreSpec) -> None:
    """What a walk does now is over."""
    assert walk.head
    if walk.phase == "starts":
        walk.phase, walk.left = "moves", _takes(walk.head[0], core) * _width(walk)
    else:
        walk.done, walk.ended, walk.phase, walk.head = walk.done + 1, walk.until, "idle", next(walk.stream, None)


def _begin(engine: Engine, walk: _Walk, now: int, core: CoreSpec, ports: dict[str, int]) -> None:
    assert walk.head
    instruction = walk.head[0]
    if engine in _DMA:
        walk.phase, walk.until = "starts", now + round(cost(instruction, core).start_ns * 1000)
        return
    used = []
    for place in instruction.places.values():
        if isinstance(place, Tile) and place.memory is Memory.SBUF and engine in (Engine.VECTOR, Engine.GPSIMD):
            used += ["sbuf"] * core.vector_gpsimd_share_sbuf_port
        if isinstance(place, Tile) and place.memory is Memory.PSUM and engine in (Engine.VECTOR, Engine.SCALAR):
            used += ["psum"] * core.vector_scalar_share_psum_port
    begin = max([now, *(ports[port] for port in used)])
    walk.phase, walk.until = "runs", begin + _takes(instruction, core)
    ports.update(dict.fromkeys(used, walk.until))


def _takes(instruction: Instruction, core: CoreSpec) -> int:
    return round(cost(instruction, core).ns * 1000)


def _width(walk: _Walk) -> int:
    assert walk.head
    return round(share_of_dma(walk.head[0], CORES["v2"]) * 4096)


def _rates(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Fractions: the narrowest transfers have their own rate as long as it is below an equal share of what is left."""
    rates = [(0, 1)] * len(widths)
    free, users = 4096, len(widths)
    for number in sorted(range(len(widths)), key=lambda each: widths[each]):
        rates[number] = (widths[number], 1) if widths[number] * users <= free else (free, users)
        if rates[number][1] == 1 and widths[number] * users <= free:
            free, users = free - widths[number], users - 1
    return rates


def _stream(one: Program, engine: Engine) -> Iterator[_Next]:
    for step, indices in executed(only(one.body, engine)):
        yield step, [(wait.engine, max(wait.done.at(indices), 0)) for wait in step.waits]


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_any_program_takes_as_long_as_going_through_it_step_by_step(one: Program) -> None:
    assert latency_ns(one) == _step_by_step(one)


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_a_program_takes_as_long_as_its_loops_written_out(one: Program) -> None:
    written_out = replace(one, body=tuple(_written_out(one.body)))
    assert not any(isinstance(step, Loop) for step in written_out.body)
    assert latency_ns(one) == latency_ns(written_out)


def test_layers_of_a_real_loop_take_as_long_as_written_out() -> None:
    """Skipping repetitions is exact over many iterations, with double buffers and contention for the DMA engines."""
    here = "sbuf[0:128, 2048*(i0 % 2) : f32 512]"
    lines = (
        "loop i0 < 300:",
        f"  dma0 dma_copy {here} <- x[0 : f32 128@2048 x 512]  after vector>=-1+i0",
        "  dma1 dma_copy sbuf[0:64, 16384 : f32 256] <- x[0 : f32 64@2048 x 256]  after scalar>=i0",
        f"  vector tensor_tensor {B} <- left={here}, right={here}, op=add  after dma0>=1+i0",
        f"  scalar tensor_copy sbuf[0:128, 12288 : f32 512] <- {B}  after vector>=1+i0, dma1>=1+i0",
    )
    one = parsed(HEAD + "\n".join(lines) + "\n")
    assert latency_ns(one) == latency_ns(replace(one, body=tuple(_written_out(one.body))))


def _written_out(body: Sequence[Step]) -> Iterator[Instruction]:
    for step in body:
        if not isinstance(step, Loop):
            yield step
            continue
        for turn in range(step.count):
            yield from _written_out([_in_turn(inner, 0, turn) for inner in step.body])


def _in_turn(step: Step, depth: int, turn: int) -> Step:
    """The step in one iteration of the loop at this depth, without that loop."""
    if isinstance(step, Loop):
        return Loop(step.count, tuple(_in_turn(inner, depth, turn) for inner in step.body))
    moved: dict[str, Any] = {
        name: replace(place, offset=_at_turn(place.offset, depth, turn)) for name, place in step.places.items()
    }
    waits = tuple(Wait(wait.engine, _at_turn(wait.done, depth, turn)) for wait in step.waits)
    return replace(step, **moved).after(*waits)


def _at_turn(number: Affine, depth: int, turn: int) -> Affine:
    base = number.base + sum(factor * turn for at, factor in number.terms if at == depth)
    terms = tuple((at - (at > depth), factor) for at, factor in number.terms if at != depth)
    rotations = []
    for rotation in number.rotations:
        inner = _at_turn(rotation.of, depth, turn)
        if inner.terms:
            rotations.append(replace(rotation, of=inner))
        else:
            base += rotation.step * (inner.base % rotation.count)
    return Affine(base, terms, tuple(rotations))


@dataclass
class _Events:
    """What the simulation reports: for each engine, begin and end of its instructions in order, in ps."""

    by_engine: dict[Engine, list[tuple[int, int, Instruction, tuple[int, ...]]]]

    def executed(self, instruction: Instruction, indices: Sequence[int], begin: int, end: int) -> None:
        entry = (begin, end, instruction, tuple(indices))
        self.by_engine.setdefault(instruction.engine, []).append(entry)

    def skipped(self, place: int, since: int, now: int, repetitions: int, iterations: int) -> None:
        raise AssertionError("a program without loops has no repetitions")


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_everything_is_executed_once_in_order_and_begins_after_what_it_waits_for(one: Program) -> None:
    written_out = replace(one, body=tuple(_written_out(one.body)))
    events = _Events({})
    latency = latency_ns(written_out, events)
    found = {engine: [each[2] for each in entries] for engine, entries in events.by_engine.items()}
    assert found == {engine: [step for step in written_out.body if step.engine is engine] for engine in found}
    assert sum(map(len, found.values())) == len(written_out.body)
    for entries in events.by_engine.values():
        assert all(before[1] <= after[0] for before, after in pairwise(entries))
        for begin, end, instruction, _ in entries:
            assert end - begin >= round(cost(instruction, CORES[one.core]).ns * 1000)
            for wait in instruction.waits:
                count = wait.done.base
                assert count < 1 or events.by_engine[wait.engine][count - 1][1] <= begin
    assert latency == max((entries[-1][1] for entries in events.by_engine.values()), default=0) / 1000


@settings(max_examples=examples(40), deadline=None)
@given(repeated(), st.floats(1, 4), st.sampled_from((*Engine,)))
def test_without_contention_more_work_never_makes_a_program_faster(one: Program, more: float, engine: Engine) -> None:
    """One DMA queue, and a core without shared ports: each instruction begins at the latest of some ends."""
    alone = replace(one, core="v3", body=tuple(step for step in _written_out(one.body) if step.engine not in _OTHERS))
    waiting = tuple(step.after(*(wait for wait in step.waits if wait.engine not in _OTHERS)) for step in alone.body)
    alone = replace(alone, body=waiting)
    slower = latency_ns(
        alone, price=lambda step, core: _scaled(cost(step, core), more if step.engine is engine else 1.0)
    )
    assert (latency_ns(alone) or 0) <= (slower or 0)


_OTHERS = frozenset(DMA_QUEUES[1:])


@settings(max_examples=examples(40), deadline=None)
@given(repeated(), st.sampled_from((0.9, 0.5, 0.1)))
def test_more_bandwidth_delays_no_program_by_more_than_its_transfers_take(one: Program, less: float) -> None:
    """A transfer that begins earlier can disturb another, but only while all DMA engines work."""
    one = replace(one, core="v3")
    core = CORES["v3"]
    fast = latency_ns(one, price=lambda step, spec: _moved_at(cost(step, spec), less))
    moved = sum(
        cost(step, core).ns * less * share_of_dma(step, core)
        for step, _ in executed(one.body)
        if step.engine in DMA_QUEUES
    )
    assert (fast or 0) <= (latency_ns(one) or 0) + moved + 1


def _scaled(price: Cost, factor: float) -> Cost:
    return Cost(price.ns * factor, None, price.start_ns * factor)


def _moved_at(price: Cost, factor: float) -> Cost:
    return price if price.cycles is not None else replace(price, ns=price.ns * factor)


@settings(max_examples=25, deadline=None)
@given(repeated())
def test_no_program_is_faster_than_its_busiest_engine_or_slower_than_all_its_work_in_a_row(one: Program) -> None:
    core, found = CORES[one.core], utilisation(one)
    prices = [cost(step, core) for step, _ in executed(one.body)]
    rounded = 1e-3 * len(prices)  # picoseconds
    assert found.latency_ns is not None
    assert max(found.busy_ns.values()) - rounded <= found.latency_ns
    assert found.latency_ns <= sum(price.ns + price.start_ns for price in prices) + rounded
