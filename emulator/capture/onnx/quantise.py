"""Numbers as small integers with a scale, and back; products of such integers."""

import math
from collections.abc import Callable

import numpy as np

from nxpipe.emulator.capture.onnx.base import OnnxSite, imports
from nxpipe.emulator.capture.onnx.window import geometry_of
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import largest_finite
from nxpipe.emulator.ops import Convolution, MatMul

# So many products of two numbers of nine bits add up to less than 2**24, up to where float32 counts exactly.
_EXACT = 256


def _per_axis(site: OnnxSite, x: Value, parameter: Value) -> Value:
    """A scale or a zero point of each slice along an axis, of each block of it, or of all."""
    if parameter.type.elements == 1:
        return site.reshape(parameter, ())
    axis = site.axis(x, 1)
    if parameter.type.rank == 1:
        return site.reshape(parameter, (parameter.type.shape[0], *[1] * (x.type.rank - axis - 1)))
    blocks, block = parameter.type.shape[axis], site.attribute("block_size", 0)
    before, after = parameter.type.shape[:axis], parameter.type.shape[axis + 1 :]
    apart = site.reshape(parameter, (*before, blocks, 1, *after))
    whole = site.reshape(site.broadcast(apart, (*before, blocks, block, *after)), (*before, blocks * block, *after))
    return site.slice(whole, axis, 0, x.type.shape[axis])


@imports("DequantizeLinear")
def dequantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    wide = site.cast(x, DType.FLOAT32)
    if zero is not None:
        wide = site.binary("subtract", wide, site.cast(_per_axis(site, x, zero), DType.FLOAT32))
    return site.cast(site.binary("multiply", wide, _per_axis(site, x, scale)), scale.type.dtype)


@imports("QuantizeLinear")
def quantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    from nxpipe.emulator.capture.onnx.elementwise import dtype_of

    wanted = site.attribute("output_dtype", 0)
    dtype = zero.type.dtype if zero is not None else dtype_of(wanted) if wanted else DType.UINT8
    share = site.binary("divide", site.floats(x), _per_axis(site, x, scale))
    return _as_small(site, share, None if zero is None else _per_axis(site, x, zero), dtype)


def _as_small(site: OnnxSite, x: Value, zero: Value | None, dtype: DType) -> Value:
    """Rounded, moved and cut to what the type holds; small floats round by themselves."""
    if dtype.is_float:
        lowest, highest = -largest_finite(dtype), largest_finite(dtype)
    else:
        x = site.unary("round", x)
        limits = np.iinfo(dtype.value)
        lowest, highest = float(limits.min), float(limits.max)
    if zero is not None:
        x = site.binary("add", x, site.cast(zero, DType.FLOAT32))
    return site.cast(site.binary("minimum", site.binary("maximum", x, lowest), highest), dtype)


def _moved(site: OnnxSite, x: Value, zero: Value | None, *, columns: bool = False, trailing: int = 0) -> Value:
    """Counted from the zero point, as floats, which hold such numbers exactly."""
    if x.type.dtype.itemsize > 1:
        raise NotExpressible("it multiplies integers of more than eight bits; use int8 or uint8")
    wide = site.cast(x, DType.FLOAT32)
    if zero is None:
        return wide
    return site.binary("subtract", wide, site.cast(_aligned(site, zero, columns, trailing), DType.FLOAT32))


def _aligned(site: OnnxSite, parameter: Value, columns: bool = False, trailing: int = 0) -> Value:
    """One number for all, for each row, for each column, or for each channel before `trailing` axes."""
    if parameter.type.elements == 1:
        return site.reshape(parameter, ())
    if parameter.type.rank > 1 or columns:
        return parameter
    return site.reshape(parameter, (parameter.type.elements, *[1] * (trailing or 1)))


def _added_up(site: OnnxSite, inner: int, step: int, part: Callable[[int, int], Value]) -> Value:
    """Sums that float32 holds exactly, added up as integers."""
    total: Value | None = None
    for start in range(0, inner, step):
        piece = site.cast(part(start, min(start + step, inner)), DType.INT32)
        total = piece if total is None else site.binary("add", total, piece)
    if total is None:
        raise NotExpressible("it multiplies matrices of no inner size")
    return total


def _product(site: OnnxSite, a: Value, b: Value) -> Value:
    def part(start: int, stop: int) -> Value:
        left = site.slice(a, a.type.rank - 1, start, stop)
        return site.emit(MatMul(DType.FLOAT32), left, site.slice(b, b.type.rank - 2, start, stop))

    return _added_up(site, a.type.shape[-1], _EXACT, part)


def _convolved(site: OnnxSite, x: Value, weight: Value) -> Value:
    groups, window = site.attribute("group", 1), math.prod(weight.type.shape[2:])
    inner = weight.type.shape[1]
    step = _EXACT // window if groups == 1 else inner
    if not step or step * window > _EXACT:
        raise NotExpressible(f"its windows hold more than {_EXACT} numbers, and their sums could be inexact")
    op = Convolution(*geometry_of(site, x, weight.type.shape[2:]), groups, DType.FLOAT32)

    def part(start: int, stop: int) -> Value:
        seen = x if groups > 1 else site.slice(x, 1, start, stop)
        return site.emit(op, seen, site.slice(weight, 1, start, stop))

    return _added_up(site, inner, step, part)


@imports("MatMulInteger")
def integer_product(
    site: OnnxSite, a: Value, b: Value, zero_a: Value | None = None, zero_b: Value | None = None
) -> Value:
    return _product(site, _moved(site, a, zero_a), _moved(site, b, zero_b, columns=True))


@imports("ConvInteger")
def integer_convolution(
    site: OnnxSite, x: Value, weight: Value, zero_x: Value | None = None, zero_weight: Value | None = None
) -> Value:
    trailing = weight.type.rank - 1
    return _convolved(site, _moved(site, x, zero_x), _moved(site, weight, zero_weight, trailing=trailing))


@imports("QLinearMatMul")
def quantised_product(
    site: OnnxSite,
    a: Value,
    scale_a: Value,
    zero_a: Value,
    b: Value,
    scale_b: Value,
    zero_b: Value,
    scale: Value,
    zero: Value,
) -> Value:
    sums = _product(site, _moved(site, a, zero_a), _moved(site, b, zero_b, columns=True))
    return _rescaled(site, sums, (_aligned(site, scale_a), _aligned(site, scale_b, columns=True)), scale, zero)


def _rescaled(site: OnnxSite, sums: Value, scales: tuple[Value, Value], scale: Value, zero: Value) -> Value:
    before = site.binary("multiply", *(site.cast(one, DType.FLOAT32) for one in scales))
    factor = site.binary("divide", before, site.cast(_aligned(site, scale), DType.FLOAT32))
    exact = site.binary("multiply", site.cast(sums, DType.FLOAT32), factor)
    return _as_small(site, exact, _aligned(site, zero), zero.type.dtype)


@imports("QLinearConv")
def quantised_convolution(
    site: OnnxSite,
    x: Value,
    scale_x: Value,
    zero_x: Value,
    weight: Value,
    scale_weight: Value,
    zero_weight: Value,
    scale: Value,
    zero: Value,
    bias: Value | None = None,
) -> Value:
    trailing = weight.type.rank - 2
    sums = _convolved(site, _moved(site, x, zero_x), _moved(site, weight, zero_weight, trailing=trailing + 1))
    if bias is not None:
        sums = site.binary("add", sums, site.reshape(bias, (bias.type.elements, *[1] * trailing)))
    scales = (_aligned(site, scale_x), _aligned(site, scale_weight, trailing=trailing))
    return _rescaled(site, sums, scales, scale, zero)
