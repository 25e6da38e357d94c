"""Semantics of the scalar engine: functions of one number."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from nxpipe.emulator.core.access import Bound, Handler
from nxpipe.emulator.core.arithmetic import floats
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.numerics import Array, Floats
from nxpipe.emulator.ops.elementwise import Unary

_GRAPH_NAMES: Final = {Function.GELU_TANH: "gelu_tanh", Function.ARCTAN: "atan"}  # where they differ
_sigmoid, _tanh, _softplus = (Unary(name).compute for name in ("sigmoid", "tanh", "softplus"))


def _named(function: Function) -> Callable[[Floats], Array]:
    return Unary(_GRAPH_NAMES.get(function, function.value)).compute


def _gelu_sigmoid(x: Floats) -> Array:
    return np.asarray(x * _sigmoid(np.float32(1.702) * x))


def _mish(x: Floats) -> Array:
    return np.asarray(x * _tanh(_softplus(x)))


def _within(function: Function, most: float) -> Callable[[Floats], Array]:
    """A table of a limited range: NaN outside, so that a missing range reduction shows in the result."""
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


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {Activation: activation}
