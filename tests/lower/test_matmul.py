"""Products of small whole numbers, whose sums are exact in any order, are what `fast` makes, to the bit; of others they
are within one unit of the last place, and what float32 loses when it adds in another order."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Binary, Cast, Gather, GroupedMatMul, Linear, MatMul, SliceUpdate, Transpose, Unary
from tests.lower.harness import Given, case, floats, of, require_equal, wholes
from tests.lower.sweep import Draw, Row, sweep

BF16 = DType.BFLOAT16
MULTIPLIED = (DType.FLOAT32, DType.TFLOAT32, BF16, DType.FLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)


def _linear(draw: Draw, *, whole: bool = True) -> Value:
    inputs, outputs, dtype = draw.size(), draw.size(), draw.one_of(MULTIPLIED)
    rows = draw.one_of([(), (draw.size(),), (draw.integer(1, 3), draw.integer(1, 9))])
    x = draw.tensor((*rows, inputs), dtype, numbers=draw.factors((*rows, inputs), dtype, whole=whole))
    numbers = draw.factors((outputs, inputs), dtype, whole=whole)
    weight = (
        draw.parameter(numbers, dtype) if draw.integer(0, 1) else draw.tensor(numbers.shape, dtype, numbers=numbers)
    )
    bias = [draw.tensor((outputs,), draw.one_of((BF16, DType.FLOAT32)), most=2)]
    out = draw.one_of((DType.FLOAT32, BF16))
    return draw.builder.add(Linear(out), x, weight, *bias[: draw.integer(0, 1)])


def _matmul(draw: Draw, *, whole: bool = True) -> Value:
    rows, inner, columns, dtype = draw.size(), draw.size(), draw.size(), draw.one_of(MULTIPLIED)
    batch = draw.shape(0, 2, 3)
    own = [tuple(1 if draw.integer(0, 2) == 0 else size for size in batch)[draw.integer(0, len(batch)) :] for _ in "ab"]
    left, right = (*own[0], rows, inner), (*own[1], inner, columns)
    a, b = (draw.tensor(entry, dtype, numbers=draw.factors(entry, dtype, whole=whole)) for entry in (left, right))
    return draw.builder.add(MatMul(draw.one_of((DType.FLOAT32, BF16))), a, b)


def _grouped(draw: Draw, *, whole: bool = True) -> Value:
    rows, inner, columns, groups = draw.size(), draw.size(), draw.size(), draw.integer(1, 12)
    dtype = draw.one_of(MULTIPLIED[:4])
    x = draw.tensor((rows, inner), dtype, numbers=draw.factors((rows, inner), dtype, whole=whole))
    turned = draw.integer(0, 1)
    shape = (groups, columns, inner) if turned else (groups, inner, columns)
    numbers = draw.factors(shape, dtype, whole=whole)
    is_parameter = draw.integer(0, 2)
    matrices = draw.parameter(numbers, dtype) if is_parameter else draw.tensor(shape, dtype, numbers=numbers)
    matrices = draw.builder.add(Transpose((0, 2, 1)), matrices) if turned else matrices
    ends = draw.random.integers(-2, rows + 3, groups).astype(np.int64)
    if draw.integer(0, 1):
        ends = np.sort(ends)
    return draw.builder.add(GroupedMatMul(BF16), x, matrices, draw.tensor((groups,), DType.INT64, numbers=ends))


# What numbers of normal distribution lose in another order of some hundred additions.
NOISE = 1e-4
TABLE = (
    Row("linear", Linear, _linear),
    Row("matmul", MatMul, _matmul),
    Row("grouped_matmul", GroupedMatMul, _grouped),
    Row("linear of reals", Linear, partial(_linear, whole=False), 1, NOISE),
    Row("matmul of reals", MatMul, partial(_matmul, whole=False), 1, NOISE),
    Row("grouped_matmul of reals", GroupedMatMul, partial(_grouped, whole=False), 1, NOISE),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_product_is_what_fast_makes_of_it(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_product_is_what_fast_makes_of_it_in_many_forms(row: Row) -> None:
    sweep(row, 200)


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.INPUT])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 300, 5000), (3, 9000, 70), (40, 30011, 20), (600, 64, 130), (0, 8, 8), (5, 0, 70), (5, 8, 0)],
)
def test_no_size_of_a_linear_layer_is_too_large_or_too_small(role: Role, rows: int, inputs: int, outputs: int) -> None:
    given = [wholes(rows, inputs, dtype=BF16, most=1), wholes(outputs, inputs, dtype=BF16, most=1, seed=1, role=role)]
    require_equal(of(Linear(BF16), *given, wholes(outputs, seed=2)), cores=("v2",), orders=("hostile",))


@settings(max_examples=4)
@given(
    st.sampled_from([1, 3, 64, 130, 700]),
    st.integers(250, 2000),
    st.integers(1, 2100),
    st.sampled_from([Linear, MatMul]),
    st.sampled_from([BF16, DType.FLOAT32]),
    st.integers(0, 100),
)
def test_a_weight_in_tiles_is_read_as_the_matrix_that_it_is(
    rows: int, inputs: int, outputs: int, kind: type[Linear | MatMul], dtype: DType, seed: int
) -> None:
    shape = (outputs, inputs) if kind is Linear else (inputs, outputs)
    operands = [wholes(rows, inputs, dtype=dtype, most=1, seed=seed)]
    operands.append(wholes(*shape, dtype=dtype, most=1, seed=seed + 1, role=Role.PARAMETER))
    tiled = of(kind(dtype), *operands)
    assert [buffer.tile for buffer in lower(tiled.graph, "v2").buffers if buffer.role is Role.PARAMETER] == [
        512 if inputs >= 256 else 0
    ]
    require_equal(tiled, cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize("dtype", [BF16, DType.FLOAT32])
def test_a_table_that_a_matmul_reads_too_is_stored_as_rows_and_in_tiles(dtype: DType) -> None:
    """Nothing is cast or transposed in a run."""

    def build(builder: GraphBuilder, numbers: Value, table: Value) -> Value:
        rows = builder.add(Cast(BF16), builder.add(Gather(0), table, numbers))
        return builder.add(Linear(BF16), rows, builder.add(Cast(BF16), table) if dtype is not BF16 else table)

    numbers = Given(np.random.default_rng(2).integers(0, 600, (9,)), DType.INT64)
    tied = case(build, numbers, wholes(600, 300, dtype=dtype, most=1, role=Role.PARAMETER))
    require_equal(tied)
    program = lower(tied.graph, "v2")
    stored = [buffer for buffer in program.buffers if buffer.role is Role.PARAMETER]
    assert [(buffer.dtype, buffer.order, buffer.tile) for buffer in stored] == [(dtype, (), 0), (BF16, (1, 0), 512)]
    assert not [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH and buffer.elements >= 600 * 300]


@pytest.mark.parametrize("rows", [1, 100, 1300])
def test_rows_that_only_matmuls_read_are_cast_as_they_are_loaded(rows: int) -> None:
    """The f32 rows are updated in place before the matmuls are computed, which read what was there before."""

    def build(builder: GraphBuilder, x: Value, one: Value, other: Value, zero: Value, bias: Value) -> dict[str, Value]:
        short = builder.add(Cast(BF16), x)
        updated = builder.add(SliceUpdate((0, 0), (1, 300), (1, 1)), x, zero)
        results = [builder.add(Linear(DType.FLOAT32), short, weight, bias) for weight in (one, other)]
        return {"input0": updated, "one": results[0], "other": builder.add(Unary("relu"), results[1])}

    weights = [wholes(70, 300, dtype=BF16, most=1, seed=seed, role=Role.PARAMETER) for seed in (1, 2)]
    x = wholes(rows, 300, most=1000)  # more digits than bf16 has
    zero = Given(np.zeros((1, 300), np.float32), DType.FLOAT32)
    require_equal(case(build, x, *weights, zero, wholes(70, seed=3)), cores=("v2", "v3"))


def test_a_parameter_that_is_rounded_twice_is_rounded_twice() -> None:
    def build(builder: GraphBuilder, weight: Value, x: Value) -> dict[str, Value]:
        narrow = builder.add(Cast(BF16), weight)
        wide = builder.add(Cast(DType.FLOAT32), narrow)
        rounded = builder.add(Cast(DType.FLOAT16), narrow)
        return {
            "wide": builder.add(Binary("add"), wide, x),
            "rounded": builder.add(Binary("multiply"), builder.add(Cast(DType.FLOAT32), rounded), x),
            "weight": builder.add(Binary("add"), weight, x),
        }

    require_equal(case(build, floats(40, 50, role=Role.PARAMETER), floats(40, 50, seed=1)))


def test_sums_in_another_order_are_within_one_unit_of_the_last_place() -> None:
    given = floats(130, 700, dtype=BF16), floats(300, 700, dtype=BF16, seed=1, role=Role.PARAMETER)
    require_equal(of(Linear(BF16), *given), units=1)


def test_what_follows_a_product_is_done_before_it_is_stored() -> None:
    def build(builder: GraphBuilder, x: Value, weight: Value, more: Value) -> Value:
        return builder.add(Binary("add"), builder.add(Unary("relu"), builder.add(Linear(BF16), x, weight)), more)

    of_three = case(build, wholes(200, 65, dtype=BF16), wholes(90, 65, dtype=BF16, seed=1), wholes(200, 90, dtype=BF16))
    require_equal(of_three)
    program = lower(of_three.graph, "v2")
    assert not [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH]


def test_a_weight_that_lies_inputs_first_is_not_turned() -> None:
    given = wholes(4, 128, dtype=BF16), wholes(640, 128, dtype=BF16, seed=1, role=Role.PARAMETER)
    turned = [
        instruction
        for instruction in instructions(lower(of(Linear(BF16), *given).graph, "v2").body)
        if instruction.name == "nc_transpose"
    ]
    assert len(turned) == 1  # the rows alone


def test_both_sides_of_a_product_may_be_transposed() -> None:
    def build(builder: GraphBuilder, a: Value, b: Value) -> Value:
        turn = Transpose((0, 2, 1))
        return builder.add(MatMul(BF16), builder.add(turn, a), builder.add(turn, b))

    require_equal(case(build, wholes(2, 165, 70, dtype=BF16), wholes(2, 90, 165, dtype=BF16, seed=1)))


def _is_gathered(graph: Graph, core: str = "v2") -> bool:
    """True if the program reads its parameter by row numbers."""
    program = lower(graph, core)
    far = (place for step in instructions(program.body) for place in step.read() if isinstance(place, Far))
    return any(place.rows is not None and program.buffers[place.buffer].role is Role.PARAMETER for place in far)


@settings(max_examples=6)
@given(
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 5, 7, 8]),
    st.integers(8, 21),
    st.integers(1, 700),
    st.integers(1, 1300),
    st.booleans(),
    st.sampled_from(["v2", "v3"]),
    st.integers(0, 1000),
)
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(
    tokens: int, chosen: int, experts: int, inner: int, columns: int, turned: bool, core: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    experts_of = np.sort(np.concatenate([random.permutation(experts)[:chosen] for _ in range(tokens)]))
    ends = Given(np.cumsum(np.bincount(experts_of, minlength=experts)), DType.INT64)
    shape = (experts, columns, inner) if turned else (experts, inner, columns)
    x = wholes(tokens * chosen, inner, dtype=BF16, most=1, seed=seed)
    weights = wholes(*shape, dtype=BF16, most=1, seed=seed + 1, role=Role.PARAMETER)

    def build(builder: GraphBuilder, rows: Value, matrices: Value, ends: Value) -> Value:
        matrices = builder.add(Transpose((0, 2, 1)), matrices) if turned else matrices
        return builder.add(GroupedMatMul(BF16), rows, matrices, ends)

    require_equal(case(build, x, weights, ends), cores=(core,), orders=("hostile",))


@pytest.mark.parametrize(("rows", "gathers"), [(1, True), (4, True), (100, False)])
def test_experts_are_read_by_their_number_where_few_rows_need_them(rows: int, gathers: bool) -> None:
    ends = Given(np.arange(1, 33) * rows // 32, DType.INT64)
    experts = wholes(32, 300, 1100, dtype=BF16, most=1, role=Role.PARAMETER)
    made = of(GroupedMatMul(BF16), wholes(rows, 300, dtype=BF16, most=1), experts, ends)
    assert _is_gathered(made.graph) is gathers
    require_equal(made, cores=("v2",), orders=("hostile",))


def test_an_infinite_expert_concerns_no_row_of_another() -> None:
    experts = np.random.default_rng(0).integers(-2, 3, (40, 260, 70)).astype(np.float32)
    experts[3] = np.inf
    given = wholes(4, 260, dtype=BF16), Given(experts, BF16, Role.PARAMETER)
    ends = Given(np.minimum(np.arange(40), [0, 1, 2, 2, *[4] * 36]), DType.INT64)
    made = of(GroupedMatMul(BF16), *given, ends)
    assert _is_gathered(made.graph)
    require_equal(made)


def test_gathered_rows_behind_all_groups_are_zero() -> None:
    experts = wholes(40, 260, 70, dtype=BF16, role=Role.PARAMETER)
    made = of(GroupedMatMul(BF16), wholes(5, 260, dtype=BF16, seed=1), experts, Given(np.full(40, 3), DType.INT64))
    assert _is_gathered(made.graph)
    require_equal(made)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_cast_and_transposed_by_the_host_if_only_grouped_matmuls_read_them(shared: bool) -> None:
    def build(builder: GraphBuilder, x: Value, experts: Value, ends: Value) -> dict[str, Value]:
        turned = builder.add(Transpose((0, 2, 1)), experts)
        product = builder.add(GroupedMatMul(BF16), x, builder.add(Cast(BF16), turned), ends)
        return {"product": product} | ({"also": builder.add(Unary("negate"), experts)} if shared else {})

    experts = wholes(6, 40, 300, role=Role.PARAMETER)
    ends = Given(np.array([0, 1, 1, 2, 3, 3]), DType.INT64)
    made = case(build, wholes(3, 300, dtype=BF16, seed=1), experts, ends)
    tiles = [buffer.tile for buffer in lower(made.graph, "v2").buffers if buffer.role is Role.PARAMETER]
    assert sorted(tiles) == ([0, 512] if shared else [512])
    require_equal(made)


def test_rows_behind_all_groups_are_zero() -> None:
    ends = Given(np.array([3, 3, 100, 140]), DType.INT64)
    given = wholes(300, 200, dtype=BF16), wholes(4, 200, 600, dtype=BF16, seed=1), ends
    require_equal(of(GroupedMatMul(BF16), *given), cores=("v2",), orders=("hostile",))
