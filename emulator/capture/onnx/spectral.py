"""Fourier transforms: products with a constant table of sines and cosines."""

import math

import numpy as np

from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, imports
from nxpipe.emulator.capture.room import require_room
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Concat, Flip, Gather, MatMul, Pad, Transpose


@imports("DFT")
def fourier(site: OnnxSite, x: Value, length: Value | None = None, along: Value | None = None) -> Value:
    """Complex numbers are pairs on the last axis; a real signal has one number there."""
    rank, opset_axis = x.type.rank, site.attribute("axis", 1)
    axis = axis_in(opset_axis if along is None and site.opset < 20 else _given(site, along, -2), rank)
    inverse, onesided = bool(site.attribute("inverse", 0)), bool(site.attribute("onesided", 0))
    if inverse and onesided:
        return _real_inverse(site, x, axis, length)
    count = x.type.shape[axis] if length is None else site.numbers("length", length)[0]
    return _transformed(site, x, axis, count, inverse, onesided)


def _given(site: OnnxSite, operand: Value | None, default: int) -> int:
    return default if operand is None else int(site.numbers("axis", operand)[0])


def _fitted(site: OnnxSite, x: Value, axis: int, count: int) -> Value:
    """The signal cut, or filled up with zeros, to the length of the transform."""
    size = x.type.shape[axis]
    if size >= count:
        return site.slice(x, axis, 0, count)
    after = tuple(count - size if i == axis else 0 for i in range(x.type.rank))
    return site.emit(Pad((0,) * x.type.rank, after), x, site.like(x, 0))


def _table(old: int, new: int, inverse: bool, pair: int) -> Array:
    """[old * pair, new * 2]: what each old number adds to each new one, real and imaginary parts interleaved."""
    require_room((old, pair, new, 2))
    angle = (2 if inverse else -2) * math.pi * (np.arange(old)[:, None] * np.arange(new)[None, :] % old) / old
    turn = np.stack([np.cos(angle), np.sin(angle)], -1)  # [old, new, 2]
    rows = turn[:, None] if pair == 1 else np.stack([turn, np.stack([-np.sin(angle), np.cos(angle)], -1)], 1)
    return np.asarray(rows.reshape(old * pair, new * 2) / (old if inverse else 1))


def _transformed(site: OnnxSite, x: Value, axis: int, count: int, inverse: bool, onesided: bool) -> Value:
    signal = _fitted(site, x, axis, count)
    pair, made = x.type.shape[-1], count // 2 + 1 if onesided else count
    others = [i for i in range(x.type.rank - 1) if i != axis]
    turned = site.emit(Transpose((*others, axis, x.type.rank - 1)), signal)
    front = [x.type.shape[i] for i in others]
    rows = site.reshape(turned, (math.prod(front), count * pair))
    table = site.builder.constant(_table(count, made, inverse, pair), x.type.dtype)
    product = site.reshape(site.emit(MatMul(x.type.dtype), rows, table), (*front, made, 2))
    back = [*range(axis), len(others), *range(axis, len(others)), len(others) + 1]
    return site.emit(Transpose(tuple(back)), product)


def _real_inverse(site: OnnxSite, x: Value, axis: int, length: Value | None) -> Value:
    """Half a spectrum stands for a whole one that mirrors it with the other sign; the result is real."""
    half = x.type.shape[axis]
    count = 2 * (half - 1) if length is None else int(site.numbers("length", length)[0])
    kept = _fitted(site, x, axis, count // 2 + 1)
    mirrored = site.emit(Flip((axis,)), site.slice(kept, axis, 1, count - count // 2))
    sign = site.builder.constant(np.array([1.0, -1.0]), x.type.dtype)
    whole = site.emit(Concat(axis), kept, site.binary("multiply", mirrored, sign))
    result = _transformed(site, whole, axis, count, inverse=True, onesided=False)
    return site.slice(result, result.type.rank - 1, 0, 1)


@imports("STFT")
def short_time_fourier(
    site: OnnxSite, x: Value, step: Value, window: Value | None = None, length: Value | None = None
) -> Value:
    """Frames cut from the signal, weighted by a window, each transformed."""
    if length is None and window is None:
        raise NotExpressible("it has neither a window nor a length of its frames")
    hop = site.numbers("step", step)[0]
    size = window.type.elements if length is None and window is not None else site.numbers("length", length)[0]
    frames = (x.type.shape[1] - size) // hop + 1
    require_room((frames, size))
    places = np.arange(frames)[:, None] * hop + np.arange(size)
    cut = site.emit(Gather(1), x, site.builder.constant(places, DType.INT64))
    cut = cut if cut.type.rank == 4 else site.reshape(cut, (*cut.type.shape, 1))
    if window is not None:
        cut = site.binary("multiply", cut, site.reshape(window, (size, 1)))
    real = cut.type.shape[-1] == 1
    return _transformed(site, cut, 2, size, inverse=False, onesided=bool(site.attribute("onesided", 1)) and real)


@imports("MelWeightMatrix")
def mel_weights(site: OnnxSite, bands: Value, length: Value, rate: Value, low: Value, high: Value) -> Value:
    """Triangles over a spectrum, at equal distances on the mel scale: a constant."""
    from nxpipe.emulator.capture.onnx.elementwise import dtype_of

    count, size, hertz = (int(site.table("size", value).item()) for value in (bands, length, rate))
    edges = [float(site.table("edge", value).item()) for value in (low, high)]
    first, last = (2595 * math.log10(1 + edge / 700) for edge in edges)
    require_room((size // 2 + 1, count))
    site.builder.step(max(count, 0))
    mel = first + np.arange(count + 2) * (last - first) / (count + 2)
    bins = ((size + 1) * 700 * (10 ** (mel / 2595) - 1) // hertz).astype(np.int64)
    if not 0 <= bins.min() <= bins.max() <= size:
        raise NotExpressible("its edges lie outside of the spectrum")
    weights = np.zeros((size // 2 + 1, count), np.float32)
    for band in range(count):
        lower, centre, upper = bins[band : band + 3]
        if lower == centre:
            weights[centre, band] = 1
        else:
            rising = np.arange(lower, centre + 1)
            weights[rising, band] = (rising - lower) / (centre - lower)
        falling = np.arange(centre, upper)
        weights[falling, band] = (upper - falling) / max(upper - centre, 1)
    return site.builder.constant(weights, dtype_of(site.attribute("output_datatype", 1)))
