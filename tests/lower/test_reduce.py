"""Folds of whole axes: exact for integers and extremes; sums of floats are added in another order than numpy's, so they
differ by what float32 loses in that."""

from collections.abc import Callable

import numpy as np
import pytest

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import ArgReduce, ArgSort, Cumulate, Reduce
from tests.lower.harness import Given, of, require_equal
from tests.lower.sweep import FLOATS, INTEGERS, UNSIGNED, Draw, Row, sweep

ANY = (*FLOATS, *INTEGERS, DType.BOOL)
SUMS = ("sum", "mean")


def _reduce(function: str) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        shape = draw.shape()
        axes = tuple(axis for axis in range(len(shape)) if draw.integer(0, 1)) or (len(shape) - 1,)
        dtype = draw.one_of(FLOATS if function == "mean" else ANY)
        x = draw.tensor(shape, dtype, most=2 if function == "prod" else 40)
        if function == "prod":  # of signs, ones and a few twos, so that nothing is rounded or overflows in any order
            numbers = np.ones(shape) if dtype in UNSIGNED else draw.random.choice([1, -1], shape)
            numbers.flat[draw.random.integers(0, numbers.size, 9)] *= 2
            x = draw.tensor(shape, dtype, numbers=numbers.astype(dtype.held))
        return draw.builder.add(Reduce(function, axes, bool(draw.integer(0, 1))), x)

    return draw


def _arg_reduce(function: str) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        shape, dtype = draw.shape(), draw.one_of((*FLOATS, *INTEGERS))
        axis = draw.integer(0, len(shape) - 1)
        numbers = draw.numbers(shape, dtype, most=5)
        if dtype.is_float and draw.integer(0, 2) == 0:
            numbers = np.where(draw.random.random(shape) < 0.1, np.float32(np.nan), numbers)
        x = draw.tensor(shape, dtype, numbers=numbers)
        return draw.builder.add(ArgReduce(function, axis, bool(draw.integer(0, 1))), x)

    return draw


def _cumulate(function: str) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        shape = draw.shape(most=3)
        axis = draw.integer(0, len(shape) - 1)
        dtype = draw.one_of((*FLOATS, DType.INT64, DType.INT32, DType.BOOL))
        most = 1 if function == "cumprod" else 40
        return draw.builder.add(Cumulate(function, axis), draw.tensor(shape, dtype, most=most))

    return draw


def _arg_sort(draw: Draw) -> Value:
    shape, dtype = draw.shape(most=3), draw.one_of(ANY)
    numbers = draw.numbers(shape, dtype, most=5)
    if dtype.is_float:
        odd = draw.random.choice(np.asarray([np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32), shape)
        numbers = np.where(draw.random.random(shape) < 0.2, odd, numbers)
    op = ArgSort(draw.integer(0, len(shape) - 1), bool(draw.integer(0, 1)))
    return draw.builder.add(op, draw.tensor(shape, dtype, numbers=numbers))


TABLE = (
    Row("argsort", ArgSort, _arg_sort),
    *(Row(name, Reduce, _reduce(name)) for name in ("all", "any", "max", "min", "prod")),
    *(Row(name, Reduce, _reduce(name), units=1, noise=2e-3) for name in SUMS),
    *(Row(name, ArgReduce, _arg_reduce(name)) for name in ("argmax", "argmin")),
    *(Row(name, Cumulate, _cumulate(name)) for name in ("cummax", "cummin", "cumprod", "cumsum")),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_fold_is_what_fast_makes_of_it(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_fold_is_what_fast_makes_of_it_in_many_forms(row: Row) -> None:
    sweep(row, 200)


def _integers(*shape: int) -> Given:
    return Given(np.random.default_rng(1).integers(-(2**20), 2**20, shape).astype(np.int32), DType.INT32)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_sums_of_integers_are_exact_beyond_what_float32_holds(axes: tuple[int, ...]) -> None:
    require_equal(of(Reduce("sum", axes, False), _integers(300, 7)), cores=("v2",))


@pytest.mark.parametrize(
    ("shape", "axes"), [((9000,), (0,)), ((3, 9001), (1,)), ((2, 300, 40), (1,)), ((128, 2), (0,))]
)
@pytest.mark.parametrize("function", ["sum", "max", "min"])
def test_long_axes_are_folded_in_pieces(shape: tuple[int, ...], axes: tuple[int, ...], function: str) -> None:
    numbers = np.random.default_rng(2).integers(-50, 50, shape).astype(np.float32)
    require_equal(of(Reduce(function, axes, False), Given(numbers, DType.FLOAT32)), cores=("v2",))


def test_a_place_is_found_in_any_piece_of_a_long_axis() -> None:
    numbers = np.random.default_rng(2).integers(-50, 50, (3, 9001)).astype(np.float32)
    numbers[1, 8000] = numbers[1, 8500] = 99
    numbers[2, 5000] = np.nan
    require_equal(of(ArgReduce("argmax", 1, False), Given(numbers, DType.FLOAT32)), cores=("v2",))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_running_sums_go_on_from_piece_to_piece(dtype: DType) -> None:
    numbers = np.random.default_rng(2).integers(-5, 6, (2, 4500)).astype(dtype.held)
    require_equal(of(Cumulate("cumsum", 1), Given(numbers, dtype)), cores=("v2",))


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("function", ["sum", "prod", "mean", "all", "any"])
def test_a_fold_of_nothing_is_its_neutral_element(function: str) -> None:
    require_equal(of(Reduce(function, (1,), False), Given(np.zeros((3, 0, 2), np.float32), DType.FLOAT32)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("descending", [False, True])
def test_rows_longer_than_a_partition_are_sorted_through_hbm(descending: bool) -> None:
    numbers = np.random.default_rng(4).integers(-900, 900, (2, 4500)).astype(np.float32)
    require_equal(of(ArgSort(1, descending), Given(numbers, DType.FLOAT32)), cores=("v2",), orders=("hostile",))
