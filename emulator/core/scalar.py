"""What the scalar engine does: functions of one number, looked up."""

from collections.abc import Callable
from typing import Final

import numpy as np

from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import floats
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.elementwise import Unary

_SPELLED: Final = {Function.GELU_TANH: "gelu_tanh", Function.ARCTAN: "atan"}  # where the graph has another name
_sigmoid, _tanh, _softplus = (Unary(name).compute for name in ("sigmoid", "tanh", "softplus"))


def _named(function: Function) -> Callable[[Floats], Array]:
    return Unary(_SPELLED.get(function, function.value)).compute


def _gelu_sigmoid(x: Floats) -> Array:
    return np.asarray(x * _sigmoid(np.float32(1.702) * x))


def _mish(x: Floats) -> Array:
    return np.asarray(x * _tanh(_softplus(x)))


def _within(function: Function, most: float) -> Callable[[Floats], Array]:
    """Tables that end where models do go: what lies outside is invalid, so a forgotten reduction spoils the answer."""
    compute, limit = _named(function), np.float32(most)

    def bounded(x: Floats) -> Array:
        return np.where(np.abs(x) <= limit, compute(x), np.float32(np.nan))

    return bounded


_FUNCTIONS: Final[dict[Function, Callable[[Floats], Array]]] = {
    **{function: _named(function) for function in Function if function.value not in ("copy", "square", "mish")},
    Function.COPY: lambda x: x,
    Function.SQUARE: np.square,
    Function.MISH: _mish,
    Function.GELU_SIGMOID: _gelu_sigmoid,
    Function.SIN: _within(Function.SIN, np.pi),
    Function.ARCTAN: _within(Function.ARCTAN, np.pi / 2),
}


def activation(instruction: Activation, at: Bound) -> None:
    x = at.floats("src")
    if instruction.scale != 1.0:
        x = x * at.scalar("scale")
    if instruction.bias != 0.0:
        x = x + at.scalar("bias")
    results = floats(_FUNCTIONS[instruction.function](x))
    at.put(results)
    if instruction.total is not None:
        at.put(results.sum(axis=1, keepdims=True), "total")
