"""Norms and softmax. The machine has no division: a mean is a product with 1/n, a quotient one with a reciprocal, each
of which may differ from a division by a unit of float32's last place; the bounds below are that, carried on."""

import pytest

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.ops import LayerNorm, RmsNorm, Softmax
from tests.lower.harness import floats, of, require_equal
from tests.lower.sweep import FLOATS, Draw, Row, sweep


def _norm(op: type[LayerNorm | RmsNorm], most: int) -> Row:
    def draw(draw: Draw) -> Value:
        shape, dtype = draw.shape(), draw.one_of(FLOATS)
        axes = draw.integer(1, len(shape))
        affine = [draw.tensor(shape[len(shape) - axes :], dtype, most=2) for _ in range(draw.integer(0, most))]
        return draw.builder.add(op(axes, 1e-5), draw.tensor(shape, dtype), *affine)

    return Row(op.name, op, draw, units=1, noise=1e-4)


def _softmax(*, log: bool) -> Row:
    def draw(draw: Draw) -> Value:
        shape = draw.shape()
        x = draw.tensor(shape, draw.one_of(FLOATS))
        return draw.builder.add(Softmax(draw.integer(0, len(shape) - 1), log), x)

    return Row("log_softmax" if log else "softmax", Softmax, draw, units=1, noise=1e-5 if log else 1e-6)


TABLE = (_norm(LayerNorm, 2), _norm(RmsNorm, 1), _softmax(log=False), _softmax(log=True))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_rows_are_what_fast_makes_of_them(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_rows_are_what_fast_makes_of_them_in_many_forms(row: Row) -> None:
    sweep(row, 200)


@pytest.mark.parametrize("width", [1, 4096, 8192, 20000, 40001])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_no_row_is_too_wide(dtype: DType, width: int) -> None:
    weight, bias = (floats(width, dtype=dtype, seed=seed, role=Role.PARAMETER) for seed in (1, 2))
    x = floats(5, width, dtype=dtype)
    for op, given in (
        (LayerNorm(1, 1e-5), (x, weight, bias)),
        (RmsNorm(1, 1e-5), (x, weight)),
        (Softmax(1, False), (x,)),
    ):
        require_equal(of(op, *given), units=1, noise=1e-5, cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize(("shape", "axis"), [((5, 0), 1), ((5, 0), 0), ((0, 5), 1), ((0, 5), 0)])
def test_rows_of_nothing_are_nothing(shape: tuple[int, int], axis: int) -> None:
    require_equal(of(Softmax(axis, False), floats(*shape)))
