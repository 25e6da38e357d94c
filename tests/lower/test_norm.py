"""Norms and softmax. The machine has no division: a mean is a product with 1/n, a quotient one with a reciprocal, each
of which may differ from a division by a unit of float32's last place; the bounds below are that, carried on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.numerics import round_to
from nxpipe.emulator.ops import Binary, Cast, LayerNorm, Linear, RmsNorm, Softmax, Unary
from tests.lower.harness import Case, Given, case, floats, of, require_equal
from tests.lower.sweep import FLOATS, Draw, Row, sweep
from tests.tiers import examples


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
    for op, tensors in (
        (LayerNorm(1, 1e-5), (x, weight, bias)),
        (RmsNorm(1, 1e-5), (x, weight)),
        (Softmax(1, False), (x,)),
    ):
        require_equal(of(op, *tensors), units=1, noise=1e-5, cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize(("shape", "axis"), [((5, 0), 1), ((5, 0), 0), ((0, 5), 1), ((0, 5), 0)])
def test_rows_of_nothing_are_nothing(shape: tuple[int, int], axis: int) -> None:
    require_equal(of(Softmax(axis, False), floats(*shape)))


def _norm_of_few_rows(rows: int, chunks: int, dtype: DType, form: str, casts: bool) -> Case:
    """A norm between layers of a decoder. The matmul after it has the identity as its weight, so that its result is the
    norm's."""
    width = 128 * chunks
    affine = {"rms": 0, "rms with scale": 1, "centred": 0, "centred with scale": 1, "centred with both": 2}[form]
    op = RmsNorm(1, 1e-5) if form.startswith("rms") else LayerNorm(1, 1e-5)

    def build(builder: GraphBuilder, x: Value, scale: Value, identity: Value, *own: Value) -> Value:
        own = tuple(builder.add(Cast(DType.FLOAT32), value) for value in own) if casts else own
        normal = builder.add(op, builder.add(Cast(DType.FLOAT32), x) if casts else x, *own)
        normal = builder.add(Cast(dtype), normal) if casts else normal
        return builder.add(Linear(dtype), builder.add(Binary("multiply"), scale, normal), identity)

    identity = Given(np.eye(width, dtype=np.float32), dtype, Role.PARAMETER)
    drawn = (floats(width, dtype=dtype, seed=seed, role=Role.PARAMETER) for seed in range(1, 2 + affine))
    vectors = [replace(vector, data=round_to(vector.data, dtype)) for vector in drawn]
    return case(build, floats(rows, width, dtype=dtype), vectors[0], identity, *vectors[1:])


@settings(max_examples=examples(24))
@given(
    st.integers(1, 128),
    st.integers(1, 3),
    st.sampled_from((DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)),
    st.sampled_from(("rms", "rms with scale", "centred", "centred with scale", "centred with both")),
    st.booleans(),
)
def test_few_rows_are_spread_over_all_lanes(rows: int, chunks: int, dtype: DType, form: str, casts: bool) -> None:
    """A unit in the last place of the norm may be more after the product with the scale."""
    require_equal(_norm_of_few_rows(rows, chunks, dtype, form, casts), units=4, noise=1e-4, orders=("hostile",))


@pytest.mark.parametrize("rows", [1, 8])
def test_no_instruction_passes_over_a_whole_row_of_few(rows: int) -> None:
    program = lower(_norm_of_few_rows(rows, 8, DType.BFLOAT16, "rms", True).graph, "v2")
    passes = [step for step in instructions(program.body) if step.engine in (Engine.VECTOR, Engine.SCALAR)]
    tiles = [place for step in passes for place in step.places.values() if isinstance(place, Tile)]
    wide = {tile.elements for tile in tiles if tile.partitions < 128 and tile.elements > 128}
    assert wide <= {512}  # sums of the matmul


@pytest.mark.parametrize("core", ["v2", "v3"])
def test_an_infinite_number_that_all_rows_share_stays_in_its_column(core: str) -> None:
    def build(builder: GraphBuilder, x: Value, limits: Value, weight: Value) -> Value:
        normal = builder.add(Binary("minimum"), builder.add(RmsNorm(1, 1e-5), x), limits)
        return builder.add(Linear(DType.FLOAT32), builder.add(Unary("exp"), normal), weight)

    limits = np.where(np.arange(256) % 3 == 0, -np.inf, np.inf).astype(np.float32)
    given = (floats(5, 256), Given(limits, DType.FLOAT32, Role.PARAMETER), floats(64, 256, seed=1, role=Role.PARAMETER))
    require_equal(case(build, *given), units=2, noise=1e-4, cores=(core,))
