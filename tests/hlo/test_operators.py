"""Every operator on XLA's CPU gives what `fast` gives: to the bit, or within the bounds of docs/reference/hlo.md."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import HloUnsupported
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.constraints import violations
from nxpipe.emulator.hlo.module import EMISSIONS, module_of
from nxpipe.emulator.hlo.xla import proto_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    OPERATORS,
    ArgReduce,
    ArgSort,
    Attention,
    Binary,
    Bitcast,
    Cast,
    GroupedMatMul,
    IndexUpdate,
    Operator,
    Pool,
    Reduce,
    ScatterAlong,
    Unary,
)
from nxpipe.emulator.ops.elementwise import _KEEPING, _PREDICATES, _SMOOTH
from tests.conftest import ROOT
from tests.hlo.harness import TINY, bounds, bounds_table, distance_on_xla, drawn_case
from tests.lower.harness import Case, Given, floats, of, truths, wholes
from tests.lower.sweep import Row
from tests.lower.test_elementwise import EXTREMES
from tests.lower.test_every_operator import ROWS
from tests.tiers import examples

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
# Numbers below the normal ones are zeros on XLA's CPU.
NORMAL_EXTREMES = np.where(np.abs(EXTREMES) < TINY, np.float32(0), EXTREMES)


def require_agreement(case: Case, units: float = 0, noise: float = 0) -> None:
    found = distance_on_xla(case, units, noise)
    assert found.part <= 1, found


def test_every_operator_has_an_emission() -> None:
    assert set(EMISSIONS) == set(OPERATORS.values())


def test_the_page_says_how_far_results_may_be_off() -> None:
    assert bounds_table() in (ROOT / "docs" / "reference" / "hlo.md").read_text()


@pytest.mark.sample(12)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_xla_computes_what_fast_computes(row: Row) -> None:
    require_agreement(drawn_case(row, Random(row.name)), *bounds(row))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_xla_computes_what_fast_computes_in_many_forms(row: Row) -> None:
    for number in range(50):
        require_agreement(drawn_case(row, Random(number)), *bounds(row))


def test_functions_hold_at_the_ends_of_float32() -> None:
    """All functions in one graph."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType(EXTREMES.shape, F32))
    names = [name for name in (*_KEEPING, *_PREDICATES, *_SMOOTH) if name not in ("invert", "sin", "cos", "tan")]
    for name in names:
        builder.output(name, builder.add(Unary(name), x))
    require_agreement(Case(builder.build(), {}, {"x": NORMAL_EXTREMES}), units=8, noise=TINY)


@pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.BOOL, DType.UINT32])
def test_floats_become_integers_by_losing_their_fraction_and_saturate(dtype: DType) -> None:
    require_agreement(of(Cast(dtype), Given(NORMAL_EXTREMES, F32)))


_EDGES = [0.0, 1e-9, 2**-9, 2**-10, 3 * 2**-10, 1.0625, 1.1875, 239.9, 240.0, 240.1, 248, 447, 448, 463.9, 464, 464.1]
_EDGES += [57344, 61439, 61440, 65504, 65519, 65520, 3.4e38, np.inf, np.nan]


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_float])
def test_numbers_are_rounded_to_each_float_type_at_its_ends(dtype: DType) -> None:
    numbers = np.asarray([*_EDGES, *(-number for number in _EDGES)], np.float32)
    require_agreement(of(Cast(dtype), Given(numbers, F32)))


@pytest.mark.parametrize("function", ["add", "multiply", "floor_divide", "remainder", "truncating_divide", "power"])
def test_integers_of_32_bits_wrap_and_division_by_zero_is_zero(function: str) -> None:
    numbers = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 40)).astype(np.int32)
    numbers[1, ::4] //= 2**29
    numbers[0, 0], numbers[1, :3] = -(2**31), (-1, 0, 1)
    require_agreement(of(Binary(function), *(Given(number, DType.INT32) for number in numbers)))


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("function", ["sum", "prod", "mean", "all", "any"])
def test_a_fold_of_nothing_is_its_neutral_element(function: str) -> None:
    require_agreement(of(Reduce(function, (1,), False), Given(np.zeros((3, 0, 2), np.float32), F32)))


@pytest.mark.parametrize("function", ["argmax", "argmin"])
def test_the_first_nan_is_the_place_of_an_extreme(function: str) -> None:
    numbers = np.asarray([[3, np.nan, np.inf, np.nan], [1, 1, -np.inf, 1], [np.inf, np.inf, 2, 2]], np.float32)
    require_agreement(of(ArgReduce(function, 1, True), Given(numbers, F32)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [F32, DType.INT32])
@pytest.mark.parametrize("descending", [False, True])
def test_long_axes_are_sorted_by_a_network_and_stay_stable(descending: bool, dtype: DType) -> None:
    numbers = np.random.default_rng(1).integers(-40, 40, (2, 300)).astype(dtype.held)
    if dtype.is_float:
        numbers[0, ::17], numbers[0, 1::19], numbers[0, 2::23] = np.nan, np.inf, -np.inf
    else:
        numbers[1, ::7], numbers[1, 1::7] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    require_agreement(of(ArgSort(1, descending), Given(numbers, dtype)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_may_look_nowhere_is_zero(causal: bool) -> None:
    seen = np.ones((6, 8), np.bool_)
    seen[3], seen[5, :6] = False, False
    given = wholes(2, 6, 4), wholes(2, 8, 4, seed=1), wholes(2, 8, 3, seed=2), Given(seen, DType.BOOL)
    require_agreement(of(Attention(0.25, causal, F32, F32), *given), units=4, noise=1e-6)
    hidden = Given(np.where(seen, np.float32(0), np.float32(-np.inf)), F32)
    require_agreement(of(Attention(0.25, causal, F32, F32), *given[:3], hidden), units=4, noise=1e-6)


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_behind_all_groups_are_zero(rows: int) -> None:
    """For fewer rows than groups and for more, which are written in different ways."""
    ends = Given(np.array([1, 1, -3, 1, rows - 1]), DType.INT64)
    require_agreement(of(GroupedMatMul(BF16), wholes(rows, 8, dtype=BF16), wholes(5, 8, 6, dtype=BF16, seed=1), ends))


def test_of_several_updates_of_an_element_the_last_wins() -> None:
    indices = Given(np.array([2, -1, 2, 0, 2]), DType.INT64)
    require_agreement(of(IndexUpdate((0,), ""), floats(4, 3), floats(5, 3, seed=1), indices))


INTEGERS = (DType.INT32, DType.UINT32, DType.INT16, DType.INT8, DType.UINT8)


@settings(max_examples=examples(20))
@given(
    combine=st.sampled_from(["add", "maximum", "minimum"]),
    dtype=st.sampled_from([*INTEGERS, DType.BOOL]),
    updates=st.sampled_from([1, 5, 300]),
    along=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_combined_integers_are_exact_though_the_compiler_combines_floats_only(
    combine: str, dtype: DType, updates: int, along: bool, seed: int
) -> None:
    chance = np.random.default_rng(seed)

    def drawn(*shape: int) -> Given:
        """All bits of a number, and few different upper halves."""
        bits = chance.integers(0, 1 << 16, shape) + chance.choice([0, 1 << 16, 0x7FFF << 16, 0x8000 << 16], shape)
        return Given((bits & 0xFFFFFFFF).astype(np.uint32).astype(dtype.held), dtype)

    if along:
        places = Given(chance.integers(0, 5, (2, 3)), DType.INT32)
        case = of(ScatterAlong(1, combine), drawn(2, 5), drawn(2, 3), places)
    else:
        rows = Given(chance.integers(0, 4, updates), DType.INT64)
        case = of(IndexUpdate((0,), combine), drawn(4, 3), drawn(updates, 3), rows)
    require_agreement(case)
    assert violations(canonical(proto_of(module_of(case.graph).text)), "trn1") == []


def test_a_product_of_combined_integers_is_refused() -> None:
    case = of(IndexUpdate((0,), "multiply"), wholes(4, dtype=DType.INT32), wholes(2, dtype=DType.INT32), AT)
    (found,) = violations(canonical(proto_of(module_of(case.graph).text)), "trn1")
    assert (found.rule, found.source) == ("integer-scatter", "NCC_EVRF016")


AT = Given(np.array([2, 2]), DType.INT64)


def test_so_many_updates_that_no_digit_is_exact_are_refused() -> None:
    builder = GraphBuilder()
    x, update = (builder.input(name, TensorType((size,), DType.INT32)) for name, size in (("x", 4), ("u", 1 << 24)))
    at = builder.input("at", TensorType((1 << 24,), DType.INT32))
    builder.output("y", builder.add(IndexUpdate((0,), "add"), x, update, at))
    (found,) = violations(canonical(proto_of(module_of(builder.build()).text)), "trn1")
    assert found.rule == "integer-scatter"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_tensors_without_axes_or_elements_are_computed_too(shape: tuple[int, ...]) -> None:
    require_agreement(of(Unary("gelu"), Given(np.ones(shape, np.float32), F32)), units=4)


def test_one_window_over_the_whole_image_is_a_fold() -> None:
    op = Pool("sum_pool", (7, 7), (1, 1), (0, 0), (0, 0), (1, 1))
    case = of(op, wholes(1, 3, 7, 7))
    assert "stablehlo.reduce" in module_of(case.graph).text
    require_agreement(case)


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (Bitcast(DType.BOOL, DType.UINT8), truths(3, 4)),
        (Bitcast(F32, DType.TFLOAT32), wholes(3, 4)),
        (Bitcast(DType.FLOAT8_E4M3, DType.INT8), wholes(3, 4, dtype=DType.FLOAT8_E4M3)),
        (Bitcast(DType.INT32, DType.UINT8), wholes(3, 4, dtype=DType.INT32)),
    ],
    ids=str,
)
def test_bytes_are_read_as_another_type(op: Operator, given: Given) -> None:
    require_agreement(of(op, given))


def test_bytes_of_64_bit_integers_are_refused() -> None:
    numbers: Array = np.zeros(4, np.int64)
    with pytest.raises(HloUnsupported, match=r"bitcast from int64 to int32 .* no 64-bit integers"):
        module_of(of(Bitcast(DType.INT64, DType.INT32), Given(numbers, DType.INT64)).graph)
