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
    """x/2 * (1 + tanh(inner)), written so that nothing cancels where the tangent is close to -1."""
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
    """Zero for not-a-number too, as in PyTorch."""
    return np.asarray((x > 0).astype(x.dtype) - (x < 0).astype(x.dtype))


# Functions of float32; integers and booleans widen to float32 first.
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
# Functions that keep the operand's element type.
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
# Questions; the answer is a boolean.
_PREDICATES: dict[str, Callable[[Array], Array]] = {
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "logical_not": np.logical_not,
}


@dataclass(frozen=True)
class Unary(Operator, name="unary"):
    """A function of one operand, by name."""

    function: str

    def infer(self, x: TensorType) -> TensorType:
        if self.function in _SMOOTH:
            return x if x.dtype.is_float else x.with_dtype(DType.FLOAT32)
        if self.function in _PREDICATES:
            return x.with_dtype(DType.BOOL)
        require(self.function in _KEEPING, self, "there is no unary function of this name")
        if self.function == "invert":
            require(not x.dtype.is_float, self, f"bits of {x} cannot be inverted")
        else:
            require(x.dtype is not DType.BOOL, self, "a boolean has no arithmetic")
        return x

    def compute(self, x: Array) -> Array:
        if self.function in _SMOOTH:
            return map_pieces(_SMOOTH[self.function], x)
        return np.asarray((_KEEPING.get(self.function) or _PREDICATES[self.function])(x))


def _truncating_divide(a: Array, b: Array) -> Array:
    if a.dtype == np.float32:
        return np.asarray(np.trunc(a / b))
    # Magnitudes will not do: the smallest of a signed type is none of its numbers.
    below_zero, has_rest = (a < 0) != (b < 0), np.remainder(a, b) != 0
    return np.asarray(np.floor_divide(a, b) + (below_zero & has_rest))


def _power(a: Array, b: Array) -> Array:
    """Integer powers: with a negative exponent 1 and -1 are exact and all others are zero, as in PyTorch."""
    if a.dtype == np.float32:
        return np.asarray(np.power(a, b))
    inverse = b < 0
    made = np.power(a, np.where(inverse, b & 1, b))
    return np.where(inverse & (np.abs(a) != 1), a.dtype.type(0), made)


def _of_one_type(a: Array, b: Array) -> tuple[Array, Array]:
    """As an engine takes them, where numpy would widen: floats in float32; integers in the result's type, so that a
    scalar which that does not hold wraps first, as in PyTorch."""
    if np.float32 in (a.dtype, b.dtype):
        return a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    held = promote(*(TensorType(each.shape, DType(each.dtype.name)) for each in (a, b))).held
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
    """A function of two operands that broadcast against each other, by name."""

    function: str

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        shape, dtype = broadcast_shape(self, (a.shape, b.shape)), promote(a, b)
        if self.function == "divide":
            return TensorType(shape, dtype if dtype.is_float else DType.FLOAT32)
        if self.function in _COMPARISONS:
            return TensorType(shape, DType.BOOL)
        if self.function in _BITWISE:
            require(not dtype.is_float, self, f"{a} and {b} have no bits to combine")
            return TensorType(shape, dtype)
        require(self.function in _ARITHMETIC, self, "there is no binary function of this name")
        closed = self.function in ("add", "multiply", "maximum", "minimum")
        require(closed or dtype is not DType.BOOL, self, "booleans have no such arithmetic")
        return TensorType(shape, dtype)

    def compute(self, a: Array, b: Array) -> Array:
        if self.function == "divide":
            return np.asarray(a.astype(np.float32, copy=False) / b.astype(np.float32, copy=False))
        function = _ARITHMETIC.get(self.function) or _COMPARISONS.get(self.function) or _BITWISE[self.function]
        return np.asarray(function(*_of_one_type(a, b)))


@dataclass(frozen=True)
class Where(Operator, name="where"):
    """Takes from one operand where a condition holds and from another where it does not."""

    def infer(self, condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
        require(condition.dtype is DType.BOOL, self, f"the condition is {condition}, not a boolean")
        return TensorType(broadcast_shape(self, (condition.shape, a.shape, b.shape)), promote(a, b))

    def compute(self, condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition, *_of_one_type(a, b))


@dataclass(frozen=True)
class Cast(Operator, name="cast"):
    """Changes the element type; floats become integers by dropping the fraction, and saturate."""

    dtype: DType

    def infer(self, x: TensorType) -> TensorType:
        return x.with_dtype(self.dtype)

    def compute(self, x: Array) -> Array:
        if self.dtype.is_integer and x.dtype == np.float32:
            return to_integer(np.trunc(x), self.dtype)
        return x.astype(self.dtype.held, copy=False)
