"""Rounding is exactly that of the narrow types; the error function is accurate."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from emulator.numerics import Array, erf, round_to, settle
from emulator.types import DType

# Every bit pattern, so that NaN payloads, infinities, denormals and ties all come up.
bit_patterns = arrays.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1))
NARROW = [(DType.BFLOAT16, ml_dtypes.bfloat16), (DType.FLOAT16, np.float16)]


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


@given(bits=bit_patterns)
def test_bfloat16_rounding_agrees_with_pytorch(bits: Array) -> None:
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert _same(round_to(values, DType.BFLOAT16), expected)


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


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_float])
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


def test_erf_is_within_a_few_units_in_the_last_place_of_the_true_value() -> None:
    values = np.linspace(-6, 6, 240_001).astype(np.float32)
    expected = np.array([math.erf(value) for value in values.tolist()])
    found = erf(values).astype(np.float64)
    assert np.abs(found - expected).max() < 5e-7
    assert np.abs(found).max() <= 1
    near_zero = np.abs(expected) > 0
    assert np.abs(found[near_zero] / expected[near_zero] - 1).max() < 5e-7


def test_erf_of_the_extremes() -> None:
    found = erf(np.array([math.inf, -math.inf, math.nan, 0.0, -0.0], np.float32))
    assert found[:2].tolist() == [1, -1]
    assert math.isnan(found[2])
    assert math.copysign(1, found[3]) == 1
    assert math.copysign(1, found[4]) == -1
