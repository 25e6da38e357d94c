"""Portable numerics for constant folding: identical bits on every processor, since programs contain folded constants.

numpy and BLAS select kernels by processor, so that a sine or a sum in float32 may differ in the last bit. Additions,
products and square roots of single numbers are exactly rounded everywhere. All other functions are computed here in
`long double`, for which there are no vector instructions, and then rounded once to float32. Their error, about one unit
of the 64th bit, changes the result only if the exact result is that close to the middle between two floats.
"""

from typing import Any, Final

import numpy as np

from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator

WIDE: Final = np.longdouble

# Functions whose last bit depends on the kernel; and reductions whose order of additions does.
_INEXACT: Final = frozenset(
    {
        np.arccos, np.arccosh, np.arcsin, np.arcsinh, np.arctan, np.arctan2, np.arctanh, np.cbrt, np.cos, np.cosh,
        np.exp, np.exp2, np.expm1, np.log, np.log10, np.log1p, np.log2, np.matmul, np.power, np.sin, np.sinh,
        np.tan, np.tanh,
    }
)  # fmt: skip
_REDUCED: Final = frozenset({np.add, np.multiply})


class _Portable(np.ndarray[Any, Any]):
    """An array whose functions have the same results on every processor."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, out: Any = None, **keywords: Any) -> Any:
        plain = [_plain(operand) for operand in operands]
        if _is_inexact(ufunc, method) and any(getattr(operand, "dtype", None) == np.float32 for operand in plain):
            with np.errstate(all="ignore"):
                wide = getattr(ufunc, method)(*map(_widened, plain), **keywords)
            result = np.asarray(wide, np.float32) if np.asarray(wide).dtype == WIDE else np.asarray(wide)
            if out is None:
                return result.view(_Portable)
            _plain(out[0])[...] = result
            return out[0]
        output = {} if out is None else {"out": tuple(map(_plain, out))}
        result = getattr(ufunc, method)(*plain, **output, **keywords)
        if out is not None:
            return out[0]
        return result.view(_Portable) if isinstance(result, np.ndarray) else result


def compute(op: Operator, *operands: Array) -> Array:
    """Compute an operator on constants."""
    return np.asarray(op.compute(*(operand.view(_Portable) for operand in operands)))


def _is_inexact(ufunc: np.ufunc, method: str) -> bool:
    return ufunc in _INEXACT if method == "__call__" else method == "reduce" and ufunc in _REDUCED


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Portable) else value


def _widened(value: Any) -> Any:
    return value.astype(WIDE) if getattr(value, "dtype", None) == np.float32 else value
