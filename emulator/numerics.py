"""The arithmetic of the engines, in numpy.

A value of a narrow float type is held as a float32 array whose every element is exactly representable in that type.
Tensor engine: operands are already rounded to their type, products are summed in float32, so a float32 matrix product
over rounded operands is its arithmetic up to summation order. Vector and scalar engines: operands widen to float32
for free, the work is done in float32, and the result is rounded once, to nearest even, on its way out.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from emulator.types import DType

# The element type of an array follows the graph, not the program text.
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# Elements worked on at a time, so that the temporaries of one piece stay in the second-level cache.
_PIECE = 1 << 15

# float32 keeps 23 bits of mantissa; bfloat16 keeps 7 of them and tfloat32 keeps 10. The exponent is the same.
_DROPPED_BITS = {DType.BFLOAT16: 16, DType.TFLOAT32: 13}


def settle(values: Array, dtype: DType) -> Array:
    """Bring a computed result into the form in which values of `dtype` are held: cast, then rounded."""
    if not dtype.is_float:
        return values.astype(dtype.held, copy=False)
    return round_to(values.astype(np.float32, copy=False), dtype)


def round_to(values: Array, dtype: DType) -> Floats:
    """Round float32 values to the nearest value of a float type, ties to even, overflow to infinity."""
    floats = values.astype(np.float32, copy=False)
    if dtype is DType.FLOAT32:
        return floats
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):
            return floats.astype(np.float16).astype(np.float32)
    return _drop_mantissa_bits(floats, _DROPPED_BITS[dtype])


def _drop_mantissa_bits(values: Floats, bits: int) -> Floats:
    """Round by adding just under half of the last kept bit, plus one when that bit is odd; carries do the rest."""
    source = np.ascontiguousarray(values)
    result = np.empty_like(source)
    words, rounded = source.reshape(-1).view(np.uint32), result.reshape(-1).view(np.uint32)
    below_half, keep = np.uint32((1 << (bits - 1)) - 1), np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)
    for start in range(0, words.size, _PIECE):
        word, out = words[start : start + _PIECE], rounded[start : start + _PIECE]
        np.right_shift(word, np.uint32(bits), out=out)
        out &= np.uint32(1)
        out += below_half
        out += word
        out &= keep
    # A NaN's payload may carry into its sign or be cut to an infinity; put NaN back, in the rare array that has one.
    if source.size and np.isnan(np.max(source)):
        result[np.isnan(source)] = np.nan
    return result.reshape(values.shape)


# erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.85, beyond which erf rounds to one. Fitted by iteratively reweighted least
# squares for the smallest relative error (1.4e-8); evaluated in float32 the largest absolute error is under 5e-7.
_ERF_LIMIT = np.float32(3.85)
_ERF_P = (
    *(1.1283791065216064, 0.18789160251617432, 0.052478790283203125),
    *(0.003673641476780176, 0.000285663700196892, 2.1082651073811576e-06),
)
_ERF_Q = (
    *(1.0, 0.4998474717140198, 0.11312634497880936),
    *(0.014784314669668674, 0.0011454224586486816, 3.8731188396923244e-05),
)


def erf(values: Array) -> Floats:
    """The error function in float32; numpy has none."""
    source = np.ascontiguousarray(values, dtype=np.float32)
    result = np.empty_like(source)
    flat_source, flat_result = source.reshape(-1), result.reshape(-1)
    for start in range(0, source.size, _PIECE):
        piece = slice(start, start + _PIECE)
        x, out = np.clip(flat_source[piece], -_ERF_LIMIT, _ERF_LIMIT), flat_result[piece]
        square = x * x
        np.multiply(x, _polynomial(_ERF_P, square), out=out)
        out /= _polynomial(_ERF_Q, square)
        # Exactly one from there on: gelu multiplies what is missing to one by its argument, however large.
        np.copyto(out, np.sign(x), where=np.abs(x) == _ERF_LIMIT)
        np.clip(out, -1, 1, out=out)
    return result.reshape(np.shape(values))


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Horner's rule, lowest coefficient first."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += np.float32(coefficient)
    return result
