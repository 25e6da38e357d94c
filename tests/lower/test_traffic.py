"""HBM traffic of a program: no avoidable copy, and none of data that is already there."""

from collections.abc import Iterator

import pytest

from nxpipe.emulator.analysis.utilization import HBM, totals
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.collective import CollectiveAllReduce as Exchange
from nxpipe.emulator.isa.operands import Far, Tile
from nxpipe.emulator.isa.program import Program, Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import (
    AllReduce,
    Binary,
    Broadcast,
    Cast,
    Concat,
    Linear,
    Operator,
    RankSlice,
    Reduce,
    Reshape,
    RmsNorm,
    Slice,
    SliceUpdate,
    Transpose,
    Unary,
)
from tests.lower.harness import Case, case, floats, require_equal, wholes

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
RANKS = 2


def _row_parallel(builder: GraphBuilder, x: Value, weight: Value, residual: Value) -> Value:
    """Each rank multiplies its share of the columns; the rounded sums of all ranks are added to the residual."""
    own = (len(x.type.shape) - 1, 1, (x.type.shape[-1],), (RANKS,), RANKS)
    mine, share = builder.add(RankSlice(*own), x), builder.add(RankSlice(*own), weight)
    sums = builder.add(AllReduce(RANKS), builder.add(Linear(F32), mine, share))
    return builder.add(Binary("add"), residual, builder.add(Cast(BF16), sums))


def _sums(rows: int, width: int, inner: int) -> Case:
    given = wholes(rows, inner, dtype=BF16), wholes(width, inner, dtype=BF16, seed=1)
    return case(_row_parallel, *given, wholes(rows, width, dtype=BF16, seed=2))


def _exchanges(program: Program) -> list[Exchange]:
    return [instruction for instruction in instructions(program.body) if isinstance(instruction, Exchange)]


@pytest.mark.parametrize(("rows", "width"), [(128, 700), (100, 2048), (70, 130)])
def test_the_sums_of_a_row_parallel_linear_never_touch_hbm(rows: int, width: int) -> None:
    sums = _sums(rows, width, 64)
    require_equal(sums, cores=("v2",))
    program = lower(sums.graph, "v2", RANKS)
    for meeting in _exchanges(program):
        assert isinstance(meeting.src, Tile)
        assert isinstance(meeting.dst, Tile)
    assert not [far for far in _far(program) if far.dtype is F32]


def test_one_row_is_exchanged_at_once_since_its_pieces_would_wait_for_each_other() -> None:
    program = lower(_sums(1, 4096, 64).graph, "v2", RANKS)
    (meeting,) = _exchanges(program)
    assert isinstance(meeting.src, Far)


def test_sums_that_somebody_else_reads_before_they_meet_are_not_overwritten() -> None:
    def build(builder: GraphBuilder, x: Value) -> Value:
        own = builder.add(Unary("negate"), builder.add(RankSlice(0, 1, (400,), (RANKS,), RANKS), x))
        seen = builder.add(Reshape((100, 600)), own)
        return builder.add(Binary("subtract"), builder.add(AllReduce(RANKS), seen), seen)

    of_ranks = case(lambda builder, x: builder.add(AllReduce(RANKS), build(builder, x)), floats(400, 300))
    require_equal(of_ranks, cores=("v2",))


def _far(program: Program) -> Iterator[Far]:
    for instruction in instructions(program.body):
        yield from (place for place in instruction.places.values() if isinstance(place, Far))


def test_a_widened_value_lies_where_the_narrow_one_does() -> None:
    def build(builder: GraphBuilder, x: Value, more: Value) -> dict[str, Value]:
        stream = builder.add(Binary("add"), x, more)
        normal = builder.add(RmsNorm(1, 1e-5), builder.add(Cast(F32), stream))
        return {"stream": stream, "normal": builder.add(Cast(BF16), normal)}

    made = case(build, floats(200, 300, dtype=BF16), floats(200, 300, dtype=BF16, seed=1))
    require_equal(made, units=1)
    program = lower(made.graph, "v2")
    assert {far.dtype for far in _far(program)} == {BF16}
    assert totals(program).written[HBM] == 2 * 200 * 300 * BF16.itemsize


READERS: dict[str, Operator] = {
    "relu": Unary("relu"),
    "square root": Unary("sqrt"),
    "sum of rows": Reduce("sum", (1,), keep=False),
    "transposition": Transpose((1, 0)),
    "reshape": Reshape((50, 80)),
    "cast back": Cast(BF16),
    "cast to integers": Cast(DType.INT32),
}


@pytest.mark.parametrize("narrow", [BF16, DType.FLOAT16, DType.FLOAT8_E4M3])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_widened_value_sees_the_wide_type(reader: str, narrow: DType) -> None:
    def build(builder: GraphBuilder, x: Value) -> dict[str, Value]:
        wide = builder.add(Cast(F32), builder.add(Unary("negate"), x))
        read = builder.add(READERS[reader], wide)
        return {"read": read, "again": builder.add(Unary("abs"), read)}

    require_equal(case(build, wholes(100, 40, dtype=narrow)), cores=("v2",))


def test_a_widened_value_that_is_an_output_is_stored_wide() -> None:
    def build(builder: GraphBuilder, x: Value, weight: Value) -> Value:
        return builder.add(Cast(F32), builder.add(Linear(BF16), x, weight))

    made = case(build, wholes(70, 65, dtype=BF16), wholes(90, 65, dtype=BF16, seed=1, role=Role.PARAMETER))
    require_equal(made)
    assert not [buffer for buffer in lower(made.graph, "v2").buffers if buffer.role is Role.SCRATCH]


def test_a_row_that_all_rows_are_combined_with_is_loaded_once() -> None:
    def build(builder: GraphBuilder, x: Value, scale: Value) -> Value:
        return builder.add(Binary("multiply"), builder.add(RmsNorm(1, 1e-5), x), scale)

    made = case(build, floats(1000, 256), floats(256, seed=1, role=Role.PARAMETER))
    require_equal(made, cores=("v2",), units=1)
    program = lower(made.graph, "v2")
    rows = 128  # one copy on every partition
    assert totals(program).read[HBM] == (1000 + rows) * 256 * F32.itemsize


def _rotated(builder: GraphBuilder, x: Value, cosine: Value, sine: Value) -> Value:
    """Rotary positions: the first product waits for the second one, with a copy between them."""
    first = builder.add(Binary("multiply"), x, cosine)
    half = x.type.shape[1] // 2
    left = builder.add(Slice((0, 0), (x.type.shape[0], half), (1, 1)), x)
    right = builder.add(Slice((0, half), x.type.shape, (1, 1)), x)
    turned = builder.add(Concat(1), builder.add(Unary("negate"), right), left)
    return builder.add(Binary("add"), first, builder.add(Binary("multiply"), turned, sine))


def test_a_product_that_waits_for_another_is_made_when_both_can_be_added() -> None:
    given = [floats(300, 64, dtype=BF16, seed=seed) for seed in range(3)]
    rotated = case(_rotated, *given)
    require_equal(rotated)
    program = lower(rotated.graph, "v2")
    scratch = [buffer.shape for buffer in program.buffers if buffer.role is Role.SCRATCH]
    assert scratch == []


def test_what_is_put_off_sees_what_was_there_before_an_update() -> None:
    def build(builder: GraphBuilder, cache: Value, rows: Value) -> dict[str, Value]:
        seen = builder.add(Unary("negate"), cache)
        later = builder.add(SliceUpdate((1, 0), (3, 40), (1, 1)), cache, rows)
        folded = builder.add(Reduce("sum", (1,), keep=True), later)
        wide = builder.add(Broadcast((6, 40)), folded)
        return {"input0": later, "read": builder.add(Binary("add"), seen, builder.add(Unary("abs"), wide))}

    require_equal(case(build, wholes(6, 40), wholes(2, 40, seed=1)))
