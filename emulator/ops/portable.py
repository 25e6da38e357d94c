"""Portable numerics for constant folding: the same bits on every processor, as folded constants are in the program.

numpy and BLAS choose their kernels by the processor, and a sine or a sum in float32 may differ in the last bit. A sum,
a product and a root of single numbers are the same everywhere. All else is computed here in `long double`, for which
there are no vector instructions, and then rounded once to float32. Such a function errs in about the 64th bit, which
shows only where the exact result lies that close to the middle between two floats.
"""

from typing import Any, Final

import numpy as np

from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator

WIDE: Final = np.longdouble

# Functions whose last bit is left to the kernel, and folds whose order is.
_INEXACT: Final = frozenset(
    {
        np.arccos, np.arccosh, np.arcsin, np.arcsinh, np.arctan, np.arctan2, np.arctanh, np.cbrt, np.cos, np.cosh,
        np.exp, np.exp2, np.expm1, np.log, np.log10, np.log1p, np.log2, np.matmul, np.power, np.sin, np.sinh,
        np.tan, np.tanh,
    }
)  # fmt: skip
_FOLDED: Final = frozenset({np.add, np.multiply})


class _Portable(np.ndarray[Any, Any]):
    """An array whose functions are those of any processor; operators compute with it as with any other."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, out: Any = None, **more: Any) -> Any:
        plain = [_plain(each) for each in operands]
        if _is_inexact(ufunc, method) and any(getattr(each, "dtype", None) == np.float32 for each in plain):
            with np.errstate(all="ignore"):
                wide = getattr(ufunc, method)(*map(_widened, plain), **more)
            made = np.asarray(wide, np.float32) if np.asarray(wide).dtype == WIDE else np.asarray(wide)
            if out is None:
                return made.view(_Portable)
            _plain(out[0])[...] = made
            return out[0]
        into = {} if out is None else {"out": tuple(map(_plain, out))}
        made = getattr(ufunc, method)(*plain, **into, **more)
        if out is not None:
            return out[0]
        return made.view(_Portable) if isinstance(made, np.ndarray) else made


def compute(op: Operator, *operands: Array) -> Array:
    """The result of an operator on constants."""
    return np.asarray(op.compute(*(each.view(_Portable) for each in operands)))


def _is_inexact(ufunc: np.ufunc, method: str) -> bool:
    return ufunc in _INEXACT if method == "__call__" else method == "reduce" and ufunc in _FOLDED


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Portable) else value


def _widened(value: Any) -> Any:
    return value.astype(WIDE) if getattr(value, "dtype", None) == np.float32 else value
