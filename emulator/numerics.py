"""The arithmetic of the engines, in numpy.

A value of a narrow float type is held as a float32 array whose every element is exactly representable in that type.
Tensor engine: operands are already rounded to their type, products are summed in float32, so a float32 matrix product
over rounded operands is its arithmetic up to summation order. Vector and scalar engines: operands widen to float32
for free, the work is done in float32, and the result is rounded once on its way out: to nearest even, or, inside
`stochastic_rounding`, up or down by chance.
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

# Elements worked on at a time, so that the temporaries of one piece stay in the second-level cache.
_PIECE = 1 << 16


def pieces(size: int) -> Iterator[slice]:
    """Slices that together cover `size` elements."""
    return (slice(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE))


def map_pieces(function: Callable[[Floats], Array], values: Array) -> Floats:
    """A function of single elements, piece by piece: a chain of operations then never waits for memory."""
    source = np.asanyarray(values, np.float32)
    if source.size <= _PIECE:
        return np.asarray(function(np.atleast_1d(source)), np.float32).reshape(source.shape)
    result, flat, out = _alike(source)
    for piece in pieces(flat.size):
        out[piece] = function(flat[piece])
    return result


def _alike(source: Floats) -> tuple[Floats, Floats, Floats]:
    """An empty array laid out as `source` is, and the elements of both as they lie in memory, side by side."""
    order = sorted(range(source.ndim), key=lambda axis: -abs(source.strides[axis]))
    packed = np.array(source.transpose(order), copy=None, order="C", subok=True)
    empty = np.empty_like(packed)
    return empty.transpose(np.argsort(order)), packed.reshape(-1), empty.reshape(-1)


@dataclass(frozen=True)
class _Format:
    """What sets a narrow float type apart. Below 2**lowest the distance between neighbours stays the same."""

    mantissa: int
    lowest: int = -126  # float32's own
    largest: float = math.inf  # for float32's exponents, the rounding itself carries into infinity
    beyond: float = math.inf
    strict: bool = False  # whether a number over the largest is lost even when the nearest is the largest

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
    """Random words: the n-th rounding takes its words from stream n of the seed, element i always the same one. Work
    that has no order of its own counts its roundings at each place anew."""

    def __init__(self, seed: int, run: int = 0) -> None:
        self._seed, self._run = seed, run
        self._place = (0, 0)
        self._roundings = 0

    def go_to(self, place: tuple[int, int]) -> None:
        self._place, self._roundings = place, 0

    def apart(self) -> "Draws":
        """For a run whose roundings do not count among those of the others."""
        return Draws(self._seed, self.next_stream())

    def next_stream(self) -> int:
        self._roundings += 1
        return self._roundings

    def words(self, stream: int, piece: slice) -> _Words:
        """Pieces start at multiples of eight elements: one step of the counter makes eight words."""
        bits = np.random.Philox(key=[self._seed, stream], counter=[piece.start // 8, self._run, *self._place])
        count = piece.stop - piece.start
        words: _Words = bits.random_raw(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
        return words


_DRAWS: ContextVar[Draws | None] = ContextVar("stochastic rounding", default=None)


@contextmanager
def stochastic_rounding(seed: int) -> Iterator[None]:
    """Inside, rounding goes up or down with the chances that keep the mean, as the engines do when told to.

    The same seed and the same work give the same bits on every machine.
    """
    with _drawing(Draws(seed)):
        yield


@contextmanager
def rounding_by_place() -> Iterator[Draws | None]:
    """Inside, draws follow the places that the caller goes to, not the order of the work; None where none are made."""
    draws = _DRAWS.get()
    with _drawing(draws.apart() if draws else None) as own:
        yield own


@contextmanager
def _drawing(draws: Draws | None) -> Iterator[Draws | None]:
    token = _DRAWS.set(draws)
    try:
        yield draws
    finally:
        _DRAWS.reset(token)


def settle(values: Array, dtype: DType) -> Array:
    """Bring a computed result into the form in which values of `dtype` are held: cast, then rounded."""
    if dtype.is_float:
        return round_to(values.astype(np.float32, copy=False), dtype)
    if dtype.is_integer and np.issubdtype(values.dtype, np.floating):
        return to_integer(values, dtype)
    return values.astype(dtype.held, copy=False)


def to_integer(values: Array, dtype: DType) -> Array:
    """Floats to integers as the engines do it: to nearest even, saturating; not-a-number becomes zero."""
    limits = np.iinfo(dtype.value)
    whole = np.rint(np.nan_to_num(values, posinf=np.inf, neginf=-np.inf)).astype(np.float64)
    # 2**63 - 1 is no float64, so whatever reaches the limit is set to it afterwards.
    over, under = whole >= float(limits.max), whole <= float(limits.min)
    result: Array = np.where(over | under, 0, whole).astype(dtype.held)
    result[over], result[under] = limits.max, limits.min
    return result


def round_to(values: Array, dtype: DType) -> Floats:
    """Round float32 values to a float type: to nearest even, or stochastically where that is switched on."""
    source = np.asarray(values, np.float32)
    if dtype is DType.FLOAT32:
        return source
    draws = _DRAWS.get()
    # Chance follows an element's position, not where it happens to lie in memory.
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
    # A NaN's payload may carry into its sign or be cut to an infinity; put NaN back, in the rare piece that has one.
    if np.isnan(highest):
        out[np.isnan(x)] = np.nan


def _round_mantissa(words: _Words, out: _Words, dropped: int, random: _Words | None) -> None:
    """Add something below one unit of the last kept bit, then cut; carries do the rest.

    Just under half, plus one when that bit is odd, is to nearest even; a random number is stochastic.
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
    """Round to multiples of the smallest number of the type."""
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
_ATANH_ERF = (
    *(1.128379225730896, 0.10276905447244644, -0.00019183123367838562, -0.000619784346781671),
    *(8.763722871663049e-05, -5.668461653840495e-06, 1.418515438444956e-07),
)


def erf(values: Array) -> Floats:
    """The error function in float32; numpy has none."""
    return map_pieces(lambda x: np.tanh(atanh_erf(x)), values)


def atanh_erf(x: Floats) -> Floats:
    """What erf is the hyperbolic tangent of: a distribution's tail is an exponential of it, without cancellation."""
    result = _polynomial(_ATANH_ERF, x * x)
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
