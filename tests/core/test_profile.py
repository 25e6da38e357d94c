"""Profiles of programs: every sum equals the program's time, for any program with loops and waits."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.execution_trace import DMA, LATENCY, ExecutionTrace, record
from nxpipe.emulator.analysis.profile import Place, profile
from nxpipe.emulator.analysis.what_if import changes
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.program import Loop, Program, SourcePosition, Step, counted, executed, note_of
from nxpipe.emulator.schedule.timeline import latency_ns
from nxpipe.pipeline.predict.constants import ProgramTime
from nxpipe.pipeline.profile.page import profile_page
from nxpipe.pipeline.profile.programs import ProfiledProgram
from nxpipe.pipeline.profile.summary import ProfileDifference
from nxpipe.pipeline.profile.trace import trace_document
from tests.core.test_timeline import GPSIMD, HEAD, PLUS, VECTOR, A, B, repeated
from tests.isa.assembler import program as parsed
from tests.tiers import examples


def of(*lines: str) -> Program:
    return parsed(HEAD + "\n".join(lines) + "\n")


def traced(one: Program) -> ExecutionTrace:
    found = record(one)
    assert found is not None
    return found


def named(one: Program) -> ProfiledProgram:
    return ProfiledProgram("a program", "a model", "inf2", one, ProgramTime(None, "none"))


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_the_critical_path_of_any_program_adds_up_to_its_predicted_time(one: Program) -> None:
    found = traced(one)
    assert found.latency_ps / 1000 == latency_ns(one)
    assert sum((part.high - part.low) * part.times for part in found.critical_path) == found.latency_ps
    assert sum(found.path_by_resource.values()) == found.latency_ps


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_each_engine_is_busy_for_the_costs_of_its_instructions_and_never_longer_than_the_program(one: Program) -> None:
    found, core = profile(one), CORES[one.core]
    costs = Counter[str]()
    for instruction, _ in executed(one.body):
        if instruction.engine not in (*DMA_QUEUES, Engine.COLLECTIVE):
            costs[instruction.engine.value] += round(cost(instruction, core).ns * 1000)
    assert {name: found.busy[name] for name in costs} == costs
    assert all(ps <= found.latency_ps for ps in found.busy.values())


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_the_busiest_engine_works_or_has_a_reason_to_wait_at_every_moment(one: Program) -> None:
    found = profile(one)
    assert found.busy.get(found.busiest, 0) + sum(found.gaps.values()) == found.latency_ps
    assert found.whole.on_path == sum(share.on_path for share in found.by_operator.values()) == found.latency_ps
    roots = [share for depth, _, share in found.tree() if depth == 0]
    assert sum(share.on_path for share in roots) == found.latency_ps


@settings(max_examples=examples(40), deadline=None)
@given(repeated())
def test_a_drawn_program_has_each_execution_once_and_ends_at_its_predicted_time(one: Program) -> None:
    _require_drawn_once(one)


def test_a_transfer_before_a_loop_that_looks_like_those_of_the_loop_is_not_drawn_as_one_of_them() -> None:
    """The state before the loop recurs in it, so that a period begins before the loop does."""
    copy = f"dma0 dma_copy {A} <- x[0 : f32 128@2048 x 512]"
    one = of(copy, "loop i0 < 9:", f"  vector {PLUS}  after dma0>=0+i0", f"  {copy}  after vector>=1+i0")
    assert traced(one).repetitions
    _require_drawn_once(one)


def _require_drawn_once(one: Program) -> None:
    found = named(one)
    rows = trace_document([found])["traceEvents"]
    threads = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    drawn = Counter[str]()
    ends = [0]
    for tid, name in threads.items():
        slices = sorted(
            (row["args"]["begin_ps"], row["args"]["duration_ps"], row["args"].get("instructions", 1))
            for row in rows
            if row["ph"] == "X" and row["tid"] == tid
        )
        for (begin, duration, _), (later, _, _) in pairwise(slices):
            assert begin + duration <= later, f"slices of {name} overlap"
        ends += [begin + duration for begin, duration, _ in slices]
        drawn[name] = sum(count for _, _, count in slices)
    assert max(ends) == found.profile.latency_ps
    assert {name: drawn[name] for name in drawn if name != "critical path"} == {
        engine.value: count for engine, count in counted(one.body).items() if count
    }


@settings(max_examples=examples(10), deadline=None)
@given(repeated(), st.lists(st.text("ab. ", max_size=6), min_size=3, max_size=3))
def test_any_program_has_a_page(one: Program, modules: list[str]) -> None:
    noted = replace(one, notes=tuple(note_of(module, "add") for module in ["", *modules]))
    steps = iter(range(1_000_000))

    def numbered(body: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            Loop(step.count, numbered(step.body)) if isinstance(step, Loop) else replace(step, note=next(steps) % 4)
            for step in body
        )

    assert b"Critical path" in profile_page([named(replace(noted, body=numbered(noted.body)))])


@settings(max_examples=examples(20), deadline=None)
@given(repeated())
def test_a_program_does_not_differ_from_itself(one: Program) -> None:
    assert not any(line.change for line in ProfileDifference(named(one), named(one)).lines())


@settings(max_examples=examples(15), deadline=None)
@given(repeated())
def test_a_change_is_listed_with_the_time_that_its_gain_states(one: Program) -> None:
    found = profile(one)
    listed = changes(found)
    assert len(listed) <= 3
    assert [change.gain for change in listed] == sorted((change.gain for change in listed), reverse=True)
    for change in listed:
        assert change.gain >= 0.01
        assert change.latency_ns == pytest.approx((1 - change.gain) * found.latency_ps / 1000)


def test_a_gap_has_the_work_of_the_other_engine_as_its_reason() -> None:
    found = profile(of("at 1", f"vector {PLUS}", "at 2", f"gpsimd {PLUS}  after vector>=1", "", *_NOTES))
    assert found.busiest == "vector"
    ((reason, ps),) = found.gaps.items()
    assert (reason.resource, reason.work, reason.place) == ("gpsimd", "tensor_tensor", Place("down", "add"))
    assert ps == round(GPSIMD * 1000)
    assert {name: share.on_path for name, share in found.by_module.items()} == {
        "down": round(GPSIMD * 1000),
        "up": round(VECTOR * 1000),
    }


_NOTES = ('note 1 "up model.py:7 (add)"', 'note 2 "down model.py:8 (add)"')


def test_the_start_up_of_a_transfer_is_a_resource_of_its_own() -> None:
    found = profile(of(f"dma0 dma_copy {A} <- x[0 : f32 128@2048 x 512]"))
    assert found.whole.path[LATENCY] == 1300 * 1000
    assert found.whole.path[LATENCY] + found.whole.path[DMA] == found.latency_ps
    assert found.busy[DMA] == found.latency_ps - 1300 * 1000


def test_a_loop_that_nobody_could_go_through_has_an_exact_profile() -> None:
    here = "sbuf[0:128, 2048*(i0 % 2) : f32 512]"
    load = f"  dma0 dma_copy {here} <- x[0 : f32 128@2048 x 512]  after vector>=-1+i0"
    add = f"  vector tensor_tensor {B} <- left={here}, right={here}, op=add  after dma0>=1+i0"
    one = of("loop i0 < 1000000007:", load, add)
    found = profile(one)
    assert found.latency_ps / 1000 == latency_ns(one)
    assert found.whole.on_path == found.latency_ps
    assert found.busy["vector"] == 1000000007 * round(VECTOR * 1000)
    assert len(trace_document([named(one)])["traceEvents"]) < 3000


def test_layers_that_a_loop_repeats_have_one_name() -> None:
    head = "core v2, ranks 1\nparameter w: f32[128,512] at 0\n\n"
    copy = f"  dma0 dma_copy {A} <- w[65536*i0 : f32 128x512]"
    one = parsed(f'{head}at 1\nloop i0 < 3:\n{copy}\n\nnote 1 "h.0.up.gate model.py:7 (linear)"\n')
    weights = replace(one.buffers[0], names=tuple(f"h.{layer}.up.weight" for layer in range(3)))
    assert list(profile(replace(one, buffers=(weights,))).by_module) == ["h.[0-2].up.gate"]


def test_a_program_without_instructions_has_an_empty_profile() -> None:
    found = named(of(""))
    assert found.profile.latency_ps == 0
    assert not found.profile.gaps
    assert trace_document([found])["traceEvents"]
    assert b"0 ns" in profile_page([found])


@pytest.mark.parametrize(
    ("note", "position"),
    [
        ("", SourcePosition("", "", "")),
        ("bert.pooler model.py:3", SourcePosition("bert.pooler", "model.py:3", "")),
        (note_of("bert.pooler model.py:3", "linear"), SourcePosition("bert.pooler", "model.py:3", "linear")),
        (note_of("", "add"), SourcePosition("", "", "add")),
        (note_of("a(b) c", "add"), SourcePosition("a(b)", "c", "add")),
    ],
)
def test_a_note_says_module_source_line_and_operator(note: str, position: SourcePosition) -> None:
    assert SourcePosition.of(note) == position
