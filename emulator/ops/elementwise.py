"""Elementwise operators: the work of the vector and scalar engines."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType, promote
from nxpipe.emulator.numerics import Array, Floats, atanh_erf, erf, map_pieces, to_integer
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require

_SQRT_HALF = np.float32(np.sqrt(0.5))
_SQRT_2_OVER_PI = np.float32(np.sqrt(2 / np.pi))
_ONE = np.float32(1)


def _gelu(x: Floats) -> Array:
    return _gated(x, atanh_erf(x * _SQRT_HALF))


def _gelu_tanh(x: Floats) -> Array:
    inner = np.float32(0.044715) * x
    inner *= x
    inner *= x
    inner += x
    inner *= _SQRT_2_OVER_PI
    return _gated(x, inner)


def _gated(x: Floats, inner: Floats) -> Floats:
    """x/2 * (1 + tanh(inner)), as x / (1 + exp(-2 * inner)): no cancellation where the tangent is close to -1."""
    inner *= np.float32(-2)
    np.exp(inner, out=inner)
    inner += _ONE
    return np.divide(x, inner, out=inner)


def _sigmoid(x: Floats) -> Array:
    return _ONE / (_ONE + np.exp(-x))


def _silu(x: Floats) -> Array:
    below = np.exp(-x)
    below += _ONE
    return np.divide(x, below, out=below)


def _softplus(x: Floats) -> Array:
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def _sign(x: Array) -> Array:
    """The sign; 0 for NaN, as in PyTorch."""
    return np.asarray((x > 0).astype(x.dtype) - (x < 0).astype(x.dtype))


# Functions of float32; integers and booleans are first converted to float32.
_SMOOTH: dict[str, Callable[[Floats], Array]] = {
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": erf,
    "exp": np.exp,
    "expm1": np.expm1,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "reciprocal": lambda x: _ONE / x,
    "rsqrt": lambda x: _ONE / np.sqrt(x),
    "sigmoid": _sigmoid,
    "silu": _silu,
    "sin": np.sin,
    "sinh": np.sinh,
    "softplus": _softplus,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
# Functions whose result has the operand's element type.
_KEEPING: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "invert": np.invert,
    "negate": np.negative,
    "relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "round": np.rint,
    "sign": _sign,
    "trunc": np.trunc,
}
# Functions with a boolean result.
_PREDICATES: dict[str, Callable[[Array], Array]] = {
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "logical_not": np.logical_not,
}


@dataclass(frozen=True)
class Unary(Operator, name="unary"):
    """An elementwise function of one operand, selected by name."""

    function: str

    def infer(self, x: TensorType) -> TensorType:
        if self.function in _SMOOTH:
            return x if x.dtype.is_float else x.with_dtype(DType.FLOAT32)
        if self.function in _PREDICATES:
            return x.with_dtype(DType.BOOL)
        require(self.function in _KEEPING, self, "unknown unary function")
        if self.function == "invert":
            require(not x.dtype.is_float, self, f"bitwise inversion of {x} is not defined")
        else:
            require(x.dtype is not DType.BOOL, self, "arithmetic on booleans is not defined")
        return x

    def compute(self, x: Array) -> Array:
        if self.function in _SMOOTH:
            return map_pieces(_SMOOTH[self.function], x)
        return np.asarray((_KEEPING.get(self.function) or _PREDICATES[self.function])(x))


def _truncating_divide(a: Array, b: Array) -> Array:
    if a.dtype == np.float32:
        return np.asarray(np.trunc(a / b))
    # Not by magnitudes: the magnitude of a signed type's smallest number overflows.
    is_negative, has_remainder = (a < 0) != (b < 0), np.remainder(a, b) != 0
    return np.asarray(np.floor_divide(a, b) + (is_negative & has_remainder))


def _power(a: Array, b: Array) -> Array:
    """Powers. For integers with a negative exponent, those of 1 and -1 are exact and all others 0, as in PyTorch."""
    if a.dtype == np.float32:
        return np.asarray(np.power(a, b))
    is_negative = b < 0
    powers = np.power(a, np.where(is_negative, b & 1, b))
    return np.where(is_negative & (np.abs(a) != 1), a.dtype.type(0), powers)


def _engine_operands(a: Array, b: Array) -> tuple[Array, Array]:
    """Convert operands to the type in which an engine reads them: float32 for floats, the result's type for integers. A
    scalar outside of that type wraps, as in PyTorch; numpy would widen the result."""
    if np.float32 in (a.dtype, b.dtype):
        return a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    held = promote(*(TensorType(operand.shape, DType(operand.dtype.name)) for operand in (a, b))).held
    return a.astype(held, copy=False), b.astype(held, copy=False)


_ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "floor_divide": np.floor_divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "power": _power,
    "remainder": np.remainder,
    "subtract": np.subtract,
    "truncating_divide": _truncating_divide,
}
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "equal": np.equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "not_equal": np.not_equal,
}
_BITWISE: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@dataclass(frozen=True)
class Binary(Operator, name="binary"):
    """An elementwise function of two operands, which are broadcast, selected by name."""

    function: str

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        shape, dtype = broadcast_shape(self, (a.shape, b.shape)), promote(a, b)
        if self.function == "divide":
            return TensorType(shape, dtype if dtype.is_float else DType.FLOAT32)
        if self.function in _COMPARISONS:
            return TensorType(shape, DType.BOOL)
        if self.function in _BITWISE:
            require(not dtype.is_float, self, f"bitwise operations on {a} and {b} are not defined")
            return TensorType(shape, dtype)
        require(self.function in _ARITHMETIC, self, "unknown binary function")
        closed = self.function in ("add", "multiply", "maximum", "minimum")
        require(closed or dtype is not DType.BOOL, self, "not defined for booleans")
        return TensorType(shape, dtype)

    def compute(self, a: Array, b: Array) -> Array:
        if self.function == "divide":
            return np.asarray(a.astype(np.float32, copy=False) / b.astype(np.float32, copy=False))
        function = _ARITHMETIC.get(self.function) or _COMPARISONS.get(self.function) or _BITWISE[self.function]
        return np.asarray(function(*_engine_operands(a, b)))


@dataclass(frozen=True)
class Where(Operator, name="where"):
    """Selects elements of the second operand where the condition is true, else of the third."""

    def infer(self, condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
        require(condition.dtype is DType.BOOL, self, f"the condition is {condition}, not a boolean")
        return TensorType(broadcast_shape(self, (condition.shape, a.shape, b.shape)), promote(a, b))

    def compute(self, condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition, *_engine_operands(a, b))


@dataclass(frozen=True)
class Cast(Operator, name="cast"):
    """Converts the element type. Floats are truncated to integers, with saturation."""

    dtype: DType

    def infer(self, x: TensorType) -> TensorType:
        return x.with_dtype(self.dtype)

    def compute(self, x: Array) -> Array:
        if self.dtype.is_integer and x.dtype == np.float32:
            return to_integer(np.trunc(x), self.dtype)
        return x.astype(self.dtype.held, copy=False)
