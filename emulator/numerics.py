"""Arithmetic of the engines, in numpy.

A value of a narrow float type is stored as a float32 array whose elements are exactly representable in that type.
Tensor engine: operands are already rounded to their type and products are summed in float32, so a float32 matrix
product of rounded operands is exact up to summation order. Vector and scalar engines: operands are widened to float32,
computed in float32, and the result is rounded once on output: to nearest even, or stochastically inside
`stochastic_rounding`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nxpipe.emulator.ir.types import DType

# The element type of an array follows the graph, not the program text.
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint32]

# Elements of one piece: its temporaries stay in the second-level cache.
_PIECE = 1 << 16


def pieces(size: int) -> Iterator[slice]:
    """Slices that together cover `size` elements."""
    return (slice(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE))


def map_pieces(function: Callable[[Floats], Array], values: Array) -> Floats:
    """Apply an elementwise function piece by piece, so that its temporaries stay in the cache."""
    source = np.asanyarray(values, np.float32)
    if source.size <= _PIECE:
        return np.asarray(function(np.atleast_1d(source)), np.float32).reshape(source.shape)
    result, flat, out = _alike(source)
    for piece in pieces(flat.size):
        out[piece] = function(flat[piece])
    return result


def _alike(source: Floats) -> tuple[Floats, Floats, Floats]:
    """An empty array with the memory layout of `source`, and flat views of both in memory order."""
    order = sorted(range(source.ndim), key=lambda axis: -abs(source.strides[axis]))
    packed = np.array(source.transpose(order), copy=None, order="C", subok=True)
    empty = np.empty_like(packed)
    return empty.transpose(np.argsort(order)), packed.reshape(-1), empty.reshape(-1)


@dataclass(frozen=True)
class _Format:
    """A narrow float type. Below 2**lowest (subnormal numbers) the distance between neighbours is constant."""

    mantissa: int
    lowest: int = -126  # float32's smallest normal exponent
    largest: float = math.inf  # with float32's exponent range, the carry of the rounding gives infinity
    beyond: float = math.inf
    strict: bool = False  # a number above the largest overflows before rounding

    @property
    def dropped(self) -> int:
        return 23 - self.mantissa


_FORMATS = {
    DType.TFLOAT32: _Format(10),
    DType.BFLOAT16: _Format(7),
    DType.FLOAT16: _Format(10, -14, 65504),
    DType.FLOAT8_E5M2: _Format(2, -14, 57344),
    DType.FLOAT8_E4M3: _Format(3, -6, 240, math.nan, strict=True),  # "larger inputs become NaN", infinities with them
    DType.FLOAT8_E4M3FN: _Format(3, -6, 448, math.nan),
}

_HIGHEST = {dtype: form.largest for dtype, form in _FORMATS.items() if form.largest < math.inf}


def largest_finite(dtype: DType) -> float:
    """The largest finite number of a float type."""
    if dtype in _HIGHEST:
        return _HIGHEST[dtype]
    mantissa = 23 if dtype is DType.FLOAT32 else _FORMATS[dtype].mantissa
    return (2 - 2.0**-mantissa) * 2.0**127


class Draws:
    """Random words for stochastic rounding, by counter (Philox) and not by state.

    The n-th rounding takes its words from stream n of the seed, and element i gets word i, so a result depends neither
    on the size of pieces nor on the memory layout. Work in no fixed order, such as that of concurrent engines, restarts
    the count of roundings at each place.
    """

    def __init__(self, seed: int, run: int = 0) -> None:
        self._seed, self._run = seed, run
        self._place = (0, 0)
        self._roundings = 0

    def go_to(self, place: tuple[int, int]) -> None:
        self._place, self._roundings = place, 0

    def fork(self) -> "Draws":
        """Independent draws, whose roundings do not advance this object's streams."""
        return Draws(self._seed, self.next_stream())

    def next_stream(self) -> int:
        self._roundings += 1
        return self._roundings

    def words(self, stream: int, piece: slice) -> _Words:
        """The words of a piece, which starts at a multiple of eight: one step of Philox's counter gives eight words."""
        bits = np.random.Philox(key=[self._seed, stream], counter=[piece.start // 8, self._run, *self._place])
        count = piece.stop - piece.start
        words: _Words = bits.random_raw(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
        return words


_DRAWS: ContextVar[Draws | None] = ContextVar("stochastic rounding", default=None)


@contextmanager
def rounding_by_place() -> Iterator[Draws | None]:
    """Make draws depend on the place set by the caller, not on the order of execution; yields None without stochastic
    rounding."""
    draws = _DRAWS.get()
    with stochastic_rounding(draws.fork() if draws else None) as own:
        yield own


@contextmanager
def stochastic_rounding(draws: Draws | None) -> Iterator[Draws | None]:
    """Round stochastically, without bias, as the engines can; with None, to nearest even.

    The same seed and the same work give the same bits on every machine.
    """
    token = _DRAWS.set(draws)
    try:
        yield draws
    finally:
        _DRAWS.reset(token)


def settle(values: Array, dtype: DType) -> Array:
    """A computed result as a stored value of `dtype`: cast, then rounded."""
    if dtype.is_float:
        return round_to(values.astype(np.float32, copy=False), dtype)
    if dtype.is_integer and np.issubdtype(values.dtype, np.floating):
        return to_integer(values, dtype)
    return values.astype(dtype.held, copy=False)


def to_integer(values: Array, dtype: DType) -> Array:
    """Floats converted to integers as the engines do: to nearest even, saturating; NaN becomes zero."""
    limits = np.iinfo(dtype.value)
    whole = np.rint(np.nan_to_num(values, posinf=np.inf, neginf=-np.inf)).astype(np.float64)
    # 2**63 - 1 has no float64: the nearest is 2**63, which would overflow in the cast. So values at or beyond a
    # limit are cast as 0 and then set to the limit.
    over, under = whole >= float(limits.max), whole <= float(limits.min)
    result: Array = np.where(over | under, 0, whole).astype(dtype.held)
    result[over], result[under] = limits.max, limits.min
    return result


def round_to(values: Array, dtype: DType) -> Floats:
    """Float32 values rounded to a float type: to nearest even, or stochastically inside `stochastic_rounding`."""
    source = np.asarray(values, np.float32)
    if dtype is DType.FLOAT32:
        return source
    draws = _DRAWS.get()
    # A random word belongs to an element's index, not to its address, so the layout is made canonical first.
    result, flat, rounded = _alike(np.ascontiguousarray(source).reshape(source.shape) if draws else source)
    stream = draws.next_stream() if draws else 0
    for piece in pieces(flat.size):
        random = draws.words(stream, piece) if draws else None
        _round_piece(flat[piece], rounded[piece], _FORMATS[dtype], random)
    return result


def _round_piece(x: Floats, out: Floats, form: _Format, random: _Words | None) -> None:
    _round_mantissa(x.view(np.uint32), out.view(np.uint32), form.dropped, random)
    highest = np.max(np.abs(x)) if form.largest < math.inf else np.max(x)
    if form.largest < math.inf:
        tiny = np.abs(x) < np.float32(2.0**form.lowest)
        if tiny.any():
            out[tiny] = _round_tiny(x[tiny], form, None if random is None else random[tiny])
        if not highest <= form.largest:
            lost = np.abs(x if form.strict else out) > form.largest
            out[lost] = np.copysign(np.float32(form.beyond), x[lost])
    # The carry of a NaN's payload may reach its sign, and cutting the payload may leave an infinity: restore NaN.
    # `highest` is NaN exactly if the piece has a NaN, so a piece without one needs no second pass.
    if np.isnan(highest):
        out[np.isnan(x)] = np.nan


def _round_mantissa(words: _Words, out: _Words, dropped: int, random: _Words | None) -> None:
    """Round the bits of float32 numbers by integer addition: add an increment below the last kept bit, then truncate.

    A float's exponent lies above its mantissa, so the carry of a mantissa that overflows increments the exponent, which
    is the correct result, up to infinity. The increment is just under half a unit of the last kept bit, plus one if
    that bit is odd (to nearest, ties to even), or a random number below one unit (stochastic: P(up) is the fraction).
    """
    if random is None:
        np.right_shift(words, np.uint32(dropped), out=out)
        out &= np.uint32(1)
        out += np.uint32((1 << (dropped - 1)) - 1)
    else:
        np.right_shift(random, np.uint32(32 - dropped), out=out)
    out += words
    out &= np.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)


def _round_tiny(x: Floats, form: _Format, random: _Words | None) -> Floats:
    """Round subnormal numbers of the type: multiples of its smallest number.

    `_round_mantissa` assumes a full mantissa. Subnormals have a constant spacing, so numbers are scaled by a power of
    two to a spacing of 1 and rounded to integers.
    """
    scale = np.float32(2.0 ** (form.mantissa - form.lowest))
    steps = np.abs(x) * scale  # exact: a power of two
    if random is None:
        whole = np.rint(steps)
    else:
        whole = np.floor(steps)
        whole += random < (steps - whole) * 2.0**32
    return np.copysign(whole / scale, x)


# atanh(erf(x)) = x R(x^2), R fitted on |x| <= 4 by iteratively reweighted least squares for the smallest relative error
# of erf (1e-7); evaluated in float32 its largest absolute error is under 3e-7. Beyond, x R(x^2) only grows.
ATANH_ERF = (
    *(1.128379225730896, 0.10276905447244644, -0.00019183123367838562, -0.000619784346781671),
    *(8.763722871663049e-05, -5.668461653840495e-06, 1.418515438444956e-07),
)


def erf(values: Array) -> Floats:
    """The error function in float32; numpy has none."""
    return map_pieces(lambda x: np.tanh(atanh_erf(x)), values)


def atanh_erf(x: Floats) -> Floats:
    """atanh(erf(x)), which gives the tail of a normal distribution as an exponential, without cancellation."""
    result = _polynomial(ATANH_ERF, x * x)
    result *= x
    return result


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Horner's rule, lowest coefficient first."""
    result = x * np.float32(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        result += np.float32(coefficient)
        result *= x
    result += np.float32(coefficients[0])
    return result
