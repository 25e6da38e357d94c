"""Overlap of patterns, and races of accesses: compared with sets of bytes, and with every path of waits."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.core.access import Pattern, pattern, touch
from nxpipe.emulator.core.races import Access, Clocks, Log
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.vector import Memset
from tests.tiers import examples

axes = st.lists(st.builds(Axis, st.integers(1, 5), st.integers(-9, 9)), max_size=3).map(tuple)


def touched(shape: tuple[Axis, ...], size: int, offset: int = 0) -> set[int]:
    starts = (sum(place * axis.stride for place, axis in zip(at, shape, strict=True)) for at in _places(shape))
    return {offset + start * size + byte for start in starts for byte in range(size)}


def _places(shape: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(axis.size) for axis in shape)))


@settings(max_examples=examples(300))
@given(axes, axes, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)), st.integers(-60, 60))
def test_patterns_touch_where_they_have_a_byte_in_common(
    one: tuple[Axis, ...], other: tuple[Axis, ...], size: int, width: int, ahead: int
) -> None:
    expected = bool(touched(one, size) & touched(other, width, ahead))
    assert touch(pattern(one, size), pattern(other, width), ahead) == expected


@settings(max_examples=examples(200))
@given(axes, st.sampled_from((1, 2, 4)))
def test_a_pattern_is_solid_where_no_byte_is_left_out(shape: tuple[Axis, ...], size: int) -> None:
    found, held = pattern(shape, size), touched(shape, size)
    assert (found.low, found.high) == (min(held), max(held) + 1)
    if found.is_solid:
        assert len(held) == found.high - found.low


def test_rows_touch_where_their_numbers_say() -> None:
    rows = Pattern(0, 104, 4, (), np.array([0, 100], np.int64))
    assert not touch(rows, pattern((Axis(20, 1),), 4), 8)
    assert touch(rows, pattern((Axis(24, 1),), 4), 8)


def test_what_is_reached_over_without_being_touched_is_not_forgotten() -> None:
    clocks, log = Clocks(), Log(frozenset((E1, E2, E3)))
    inner = Access(E1, 1, (0, 1), 1, pattern((Axis(1, 1),), 1), True, _MEMSET, ())
    outer = Access(E1, 2, (0, 1), 0, pattern((Axis(2, 2),), 1), True, _MEMSET, ())
    rival = Access(E2, 1, (0, 1), 1, pattern((Axis(1, 1),), 1), False, _MEMSET, ())
    assert [log.meet(entry, clocks.now[entry.engine]) for entry in (inner, outer, rival)] == [None, None, inner]


E1, E2, E3 = (list(Engine).index(engine) for engine in (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR))
_MEMSET = Memset(engine=Engine.VECTOR, dst=Tile(Memory.SBUF, DType.FLOAT32, 0, 1, Affine(), ()), value=0.0)
steps = st.tuples(
    st.sampled_from((E1, E2, E3)),
    st.lists(st.tuples(st.sampled_from((E1, E2, E3)), st.integers(1, 12)), max_size=2),
    st.integers(0, 6),  # where
    st.sampled_from(((Axis(4, 1),), (Axis(2, 2),), (Axis(2, 3),))),
    st.booleans(),
)
Run = list[tuple[int, list[tuple[int, int]], int, tuple[Axis, ...], bool]]


@settings(max_examples=examples(300))
@given(st.lists(steps, max_size=14), st.integers(0, 4))
def test_a_race_is_found_exactly_where_no_path_of_waits_leads_from_one_access_to_the_other(
    run: Run, often: int
) -> None:
    clocks, log, done = Clocks(), Log(frozenset((E1, E2, E3))), [0] * len(Engine)
    before: list[set[int]] = []  # of each step, the steps that it comes after
    numbered: dict[tuple[int, int], int] = {}
    for number, (engine, waits, where, shape, writes) in enumerate(run):
        own = numbered.get((engine, done[engine]))
        after = set() if own is None else {own} | before[own]
        for other, count in waits:
            if other != engine and count <= done[other]:
                clocks.wait(engine, other, count)
                met = numbered[other, count]
                after |= {met} | before[met]
        before.append(after)
        access = Access(engine, done[engine] + 1, (0, 1), where, pattern(shape, 1), writes, _MEMSET, ())
        rivals = [
            earlier
            for earlier in range(number)
            if earlier not in after
            and (writes or run[earlier][4])
            and touched(shape, 1, where) & touched(run[earlier][3], 1, run[earlier][2])
        ]
        assert (log.meet(access, clocks.now[engine]) is not None) == bool(rivals)
        if rivals:
            return
        clocks.finish(engine)
        done[engine] += 1
        numbered[engine, done[engine]] = number
        if often and number % often == 0:
            log.forget(clocks, (E1, E2, E3))
