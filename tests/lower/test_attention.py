"""Attention on the core. Where scores are whole numbers, so are those of `fast`, and all that may differ is a
probability: times the reciprocal of a sum instead of divided by it, so one unit of its last place at most. That makes
2**-7 of the largest value in bfloat16 at the very worst, and hardly ever anything: one unit of the result is allowed,
and for results that nearly cancel a little."""

from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import instructions
from nxpipe.emulator.lower import attention_few_rows, lower
from nxpipe.emulator.lower.attention import AttentionTiling
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Attention, Cast, Transpose
from tests.lower.harness import Case, Given, case, floats, of, require_equal, truths, unit, wholes
from tests.lower.sweep import GENERATIONS, Draw, Row, drawn, sweep
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


@pytest.mark.sample(1)
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


# Keys in pieces, with the keys of a piece in SBUF, or all keys and the scores of a piece.
_PIECES = {
    "keys": lambda keys: AttentionTiling(heads=1, piece=128, buffers=1),
    "scores": lambda keys: AttentionTiling(heads=1, piece=keys, buffers=2, scores=128),
    "banks": lambda keys: AttentionTiling(heads=1, piece=keys, buffers=2, scores=640),
}


def _take_pieces(monkeypatch: pytest.MonkeyPatch, pieces: str) -> None:
    def of(_: Kernel, __: Attention, views: Sequence[View], ___: View | None) -> AttentionTiling:
        return _PIECES[pieces](views[1].shape[1])

    monkeypatch.setattr(AttentionTiling, "of", staticmethod(of))


def _online(probabilities: DType, values: Array) -> float:
    """How far an online softmax may be off: each probability is rounded before it is divided by the sum, not after it,
    which is one unit of its last place at most."""
    return float(unit(np.ones(()), probabilities)) * float(np.abs(values).max(initial=0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("pieces", list(_PIECES))
@pytest.mark.parametrize("probabilities", [BF16, DType.FLOAT32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, truths(1, 300), truths(300, 300), floats(300, 300)])
def test_rows_that_are_too_long_pass_by_in_pieces(
    monkeypatch: pytest.MonkeyPatch, causal: bool, mask: Given | None, probabilities: DType, pieces: str
) -> None:
    _take_pieces(monkeypatch, pieces)
    heads = _heads((2,), 300, 300)
    of_one = of(Attention(0.25, causal, probabilities, BF16), *heads, *([mask] if mask else []))
    noise = NOISE + _online(probabilities, heads[2].data)
    require_equal(of_one, units=1, noise=noise, cores=("v2",), orders=("hostile",))


def _mask_of(draw: Draw, rows: int, keys: int) -> Given:
    """A mask with rows that see nothing, a sliding window, or numbers among them the lowest, or minus infinity."""
    distance = np.arange(rows)[:, None] - np.arange(keys)
    window = np.abs(distance) < draw.one_of([1, 40, 200])
    seen = draw.one_of([window, window & (distance >= 0), draw.random.random((rows, keys)) < 0.5])
    seen = seen & (draw.random.random((rows, 1)) < 0.9)
    if draw.integer(0, 1):
        return Given(seen, DType.BOOL)
    lowest = draw.one_of([float("-inf"), float(np.finfo(np.float32).min)])
    added = draw.random.integers(-3, 4, (rows, keys)).astype(np.float32)
    return Given(np.where(seen, added, np.float32(lowest)), DType.FLOAT32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "reals"])
@pytest.mark.parametrize("pieces", list(_PIECES))
def test_an_online_softmax_is_what_fast_makes_of_it(monkeypatch: pytest.MonkeyPatch, pieces: str, whole: bool) -> None:
    """Any number of rows, before, at and after the last key; every type; masks that hide whole pieces and rows."""
    _take_pieces(monkeypatch, pieces)

    def hold(chance: Random) -> None:
        draw = Draw(chance)
        rows, keys = draw.integer(65, 400), draw.integer(100, 1500 if pieces == "banks" else 400)
        elements, width, dtype = draw.integer(1, 40), draw.integer(1, 40), draw.one_of(TYPES)
        probabilities = draw.one_of([dtype, dtype, DType.FLOAT32, DType.FLOAT8_E4M3])
        shared, group = draw.one_of([(1, 1), (1, 2), (2, 1)])
        shapes = (shared * group, rows, elements), (shared, keys, elements), (shared, keys, width)
        operands = [Given(draw.factors(shape, dtype, whole=whole), dtype) for shape in shapes]
        if draw.integer(0, 2):
            operands.append(_mask_of(draw, rows, keys))
        of_one = of(Attention(0.25, bool(draw.integer(0, 1)), probabilities, dtype), *operands)
        noise = (NOISE if whole else 2.0**-6) + _online(probabilities, operands[2].data)
        require_equal(of_one, units=1, noise=noise, cores=(draw.one_of(GENERATIONS),))

    drawn(examples(12), hold)


def test_a_row_of_thirty_thousand_keys_is_no_problem() -> None:
    for rows in (3, 130):
        heads = _heads((1,), rows, 30011)
        noise = NOISE + _online(BF16, heads[2].data)
        of_one = of(Attention(0.25, False, BF16, BF16), *heads)
        require_equal(of_one, units=1, noise=noise, cores=("v2",), orders=("hostile",))


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
