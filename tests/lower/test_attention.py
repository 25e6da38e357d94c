"""Attention on the core. Where scores are whole numbers, so are those of `fast`, and all that may differ is a
probability: times the reciprocal of a sum instead of divided by it, so one unit of its last place at most. That makes
2**-7 of the largest value in bfloat16 at the very worst, and hardly ever anything: one unit of the result is allowed,
and for results that nearly cancel a little."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import instructions
from nxpipe.emulator.lower import attention_few_rows, lower
from nxpipe.emulator.lower.attention import AttentionTiling
from nxpipe.emulator.ops import Attention, Cast, Transpose
from tests.lower.harness import Case, Given, case, floats, of, require_equal, truths, wholes
from tests.lower.sweep import Draw, Row, sweep
from tests.tiers import examples

BF16 = DType.BFLOAT16
TYPES = (BF16, DType.FLOAT32, DType.FLOAT16)
NOISE = 2.0**-9


def _attention(draw: Draw, *, whole: bool = True) -> Value:
    rows, keys = (draw.one_of([1, draw.integer(2, 9), draw.integer(2, 9), draw.integer(100, 200)]) for _ in "qk")
    elements, width, dtype = draw.integer(1, 40), draw.integer(1, 40), draw.one_of(TYPES)
    shared, group = draw.one_of([(1, 1), (1, 3), (2, 1), (2, 2)])
    batch = draw.one_of([(), (), (2,)])
    shapes = [(*batch, shared * group, rows, elements), (*batch, shared, keys, elements), (*batch, shared, keys, width)]
    operands = [draw.tensor(shape, dtype, numbers=draw.factors(shape, dtype, whole=whole)) for shape in shapes]
    scores = (*batch, shared * group, rows, keys)
    if draw.integer(0, 1):
        mask = tuple(1 if draw.integer(0, 2) == 0 else size for size in scores)
        operands.append(draw.tensor(mask, draw.one_of((DType.BOOL, DType.FLOAT32, BF16)), most=3))
    causal = draw.integer(0, 2) == 0
    return draw.builder.add(Attention(0.25, causal, dtype, dtype), *operands)


def _few_rows(draw: Draw, *, whole: bool = True) -> Value:
    """Decode: few rows, many keys, several batch elements and heads; each axis of the mask is shared, or is not."""
    rows, keys = draw.one_of([1, 1, draw.integer(2, 5)]), draw.one_of([draw.integer(64, 700), 128 * draw.integer(1, 5)])
    elements, width, dtype = draw.integer(1, 40), draw.one_of([draw.integer(1, 40), 130]), draw.one_of(TYPES)
    shared, group, batch = draw.integer(1, 3), draw.integer(1, 3), draw.integer(1, 4)
    shapes = [(batch, shared * group, rows, elements), (batch, shared, keys, elements), (batch, shared, keys, width)]
    operands = [draw.tensor(shape, dtype, numbers=draw.factors(shape, dtype, whole=whole)) for shape in shapes]
    if draw.integer(0, 2):
        mask = tuple(1 if draw.integer(0, 1) else size for size in (batch, shared * group, rows, keys))
        operands.append(draw.tensor(mask, draw.one_of((DType.BOOL, DType.BOOL, DType.FLOAT32, BF16)), most=3))
    probabilities = draw.one_of([dtype, dtype, DType.FLOAT32, BF16])
    return draw.builder.add(Attention(0.25, False, probabilities, dtype), *operands)


TABLE = (
    Row("attention", Attention, _attention, units=1, noise=NOISE),
    Row("attention of reals", Attention, partial(_attention, whole=False), units=1, noise=2.0**-6),
)
FEW_ROWS = (
    Row("attention", Attention, _few_rows, units=1, noise=NOISE),
    Row("attention of reals", Attention, partial(_few_rows, whole=False), units=1, noise=2.0**-6),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_attention_is_what_fast_makes_of_it(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_attention_is_what_fast_makes_of_it_in_many_forms(row: Row) -> None:
    sweep(row, 200)


@pytest.mark.parametrize("load", [512, 8192], ids=["pieces", "whole"])
@pytest.mark.parametrize("row", FEW_ROWS, ids=lambda row: row.name)
def test_attention_of_few_rows_is_what_fast_makes_of_it(monkeypatch: pytest.MonkeyPatch, row: Row, load: int) -> None:
    """`load` bytes of keys a partition are loaded at a time, so that 512 need several pieces of every length."""
    monkeypatch.setattr(attention_few_rows, "_LOAD", load)
    sweep(row, examples(14))


def _heads(heads: Sequence[int], rows: int, keys: int, width: int = 16, dtype: DType = BF16) -> tuple[Given, ...]:
    return (
        wholes(*heads, rows, width, dtype=dtype, most=1),
        wholes(*heads, keys, width, dtype=dtype, seed=1, most=1),
        wholes(*heads, keys, width, dtype=dtype, seed=2),
    )


def _hold(of_one: Case) -> None:
    require_equal(of_one, units=1, noise=NOISE, cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, truths(1, 300), truths(300, 300), floats(300, 300)])
def test_rows_that_are_too_long_pass_by_in_pieces(
    monkeypatch: pytest.MonkeyPatch, causal: bool, mask: Given | None
) -> None:
    monkeypatch.setattr(AttentionTiling, "of", staticmethod(lambda *_: AttentionTiling(heads=1, piece=128, buffers=1)))
    _hold(of(Attention(0.25, causal, BF16, BF16), *_heads((2,), 300, 300), *([mask] if mask else [])))


def test_a_row_of_thirty_thousand_keys_is_no_problem() -> None:
    _hold(of(Attention(0.25, False, BF16, BF16), *_heads((1,), 3, 30011)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_may_look_nowhere_is_zero(causal: bool) -> None:
    seen = np.ones((20, 30), np.bool_)
    seen[3], seen[7, :8] = False, False
    require_equal(of(Attention(0.25, causal, BF16, BF16), *_heads((2,), 20, 30), Given(seen, DType.BOOL)), units=1)
    _hold(of(Attention(0.25, causal, BF16, BF16), *_heads((2,), 20, 30), Given(seen[3:4], DType.BOOL)))


@pytest.mark.parametrize(("rows", "keys", "width"), [(0, 5, 4), (5, 0, 4), (5, 5, 0)])
def test_attention_to_nothing_is_zero(rows: int, keys: int, width: int) -> None:
    given = floats(2, rows, width), floats(2, keys, width, seed=1), floats(2, keys, 3, seed=2)
    require_equal(of(Attention(1.0, False, DType.FLOAT32, DType.FLOAT32), *given), units=4, noise=1e-6)


@pytest.mark.parametrize("width", [200, 600, 1100])
def test_values_may_be_wider_than_a_bank_of_sums(width: int) -> None:
    _hold(of(Attention(0.125, False, BF16, BF16), *_heads((), 20, 150, width)))


@pytest.mark.parametrize("probabilities", [DType.FLOAT32, DType.FLOAT16, DType.FLOAT8_E4M3])
def test_probabilities_have_a_type_of_their_own(probabilities: DType) -> None:
    _hold(of(Attention(0.125, False, probabilities, BF16), *_heads((2,), 20, 150)))
    _hold(of(Attention(0.125, False, probabilities, BF16), *_heads((2,), 20, 150, dtype=DType.FLOAT32)))


def test_a_cast_of_the_result_is_a_type_that_the_kernel_rounds_to() -> None:
    def build(builder: GraphBuilder, *operands: Value) -> Value:
        seen = builder.add(Attention(0.25, False, BF16, DType.FLOAT32), *operands)
        return builder.add(Transpose((0, 2, 1, 3)), builder.add(Cast(BF16), seen))

    for rows in (3, 140):
        of_one = case(build, *_heads((2, 3), rows, 150))
        _hold(of_one)
        assert [buffer for buffer in lower(of_one.graph, "v2").buffers if buffer.role == "scratch"] == []


def test_scores_are_never_in_hbm_and_heads_are_stored_beside_each_other() -> None:
    def build(builder: GraphBuilder, *operands: Value) -> Value:
        return builder.add(Transpose((0, 2, 1, 3)), builder.add(Attention(0.25, False, BF16, BF16), *operands))

    of_one = case(build, *_heads((2, 3), 140, 150))
    _hold(of_one)
    program = lower(of_one.graph, "v2")
    assert [buffer.shape for buffer in program.buffers if buffer.role == "scratch"] == []
    stored = [
        place for instruction in instructions(program.body) for place in instruction.written() if isinstance(place, Far)
    ]
    assert {place.axes[-2].stride for place in stored} == {16}
