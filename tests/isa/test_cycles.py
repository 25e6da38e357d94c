"""The cycles of a program computed without running it equal the sum over its instructions."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import totals
from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.cost import cost, moved, transfer_ns
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Memory, Tile
from nxpipe.emulator.isa.program import Loop, Step, executed
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from tests.isa.assembler import program
from tests.isa.page import EXAMPLE
from tests.isa.samples import around, changed, far, inside, plain, sums, tile

CHOICES = [(name, engine) for name in sorted(INSTRUCTIONS) for engine in INSTRUCTIONS[name].engines]
PLAIN = st.sampled_from(CHOICES).map(lambda choice: plain(*choice, lanes=64, size=48))
BODIES: st.SearchStrategy[Step] = st.recursive(
    PLAIN,
    lambda inner: st.builds(Loop, st.integers(1, 5), st.lists(inner, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)


@given(st.lists(BODIES, min_size=1, max_size=3))
def test_totals_are_the_sums_over_all_that_is_carried_out(body: list[Step]) -> None:
    one = around(*body, core="v3")
    counts, engines, ns = Counter[str](), Counter[str](), 0.0
    read, written = Counter[str](), Counter[str]()
    for instruction, _ in executed(one.body):
        counts[instruction.name] += 1
        engines[instruction.engine] += 1
        ns += cost(instruction, CORES["v3"]).ns
        for places, found in ((instruction.read(), read), (instruction.written(), written)):
            for place in places:
                found[place.memory if isinstance(place, Tile) else "hbm"] += moved(place)
    total = totals(one)
    assert (total.kinds, total.engines, total.read, total.written) == (counts, engines, read, written)
    assert sum(total.ns.values()) == pytest.approx(ns)


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    base=st.integers(-1, 1),
    steps=st.lists(st.integers(0, 2), min_size=2, max_size=2),
)
def test_sums_are_read_only_where_a_matmul_adds_to_them(counts: list[int], base: int, steps: list[int]) -> None:
    accumulate = Affine(base) + index(0) * steps[0] + index(1) * steps[1]
    one = changed(plain("nc_matmul", Engine.TENSOR), accumulate=accumulate)
    program = around(inside(*counts, body=(one,)))
    adding = sum(accumulate.at(at) > 0 for _, at in executed(program.body))
    found = totals(program).read["psum"]
    assert isinstance(one, Matmul)
    if base == 0:
        assert found == adding * moved(one.dst)
    else:
        assert found >= adding * moved(one.dst)


def test_the_tensor_engine_is_fully_used_by_full_tiles_and_less_by_narrow_ones() -> None:
    assert totals(program(EXAMPLE)).utilisation == 1.0
    narrow = Matmul(
        engine=Engine.TENSOR,
        dst=sums(64, 512),
        stationary=tile(64, 64, dtype=DType.BFLOAT16),
        moving=tile(64, 512, slot=1, dtype=DType.BFLOAT16),
    )
    assert totals(around(narrow)).utilisation == 0.25
    assert totals(around()).utilisation is None


def test_transposes_take_the_tensor_engine_and_multiply_nothing() -> None:
    one = NcTranspose(engine=Engine.TENSOR, dst=sums(64, 128, DType.BFLOAT16), src=tile(128, 64, dtype=DType.BFLOAT16))
    total = totals(around(one))
    assert (total.tensor_cycles, total.multiply_adds) == (128, 0)


def test_the_report_of_a_program_is_plain_and_does_not_change() -> None:
    document = totals(program(EXAMPLE)).document()
    assert document["static_instructions"] == 6
    assert document["instructions"] == 25
    assert document["multiply_adds"] == 512 * 256 * 512
    assert document["bytes_written"] == {"hbm": 512 * 512 * 2, "psum": 8 * 128 * 512 * 4, "sbuf": 1050624}


@pytest.mark.parametrize(("name", "engine"), CHOICES)
def test_every_instruction_has_a_price_on_every_generation_that_has_it(name: str, engine: Engine) -> None:
    one = plain(name, engine)
    for core in CORES.values():
        if one.engines[engine] <= core.nki_gen:
            assert cost(one, core).ns > 0


@given(size=st.integers(1, 4096), lanes=st.integers(1, 128))
def test_moving_twice_as_much_takes_no_less_time_and_no_engine_is_faster_than_its_peak(size: int, lanes: int) -> None:
    def copy(lanes: int, size: int) -> Instruction:
        return DmaCopy(engine=Engine.DMA0, dst=tile(lanes, size), src=far(lanes, size))

    core = CORES["v2"]
    took = transfer_ns(copy(lanes, size), core)
    assert took >= lanes * size * 4 / (core.dma_engines * core.dma_engine_peak_gb_s)
    # The figure that this comes from is printed in whole percents.
    assert transfer_ns(copy(lanes, 2 * size), core) >= took * 0.95


def test_how_the_one_element_of_an_axis_is_spaced_changes_no_cost() -> None:
    one = plain("tensor_copy", Engine.VECTOR)
    dense = {name: tile(128, 1, 512, slot=slot, dtype=DType.BFLOAT16) for slot, name in enumerate(("dst", "src"))}
    odd = {name: replace(value, axes=(Axis(1, 7), value.axes[1])) for name, value in dense.items()}
    assert cost(changed(one, **odd), CORES["v3"]).cycles == cost(changed(one, **dense), CORES["v3"]).cycles == 128


def test_scattered_elements_cost_more_than_those_in_a_row() -> None:
    row = plain("dma_copy", Engine.DMA0)
    apart = changed(row, src=replace(far(128, 240), axes=(Axis(128, 1), Axis(240, 128))))
    assert transfer_ns(apart, CORES["v2"]) > 10 * transfer_ns(row, CORES["v2"])


@pytest.mark.parametrize(("core", "expected"), [("v2", 512), ("v3", 128), ("v4", 128)])
def test_the_vector_engine_moves_short_floats_faster_from_v3_on(core: str, expected: int) -> None:
    one = plain("tensor_copy", Engine.VECTOR)
    short = {name: tile(128, 512, slot=slot, dtype=DType.BFLOAT16) for slot, name in enumerate(("dst", "src"))}
    assert cost(changed(one, **short), CORES[core]).cycles == expected
    from_psum = {**short, "src": replace(short["src"], memory=Memory.PSUM)}
    assert cost(changed(one, **from_psum), CORES[core]).cycles == min(512, 2 * expected)
