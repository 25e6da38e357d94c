"""The same for PyTorch: numbers that follow from constants alone, to the same bits on every processor.

A model fills its tables (rotary frequencies, grids of positions) by PyTorch's own kernels, of which there is one for
each set of vector instructions. See `emulator.ops.portable`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nxpipe.emulator.ops.portable import WIDE

_ROUNDED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SAYS_NO_NUMBER: Final = ("device", "dtype", "layout", "memory_format", "pin_memory")


class Portable(TorchDispatchMode):
    """Lets PyTorch say what a call returns, and puts in numbers that any processor would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        function = _FUNCTIONS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        operands = [each for each in tree_leaves((args, given)) if isinstance(each, torch.Tensor)]
        if function is None or "out" in given or not all(map(_is_known, operands)):
            return func(*args, **given)
        # Before the call, which may write its result over an operand.
        wide, named = tree_map(_widened, (args, {name: given[name] for name in given if name not in _SAYS_NO_NUMBER}))
        result = func(*args, **given)
        if result.dtype in _ROUNDED and _is_known(result):
            with np.errstate(all="ignore"):
                numbers = np.asarray(function(*wide, **named))
            kind = np.float64 if result.dtype is torch.float64 else np.float32
            result.copy_(torch.from_numpy(np.array(np.broadcast_to(numbers, result.shape), kind)))
        return result


def _is_known(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    exact = value.double() if value.dtype in (torch.bfloat16, torch.float16) else value
    return exact.detach().resolve_conj().resolve_neg().numpy().astype(WIDE)


def _arange(*limits: Any) -> Any:
    start, end, step = (0, *limits, 1) if len(limits) == 1 else (*limits, 1)[:3]
    return start + WIDE(step) * np.arange(int(np.ceil((end - start) / step)))


def _linspace(start: Any, end: Any, steps: int) -> Any:
    return start + (end - WIDE(start)) * np.arange(steps) / max(steps - 1, 1)


def _power(base: Any, exponent: Any) -> Any:
    return np.power(WIDE(base) if isinstance(base, int | float) else base, exponent)


def _reduction(fold: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        axes = dim if isinstance(dim, int) else tuple(dim or range(x.ndim))
        return fold(x, axis=axes, keepdims=keepdim)

    return reduced


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "acos": np.arccos,
    "arange": _arange,
    "asin": np.arcsin,
    "atan": np.arctan,
    "bmm": np.matmul,
    "cos": np.cos,
    "cosh": np.cosh,
    "cumsum": lambda x, dim: np.cumsum(x, axis=dim),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "linspace": _linspace,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "matmul": np.matmul,
    "mean": _reduction(np.mean),
    "mm": np.matmul,
    "pow": _power,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "sinh": np.sinh,
    "sum": _reduction(np.sum),
    "tan": np.tan,
    "tanh": np.tanh,
}
