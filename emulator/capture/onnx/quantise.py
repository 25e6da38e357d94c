"""Numbers as small integers with a scale, and back."""

from emulator.capture.aten.base import NotExpressible
from emulator.capture.onnx.base import OnnxSite, imports
from emulator.graph import Value
from emulator.types import DType


def _per_axis(site: OnnxSite, x: Value, parameter: Value) -> Value:
    """A scale or a zero point of each slice along an axis, or of all."""
    if parameter.type.elements == 1:
        return site.reshape(parameter, ())
    if parameter.type.rank != 1 or site.attribute("block_size", 0):
        raise NotExpressible("it scales by blocks; scale by tensor or by axis")
    axis = site.axis(x, 1)
    return site.reshape(parameter, (parameter.type.shape[0], *[1] * (x.type.rank - axis - 1)))


@imports("DequantizeLinear")
def dequantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    wide = site.cast(x, DType.FLOAT32)
    if zero is not None:
        wide = site.binary("subtract", wide, site.cast(_per_axis(site, x, zero), DType.FLOAT32))
    return site.cast(site.binary("multiply", wide, _per_axis(site, x, scale)), scale.type.dtype)


@imports("QuantizeLinear")
def quantise(site: OnnxSite, x: Value, scale: Value, zero: Value | None = None) -> Value:
    dtype = DType.UINT8 if zero is None else zero.type.dtype
    if not dtype.is_integer or site.attribute("output_dtype", 0):
        raise NotExpressible("it quantises to eight-bit floats or fewer bits; quantise to int8 or uint8")
    rounded = site.unary("round", site.binary("divide", site.floats(x), _per_axis(site, x, scale)))
    if zero is not None:
        rounded = site.binary("add", rounded, site.cast(_per_axis(site, x, zero), DType.FLOAT32))
    bits = 8 * dtype.itemsize
    low, high = (0.0, 255.0) if dtype is DType.UINT8 else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    inside = site.binary("minimum", site.binary("maximum", rounded, low), high)
    return site.cast(inside, dtype)
