"""A program that violates a rule of the machine is refused with the rule, the instruction and the numbers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.collective import CollectiveAllGather, CollectiveAllReduce, CollectiveReduceScatter
from nxpipe.emulator.isa.constraints import ProgramInvalid, Rule, starts
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.gpsimd import IotaPattern
from nxpipe.emulator.isa.instruction import BITS, DMA_QUEUES, Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.legality import check, faults
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step, executed
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorScalar, TensorTensor
from tests.isa.samples import around, changed, far, inside, plain, programs, sums, tile

V2, V3, V4 = "v2", "v3", "v4"
PLAIN = [(name, engine, since) for name in sorted(INSTRUCTIONS) for engine, since in INSTRUCTIONS[name].engines.items()]


def broken(*body: Step, core: str = V2) -> set[Rule]:
    return {fault.rule for fault in faults(around(*body, core=core))}


def copy(dst: Tile, src: Tile | None = None, engine: Engine = Engine.VECTOR) -> TensorCopy:
    return TensorCopy(engine=engine, dst=dst, src=src or replace(dst, memory=Memory.SBUF, offset=Affine(65536)))


def multiply(core: str = V2, **changes: Any) -> set[Rule]:
    usual: dict[str, Any] = {
        "dst": sums(128, 512),
        "stationary": tile(128, 128, dtype=DType.BFLOAT16),
        "moving": tile(128, 512, slot=1, dtype=DType.BFLOAT16),
    }
    return broken(Matmul(engine=Engine.TENSOR, **(usual | changes)), core=core)


@pytest.mark.parametrize(("name", "engine", "since"), PLAIN)
def test_a_plain_instruction_is_legal_from_its_generation_on_and_refused_before(
    name: str, engine: Engine, since: int
) -> None:
    for core in CORES.values():
        expected = {Rule.ENGINE} if core.nki_gen < since else set()
        assert broken(plain(name, engine), core=core.name) == expected


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_no_engine_but_its_own_carries_an_instruction_out(name: str) -> None:
    own = INSTRUCTIONS[name].engines
    one = plain(name, next(iter(own)))
    for engine in set(Engine) - set(own):
        assert broken(replace(one, engine=engine), core=V4) == {Rule.ENGINE}


@given(lanes=st.integers(1, 128), start=st.integers(0, 127))
def test_tiles_begin_only_where_so_many_partitions_may(lanes: int, start: int) -> None:
    rules = broken(copy(tile(lanes, 8, start=start), tile(lanes, 8, slot=1)))
    legal = {0, 32, 64, 96} if lanes <= 32 else {0, 64} if lanes <= 64 else {0}
    assert set(starts(lanes)) == legal
    expected = {Rule.PARTITION} if start + lanes > 128 else set() if start in legal else {Rule.START}
    assert rules == expected


def test_a_copy_by_dma_may_begin_at_any_partition() -> None:
    assert broken(DmaCopy(engine=Engine.DMA3, dst=tile(7, 8, start=13), src=far(7, 8))) == set()


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_place_is_refused_exactly_if_some_turn_leaves_the_buffer(counts: list[int], data: st.DataObject) -> None:
    steps = [data.draw(st.integers(-9, 9)) for _ in counts]
    offset = Affine(data.draw(st.integers(-5, 40))) + sum(
        (index(depth) * step for depth, step in enumerate(steps)), start=Affine()
    )
    size = data.draw(st.integers(1, 8))
    one = DmaCopy(engine=Engine.DMA0, dst=tile(1, size), src=replace(far(size), offset=offset))
    program = Program(V2, 1, (Buffer(Role.INPUT, ("x",), DType.FLOAT32, (40,)),), (inside(*counts, body=(one,)),))
    leaves = any(not 0 <= offset.at(at) <= 40 - size for _, at in executed(program.body))
    assert {fault.rule for fault in faults(program)} == ({Rule.BOUNDS} if leaves else set())


@given(data=st.data(), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_wait_is_refused_exactly_if_some_turn_asks_for_more_than_comes_before(
    data: st.DataObject, counts: list[int]
) -> None:
    awaited = [plain("memset", Engine.VECTOR)] * data.draw(st.integers(0, 3))
    done = Affine(data.draw(st.integers(1, 6)))
    for depth in range(len(counts)):
        done = done + index(depth) * data.draw(st.integers(0, 4))
    waiting = plain("activation", Engine.SCALAR).after(Wait(Engine.VECTOR, done))
    first = [plain("memset", Engine.VECTOR)] * data.draw(st.integers(0, 2))
    body = (*first, inside(*counts, body=(*awaited, waiting)))
    seen, hopeless = 0, False
    for value, at in executed(body):
        seen += value.engine is Engine.VECTOR
        hopeless |= value is waiting and done.at(at) > seen
    assert broken(*body) == ({Rule.WAIT} if hopeless else set())


def test_a_wait_for_oneself_or_for_nothing_is_refused() -> None:
    one = plain("memset", Engine.VECTOR)
    for wait in (Wait(Engine.VECTOR, Affine(1)), Wait(Engine.SCALAR, Affine(0)), Wait(Engine.SCALAR, Affine(-3))):
        assert broken(one, one.after(wait)) == {Rule.WAIT}


def test_numbers_that_change_with_a_loop_that_is_not_there_are_refused() -> None:
    inner = copy(replace(tile(8, 8), offset=index(1) * 64))
    assert broken(inside(2, 2, body=(inner,))) == set()
    assert broken(inside(2, body=(inner,))) == {Rule.LOOP}
    waiting = plain("memset", Engine.VECTOR).after(Wait(Engine.SCALAR, index(0)))
    assert broken(waiting) == {Rule.LOOP}
    assert broken(changed(plain("iota", Engine.GPSIMD), start=index(2))) == {Rule.LOOP}


def test_a_loop_of_no_turns_is_refused() -> None:
    assert broken(Loop(0, (plain("memset", Engine.VECTOR),))) == {Rule.LOOP}


def test_buffers_that_take_turns_stay_inside_of_the_memory_too() -> None:
    usable = CORES[V2].sbuf_usable
    for places, rules in ((usable // 4096, set()), (usable // 4096 + 1, {Rule.BOUNDS})):
        turned = replace(tile(8, 1024), offset=rotating_offset(index(0), places, 4096))
        assert broken(inside(200, body=(copy(turned, tile(8, 1024)),))) == rules


@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        (contiguous(2, 2, 2, 2), set()),
        (contiguous(1, 2, 2, 2, 2), {Rule.AXES}),
        ((Axis(2, 32767),), set()),
        ((Axis(2, 32768),), {Rule.AXES}),
        ((Axis(1, 32768),), set()),
        ((Axis(65535, 0),), set()),
        ((Axis(65536, 0),), {Rule.AXES}),
        ((Axis(0, 1),), {Rule.AXES, Rule.BOUNDS}),
        ((Axis(8, -1),), {Rule.BOUNDS}),
        ((Axis(2, 0), Axis(32769, 0)), {Rule.SIZE}),
    ],
)
def test_patterns_have_four_axes_of_16_bits_and_a_most_of_elements(axes: tuple[Axis, ...], rules: set[Rule]) -> None:
    assert (
        broken(Memset(engine=Engine.VECTOR, dst=replace(tile(8, 1, dtype=DType.UINT8), axes=axes), value=0.0)) == rules
    )


def test_sums_stay_inside_of_a_bank_except_where_a_matmul_is_wider_than_one() -> None:
    def at(offset: Affine, columns: int = 256) -> dict[str, Any]:
        moving = tile(128, columns, slot=1, dtype=DType.BFLOAT16)
        return {"dst": replace(sums(128, columns), offset=offset), "moving": moving}

    for offset in (Affine(0), Affine(1024), Affine(2048), Affine(15 * 1024)):
        assert multiply(**at(offset)) == set()
    assert multiply(**at(Affine(1028))) == {Rule.BANK}
    wide = Matmul(engine=Engine.TENSOR, stationary=tile(128, 128, dtype=DType.BFLOAT16), **at(index(0) * 1024))
    assert broken(inside(16, body=(wide,))) == set()
    assert multiply(V3, **at(Affine(0), 513)) == {Rule.SHAPE, Rule.BANK}
    assert multiply(V4, **at(Affine(2048), 3584)) == set()
    assert multiply(V4, **at(Affine(1024), 3584)) == {Rule.BANK}


@given(data=st.data())
def test_no_turn_of_accepted_sums_crosses_a_bank(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    offset = rotating_offset(index(0), data.draw(st.integers(1, 3)), 512) + data.draw(st.integers(0, 8)) * 256
    offset = (
        offset
        + index(0) * data.draw(st.sampled_from([0, 256, 2048]))
        + index(1) * data.draw(st.sampled_from([0, 1024]))
    )
    columns = data.draw(st.sampled_from([64, 128, 256, 512]))
    one = Matmul(
        engine=Engine.TENSOR,
        dst=replace(sums(128, columns), offset=offset),
        stationary=tile(128, 128, dtype=DType.BFLOAT16),
        moving=tile(128, columns, slot=1, dtype=DType.BFLOAT16),
    )
    body = inside(*counts, body=(one,))
    if Rule.BANK not in broken(body):
        assert all(offset.at(at) % 2048 + columns * 4 <= 2048 for _, at in executed((body,)))


@pytest.mark.parametrize(
    ("core", "stationary", "moving", "legal"),
    [
        (V2, DType.BFLOAT16, DType.FLOAT16, True),
        (V2, DType.FLOAT32, DType.TFLOAT32, True),
        (V2, DType.FLOAT32, DType.BFLOAT16, False),
        (V2, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, True),
        (V2, DType.FLOAT8_E4M3, DType.BFLOAT16, True),
        (V3, DType.FLOAT8_E4M3FN, DType.BFLOAT16, False),
        (V4, DType.FLOAT8_E4M3FN, DType.BFLOAT16, True),
        (V4, DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3, False),
        (V2, DType.INT8, DType.BFLOAT16, False),
    ],
)
def test_only_some_types_are_multiplied_and_only_with_some(
    core: str, stationary: DType, moving: DType, legal: bool
) -> None:
    rules = multiply(core, stationary=tile(64, 128, dtype=stationary), moving=tile(64, 512, slot=1, dtype=moving))
    assert rules == (set() if legal else {Rule.DTYPE})


def test_sums_in_bfloat16_began_with_v4() -> None:
    for core, rules in ((V2, {Rule.DTYPE}), (V3, {Rule.DTYPE}), (V4, set())):
        assert multiply(core, dst=sums(128, 512, DType.BFLOAT16)) == rules


def test_both_operands_of_a_matmul_stand_in_the_same_partitions() -> None:
    high: dict[str, Any] = {"moving": tile(64, 512, slot=1, dtype=DType.BFLOAT16, start=64)}
    low: dict[str, Any] = {"stationary": tile(64, 128, dtype=DType.BFLOAT16)}
    assert multiply(**low, **high) == {Rule.SHAPE}
    assert multiply(stationary=replace(low["stationary"], start=64), **high) == set()


def test_each_engine_reaches_only_its_memories() -> None:
    far_away = sums(128, 8)
    assert broken(copy(far_away, tile(128, 8), Engine.GPSIMD)) == {Rule.MEMORY}
    assert broken(copy(far_away, tile(128, 8))) == set()
    assert broken(DmaCopy(engine=Engine.DMA0, dst=far_away, src=far(128, 8))) == {Rule.MEMORY}
    assert multiply(stationary=sums(128, 128, DType.BFLOAT16)) == {Rule.MEMORY}
    assert multiply(dst=tile(128, 512)) == {Rule.MEMORY}
    both: dict[str, Any] = {"left": far_away, "right": replace(far_away, offset=Affine(2048))}
    assert broken(TensorTensor(engine=Engine.VECTOR, dst=tile(128, 8), op=Alu.ADD, **both)) == {Rule.MEMORY}


@pytest.mark.parametrize("wide", [DType.INT64, DType.UINT64])
def test_64_bit_integers_are_refused_everywhere(wide: DType) -> None:
    assert broken(copy(tile(8, 8, dtype=wide))) == {Rule.DTYPE}
    assert broken(DmaCopy(engine=Engine.DMA0, dst=tile(8, 8), src=far(8, 8, dtype=wide))) == {Rule.DTYPE}
    program = replace(around(), buffers=(Buffer(Role.INPUT, ("ids",), wide, (4,)),))
    assert [fault.rule for fault in faults(program)] == [Rule.DTYPE]


@pytest.mark.parametrize("op", sorted(BITS))
def test_bit_operators_take_integers_on_the_vector_engine(op: Alu) -> None:
    def scalar(dtype: DType, engine: Engine = Engine.VECTOR, op1: Alu | None = None) -> set[Rule]:
        src = tile(8, 8, dtype=dtype)
        return broken(
            TensorScalar(engine=engine, dst=src, src=src, op0=op, operand0=1.0, op1=op1, operand1=1.0), core=V4
        )

    assert scalar(DType.INT32) == set()
    assert scalar(DType.FLOAT32) == {Rule.DTYPE}
    assert scalar(DType.INT32, op1=Alu.ADD) == {Rule.OPERATOR}
    assert scalar(DType.INT32, Engine.SCALAR) == {Rule.OPERATOR}


def test_v2_takes_a_bias_as_a_column_only_and_none_for_reciprocal() -> None:
    def activate(core: str, bias: float | Tile, function: Function = Function.EXP) -> set[Rule]:
        src = tile(128, 8)
        return broken(Activation(engine=Engine.SCALAR, dst=src, src=src, function=function, bias=bias), core=core)

    column = tile(128, 1, slot=1)
    assert activate(V2, 1.0) == {Rule.GENERATION}
    assert activate(V3, 1.0) == activate(V2, 0.0) == activate(V2, column) == set()
    assert activate(V2, column, Function.RECIPROCAL) == {Rule.GENERATION}
    assert activate(V2, tile(128, 2)) == {Rule.SHAPE}
    assert activate(V2, tile(64, 1)) == {Rule.SHAPE}


def test_the_tensor_engine_transposes_what_stays_whole() -> None:
    def transpose(dtype: DType, to: DType | None = None, core: str = V2) -> set[Rule]:
        dst, src = sums(64, 128, to or dtype), tile(128, 64, dtype=dtype)
        return broken(NcTranspose(engine=Engine.TENSOR, dst=dst, src=src), core=core)

    assert transpose(DType.BFLOAT16) == transpose(DType.FLOAT8_E4M3) == set()
    assert transpose(DType.BFLOAT16, DType.FLOAT32) == {Rule.DTYPE}
    assert transpose(DType.FLOAT8_E4M3, core=V3) == {Rule.DTYPE}
    assert transpose(DType.INT32) == {Rule.DTYPE}


def test_row_numbers_are_uint32_one_for_each_row() -> None:
    def gather(rows: Tile) -> set[Rule]:
        return broken(DmaCopy(engine=Engine.DMA0, dst=tile(64, 16), src=far(64, 16, rows=rows)))

    assert gather(tile(64, 1, dtype=DType.UINT32, slot=1)) == set()
    assert gather(tile(64, 1, dtype=DType.INT32, slot=1)) == {Rule.DTYPE}
    assert gather(tile(32, 1, dtype=DType.UINT32, slot=1)) == {Rule.SHAPE}
    assert gather(tile(64, 2, dtype=DType.UINT32, slot=1)) == {Rule.SHAPE}


@pytest.mark.parametrize(
    ("dtype", "value", "legal"),
    [
        (DType.BFLOAT16, float("-inf"), True),
        (DType.FLOAT16, 65504.0, True),
        (DType.FLOAT16, 65536.0, False),
        (DType.UINT8, 255.0, True),
        (DType.UINT8, -1.0, False),
        (DType.INT32, 0.5, False),
        (DType.INT32, float("nan"), False),
        (DType.INT32, float("inf"), False),
        (DType.BOOL, 2.0, False),
    ],
)
def test_memory_is_set_only_to_what_the_type_holds(dtype: DType, value: float, legal: bool) -> None:
    one = Memset(engine=Engine.VECTOR, dst=tile(8, 8, dtype=dtype), value=value)
    assert broken(one) == (set() if legal else {Rule.VALUE})


def test_counted_numbers_fit_32_bits() -> None:
    one = IotaPattern(engine=Engine.GPSIMD, dst=tile(128, 8), start=Affine(2**31 - 9), by_partition=0, steps=(1,))
    assert broken(one) == set()
    assert broken(replace(one, by_partition=1)) == {Rule.VALUE}
    assert broken(replace(one, steps=(1, 1))) == {Rule.SHAPE}


def test_buffers_that_overlap_or_are_not_there_are_refused() -> None:
    one = Buffer(Role.INPUT, ("x",), DType.FLOAT32, (4,))
    for address, rules in ((16, []), (12, [Rule.BUFFER]), (-16, [Rule.BUFFER])):
        program = Program(V2, 1, (one, replace(one, names=("y",), address=address)), ())
        assert [fault.rule for fault in faults(program)] == rules
    scratch = replace(one, role=Role.SCRATCH)
    for roles, rules in (((scratch, scratch), []), ((scratch, one), [Rule.BUFFER]), ((one, scratch), [Rule.BUFFER])):
        assert [fault.rule for fault in faults(Program(V2, 1, roles, ()))] == rules
    assert broken(DmaCopy(engine=Engine.DMA0, dst=tile(1, 4), src=far(4, buffer=2))) == {Rule.BUFFER}
    assert broken(changed(plain("memset", Engine.VECTOR), note=1)) == {Rule.BUFFER}


def test_a_gather_of_all_ranks_is_as_many_times_longer_and_contiguous() -> None:
    one = plain("all_gather", Engine.COLLECTIVE)
    assert {fault.rule for fault in faults(around(one, ranks=4))} == {Rule.SHAPE}
    for axes in ((Axis(8, 2),), (Axis(2, 1), Axis(4, 2))):
        scattered = replace(far(8), axes=axes)
        assert broken(changed(plain("all_reduce", Engine.COLLECTIVE, size=8), src=scattered)) == {Rule.SHAPE}


def test_ranks_add_up_equal_tiles_of_sbuf_or_stretches_of_hbm() -> None:
    def added(dst: Place, src: Place) -> set[Rule]:
        return broken(CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=dst, src=src))

    assert added(tile(4, 8), tile(4, 8)) == set()
    assert added(tile(4, 8), far(32)) == {Rule.SHAPE}
    assert added(tile(4, 8), tile(8, 4)) == {Rule.SHAPE}
    assert added(tile(4, 8), replace(tile(4, 8), axes=(Axis(8, 2),))) == {Rule.SHAPE}
    in_psum = replace(tile(4, 8), memory=Memory.PSUM)
    assert added(in_psum, in_psum) == {Rule.MEMORY}


def test_ranks_share_tiles_as_wide_as_all_their_parts() -> None:
    def shared(long: Place, short: Place) -> list[set[Rule]]:
        scattered = around(CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=short, src=long), ranks=2)
        gathered = around(CollectiveAllGather(engine=Engine.COLLECTIVE, dst=long, src=short), ranks=2)
        return [{fault.rule for fault in faults(program)} for program in (scattered, gathered)]

    assert shared(tile(4, 16), tile(4, 8)) == [set(), set()]
    assert shared(tile(4, 8), tile(4, 8)) == [{Rule.SHAPE}, {Rule.SHAPE}]
    assert shared(tile(8, 8), tile(4, 8)) == [{Rule.SHAPE}, {Rule.SHAPE}]
    assert shared(tile(4, 16), far(32)) == [{Rule.SHAPE}, {Rule.SHAPE}]
    assert shared(replace(tile(4, 16), axes=(Axis(2, 9), Axis(8, 1))), tile(4, 8)) == [{Rule.SHAPE}, {Rule.SHAPE}]


def test_a_fault_tells_the_instruction_its_place_in_the_model_the_numbers_and_the_way_out() -> None:
    bad = replace(copy(tile(64, 8, start=32), tile(64, 8)), note=1)
    program = replace(around(plain("memset", Engine.VECTOR), bad), notes=("", "encoder.mlp"))
    with pytest.raises(ProgramInvalid) as refused:
        check(program)
    (fault,) = refused.value.faults
    assert fault.number == 1
    assert str(fault) == (
        "instruction 1 (vector tensor_copy sbuf[32:96, 0 : f32 8] <- sbuf[0:64, 0 : f32 8]): 64 partitions begin "
        "at 32, at encoder.mlp; begin at 0 or 64, or use fewer partitions"
    )


def test_an_unknown_core_is_refused() -> None:
    assert [fault.rule for fault in faults(around(core="v9"))] == [Rule.GENERATION]


def test_sums_in_a_loop_that_is_not_there_are_a_fault_of_that_kind_alone() -> None:
    assert multiply(dst=replace(sums(128, 512), offset=index(1) * 1024)) == {Rule.LOOP}


def test_a_name_that_would_break_a_line_is_spelled_out() -> None:
    one = around()
    (fault,) = faults(replace(one, buffers=(replace(one.buffers[0], names=("two\nlines",), order=(0, 0)),)))
    assert r"the input 'two\nlines' has the order [0, 0] for 2 axes" in str(fault)
    (fault,) = faults(replace(around(copy(tile(64, 8, start=32), tile(64, 8))), notes=("two\nlines",)))
    assert r", at 'two\nlines'; " in str(fault)


@given(programs())
def test_faults_of_any_program_are_sentences(program: Program) -> None:
    for fault in faults(program):
        assert "; " in str(fault)
        assert "\n" not in str(fault)


def test_queues_of_dma_are_alike() -> None:
    assert len(DMA_QUEUES) == 8
    assert all(broken(plain("dma_copy", queue)) == set() for queue in DMA_QUEUES)


def test_a_far_place_may_be_read_as_another_type_of_its_bytes() -> None:
    half = Far(0, DType.BFLOAT16, Affine(2 * 128 * 4096 - 8), contiguous(8))
    assert broken(DmaCopy(engine=Engine.DMA0, dst=tile(1, 8), src=half)) == set()
    assert broken(DmaCopy(engine=Engine.DMA0, dst=tile(1, 8), src=replace(half, offset=half.offset + 1))) == {
        Rule.BOUNDS
    }


def test_the_same_instruction_is_a_fault_each_time_that_it_stands_there() -> None:
    bad: Instruction = copy(tile(64, 8, start=32), tile(64, 8))
    assert [fault.number for fault in faults(around(bad, inside(2, body=(bad,))))] == [0, 1]
