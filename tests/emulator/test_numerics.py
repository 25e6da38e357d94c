"""Rounding is exactly that of the narrow types; the error function is accurate."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nxpipe.emulator import numerics
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import (
    Array,
    Draws,
    atanh_erf,
    erf,
    largest_finite,
    round_to,
    settle,
    stochastic_rounding,
    to_integer,
)

# Every bit pattern, so that NaN payloads, infinities, denormals and ties all come up.
bit_patterns = arrays.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1))
NARROW = [
    (DType.BFLOAT16, ml_dtypes.bfloat16),
    (DType.FLOAT16, np.float16),
    (DType.FLOAT8_E5M2, ml_dtypes.float8_e5m2),
    (DType.FLOAT8_E4M3FN, ml_dtypes.float8_e4m3fn),
]
IN_PYTORCH = [
    (DType.BFLOAT16, torch.bfloat16),
    (DType.FLOAT16, torch.float16),
    (DType.FLOAT8_E5M2, torch.float8_e5m2),
    (DType.FLOAT8_E4M3FN, torch.float8_e4m3fn),
]
FLOATS = [dtype for dtype in DType if dtype.is_float]


def _same(found: Array, expected: Array) -> bool:
    """Equal bit for bit, except that every NaN is as good as another."""
    numbers = ~np.isnan(expected)
    return bool(
        np.array_equal(np.isnan(found), np.isnan(expected))
        and np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    )


@pytest.mark.parametrize(("dtype", "oracle"), NARROW)
@given(bits=bit_patterns)
def test_rounding_agrees_with_an_independent_implementation_on_every_bit_pattern(
    dtype: DType, oracle: type, bits: Array
) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(oracle).astype(np.float32)
    assert _same(round_to(values, dtype), expected)


@pytest.mark.parametrize(("dtype", "oracle"), IN_PYTORCH)
@given(bits=bit_patterns)
def test_rounding_agrees_with_pytorch(dtype: DType, oracle: torch.dtype, bits: Array) -> None:
    values = bits.view(np.float32)
    if dtype is DType.FLOAT8_E4M3FN:  # beyond its range PyTorch has changed its mind from release to release
        values = np.clip(values, -464, 464)
    expected = torch.from_numpy(values).to(oracle).to(torch.float32).numpy()
    assert _same(round_to(values, dtype), expected)


@given(bits=bit_patterns)
def test_the_accelerators_own_float8_ends_at_240_and_beyond_it_is_not_a_number(bits: Array) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.float8_e4m3).astype(np.float32)
        expected[~(np.abs(values) <= 240)] = np.nan
    assert _same(round_to(values, DType.FLOAT8_E4M3), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_number_is_that_of_the_type(dtype: DType) -> None:
    largest = np.float32(largest_finite(dtype))
    assert round_to(np.array([largest]), dtype)[0] == largest
    if dtype is not DType.TFLOAT32:
        assert float(ml_dtypes.finfo(dtype.stored).max) == largest  # type: ignore[no-untyped-call]


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tfloat32_is_the_nearest_number_with_ten_bits_of_mantissa_and_ties_go_to_even(value: float) -> None:
    rounded = float(round_to(np.array([value], np.float32), DType.TFLOAT32)[0])
    if abs(value) < 2.0**-126 or math.isinf(rounded):
        return  # below the normal range the spacing is constant; above it the nearest number is infinite
    spacing = 2.0 ** (math.frexp(value)[1] - 1 - 10)
    quotient = value / spacing  # exact: a power of two
    assert rounded == spacing * round(quotient)  # Python rounds ties to even


@given(bits=bit_patterns)
def test_tfloat32_keeps_nan_and_infinity(bits: Array) -> None:
    values = bits.view(np.float32)
    rounded = round_to(values, DType.TFLOAT32)
    assert np.array_equal(np.isnan(rounded), np.isnan(values))
    assert np.array_equal(rounded[np.isinf(values)], values[np.isinf(values)])


@pytest.mark.parametrize("dtype", FLOATS)
@given(bits=bit_patterns)
def test_rounding_twice_changes_nothing(dtype: DType, bits: Array) -> None:
    once = round_to(bits.view(np.float32), dtype)
    assert _same(round_to(once, dtype), once)


def test_large_arrays_round_like_their_elements() -> None:
    values = np.random.default_rng(0).standard_normal(200_001).astype(np.float32)
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(round_to(values, DType.BFLOAT16), expected)
    assert np.array_equal(round_to(values[::-1], DType.BFLOAT16), expected[::-1])
    assert np.array_equal(round_to(values[:200_000].reshape(400, 500).T, DType.BFLOAT16).T.ravel(), expected[:200_000])


def test_rounding_leaves_its_argument_alone() -> None:
    values = np.array([1.00390625, np.nan, 3.0], np.float32)
    before = values.tobytes()
    for dtype in DType:
        if dtype.is_float:
            round_to(values, dtype)
    assert values.tobytes() == before


def test_overflow_to_float16_is_infinity() -> None:
    rounded = round_to(np.array([65504, 65519.996, 65520, -1e30], np.float32), DType.FLOAT16)
    assert rounded.tolist() == [65504, 65504, math.inf, -math.inf]


def test_settling_an_integer_result_casts_it() -> None:
    settled = settle(np.array([1, 2], np.int64), DType.INT32)
    assert settled.dtype == np.int32


@given(value=st.floats(width=32), dtype=st.sampled_from([dtype for dtype in DType if dtype.is_integer]))
def test_a_float_becomes_the_nearest_integer_and_saturates(value: float, dtype: DType) -> None:
    limits = np.iinfo(dtype.value)
    found = int(settle(np.array([value], np.float32), dtype)[0])
    if math.isnan(value):
        assert found == 0
    elif math.isinf(value):
        assert found == (limits.max if value > 0 else limits.min)
    else:
        assert found == min(max(round(value), limits.min), limits.max)  # Python rounds ties to even


def test_saturation_reaches_the_last_integer_of_64_bits() -> None:
    assert to_integer(np.array([1e30, -1e30, 2.0**63], np.float32), DType.INT64).tolist() == [
        *(2**63 - 1, -(2**63)),
        2**63 - 1,
    ]


# Stochastic rounding. A draw between neighbours `low` and `low + step` goes up with probability p = (x - low) / step,
# so of n draws the number that go up is binomial. Bounds are at 5 standard deviations: a false alarm happens once in
# 1.7 million runs for one case, and seeds are fixed, so that a test that passes once passes always.
_DRAWS = 1_000_000


def _drawn(value: float, dtype: DType, seed: int, count: int = _DRAWS) -> Array:
    with stochastic_rounding(Draws(seed)):
        return round_to(np.full(count, value, np.float32), dtype)


@pytest.mark.parametrize(
    ("dtype", "low", "step"),
    [
        (DType.BFLOAT16, 1.0, 2.0**-7),
        (DType.BFLOAT16, -3.0, -(2.0**-6)),
        (DType.TFLOAT32, 1.0, 2.0**-10),
        (DType.FLOAT16, 1.0, 2.0**-10),
        (DType.FLOAT16, 2.0**-20, 2.0**-24),  # below the normal range
        (DType.FLOAT8_E5M2, 40.0, 8.0),
        (DType.FLOAT8_E4M3, 2.0**-8, 2.0**-9),  # below the normal range
        (DType.FLOAT8_E4M3FN, -18.0, -2.0),
    ],
)
@pytest.mark.parametrize("share", [0.5, 0.125, 0.9])
def test_stochastic_rounding_is_unbiased(dtype: DType, low: float, step: float, share: float) -> None:
    value = float(np.float32(low + share * step))
    chance = (value - low) / step
    drawn = _drawn(value, dtype, seed=1)
    assert set(np.unique(drawn).tolist()) == {low, low + step}
    up = int((drawn == np.float32(low + step)).sum())
    assert abs(up - _DRAWS * chance) < 5 * math.sqrt(_DRAWS * chance * (1 - chance))


def test_the_mean_of_a_million_different_numbers_survives_stochastic_rounding() -> None:
    values = np.random.default_rng(0).standard_normal(_DRAWS).astype(np.float32)
    with stochastic_rounding(Draws(0)):
        rounded = round_to(values, DType.BFLOAT16)
    error = rounded.astype(np.float64) - values
    assert abs(error.mean()) < 5 * error.std() / 1000
    assert np.abs(error).max() < 2.0**-7 * np.abs(values).max()


def test_stochastic_rounding_is_reproduced_by_its_seed_alone() -> None:
    values = np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32)

    def drawn(seed: int) -> list[bytes]:
        with stochastic_rounding(Draws(seed)):
            return [round_to(values, DType.BFLOAT16).tobytes() for _ in range(2)]

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert first == again
    assert first[0] != first[1]  # the next rounding draws anew
    assert first != other


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
def test_stochastic_rounding_does_not_depend_on_pieces_or_on_the_layout_in_memory(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).standard_normal((203, 707)).astype(np.float32)

    def drawn(array: Array) -> Array:
        with stochastic_rounding(Draws(5)):
            return round_to(array, dtype)

    whole = drawn(values)
    assert np.array_equal(drawn(np.asfortranarray(values)), whole)
    monkeypatch.setattr(numerics, "_PIECE", 1 << 9)
    assert np.array_equal(drawn(values), whole)


def test_what_a_type_can_represent_is_never_moved_by_chance() -> None:
    values = round_to(np.random.default_rng(0).standard_normal(100_000), DType.FLOAT8_E4M3)
    with stochastic_rounding(Draws(0)):
        assert np.array_equal(round_to(values, DType.FLOAT8_E4M3), values)
        extremes = round_to(np.array([math.inf, -math.inf, math.nan], np.float32), DType.BFLOAT16)
    assert extremes[:2].tolist() == [math.inf, -math.inf]
    assert math.isnan(extremes[2])


def test_the_documented_check_of_stochastic_rounding_holds() -> None:
    """1024 + 2048 times 0.5 in float16: to nearest, every sum falls back to 1024; by chance, the total is near 2048."""

    def total() -> float:
        sums = np.array([1024], np.float32)
        for _ in range(2048):
            sums = round_to(sums + np.float32(0.5), DType.FLOAT16)
        return float(sums[0])

    assert total() == 1024
    with stochastic_rounding(Draws(0)):
        assert abs(total() - 2048) < 5 * math.sqrt(2048 / 4)


def test_outside_of_its_block_rounding_is_to_nearest_again() -> None:
    with pytest.raises(ZeroDivisionError), stochastic_rounding(Draws(0)):
        1 / 0  # noqa: B018
    assert set(round_to(np.full(1000, 1.001, np.float32), DType.BFLOAT16).tolist()) == {1.0}


def test_erf_is_within_a_few_units_in_the_last_place_of_the_true_value() -> None:
    values = np.linspace(-6, 6, 240_001).astype(np.float32)
    expected = np.array([math.erf(value) for value in values.tolist()])
    found = erf(values).astype(np.float64)
    assert np.abs(found - expected).max() < 5e-7
    assert np.abs(found).max() <= 1
    near_zero = np.abs(expected) > 0
    assert np.abs(found[near_zero] / expected[near_zero] - 1).max() < 5e-7


def test_the_tail_of_a_distribution_does_not_cancel() -> None:
    values = np.linspace(-4, 0, 10_001).astype(np.float32)
    expected = np.array([math.erfc(-value) / 2 for value in values.tolist()])
    found = 1 / (1 + np.exp(-2 * atanh_erf(values)))  # 1 + erf(x), written out, is wrong by three times
    assert np.abs(found / expected - 1).max() < 0.25


def test_erf_of_the_extremes() -> None:
    found = erf(np.array([math.inf, -math.inf, math.nan, 0.0, -0.0], np.float32))
    assert found[:2].tolist() == [1, -1]
    assert math.isnan(found[2])
    assert math.copysign(1, found[3]) == 1
    assert math.copysign(1, found[4]) == -1
