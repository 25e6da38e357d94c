"""Table of ATen importers, and the interface of an importer.

An importer is a function of a `Site` (one call of the traced program) and the call's arguments in the order of the
operator's schema, with defaults, and with graph values for tensors. The site has the result type that PyTorch computed,
so shapes such as `view(-1, 64)` need no inference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from nxpipe.emulator.capture.site import NotExpressible, Site, present
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Concat, MatMul, Transpose

__all__ = [
    "NotExpressible",
    "Site",
    "axes_of",
    "axis_of",
    "importer_of",
    "imports",
    "is_assertion",
    "is_known",
    "present",
    "promote_scalars",
]

Importer = Callable[..., Value | list[Value]]
_Importer = TypeVar("_Importer", bound=Importer)

_IMPORTERS: dict[str, Importer] = {}


def imports(*names: str) -> Callable[[_Importer], _Importer]:
    """Register an importer for ATen operators: for all overloads (`add`) or for one (`sum.dim_IntList`)."""

    def register(importer: _Importer) -> _Importer:
        for name in names:
            if name in _IMPORTERS:
                raise ValueError(f"operator {name} has two importers")
            _IMPORTERS[name] = importer
        return importer

    return register


def promote_scalars(importer: Importer) -> Importer:
    """Decorate an importer with a `dim` argument: PyTorch treats a scalar as a vector of one element."""

    @wraps(importer)
    def promoted(site: Site, x: Value, *more: Any) -> Value | list[Value]:
        if x.type.rank:
            return importer(site, x, *more)
        scalars = [isinstance(operand, Value) and not operand.type.rank for operand in more]
        vectors = [site.reshape(o, (1,)) if scalar else o for o, scalar in zip(more, scalars, strict=True)]
        results = importer(site, site.reshape(x, (1,)), *vectors)
        if not isinstance(results, list):
            return site.reshape(results, site.result.shape)
        return [site.reshape(part, type_.shape) for part, type_ in zip(results, site.results, strict=False)]

    return promoted


def importer_of(target: Any) -> Importer | None:
    """The importer of an overload; one for this overload takes precedence over one for all overloads.

    Operators outside of ATen are registered with their namespace, such as `transformers::grouped_mm_fallback`.
    """
    packet, _, overload = target.name().removeprefix("aten::").partition(".")
    return _IMPORTERS.get(f"{packet}.{overload or 'default'}") or _IMPORTERS.get(packet)


def is_known(target: Any) -> bool:
    """True if the operator needs no decomposition: it has an importer, or it is an assertion, which is left out."""
    return importer_of(target) is not None or is_assertion(target)


def is_assertion(target: Any) -> bool:
    """True if the operator is an assertion or a size query; shapes and types are static in the graph."""
    return str(target.name()).startswith(("aten::_assert", "aten::sym_"))


def axis_of(x: Value, axis: int) -> int:
    """A non-negative axis for PyTorch's `dim`, which may count from the end."""
    return axis % max(x.type.rank, 1)


def axes_of(x: Value, axes: Sequence[int] | int | None) -> tuple[int, ...]:
    """The sorted axes of a reduction; all axes if none are given."""
    if isinstance(axes, int):
        axes = (axes,)
    return tuple(sorted(axis_of(x, axis) for axis in axes)) if axes and x.type.rank else tuple(range(x.type.rank))


_MOVES = frozenset(
    (
        *("_unsafe_view", "alias", "cat", "clone", "contiguous", "detach", "expand", "flatten", "flip", "gather"),
        *("index", "index_select", "movedim", "narrow", "permute", "repeat", "reshape", "roll", "select", "slice"),
        *("chunk", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unflatten"),
        *("unsqueeze", "view", "where"),
    )
)
# Elements; the sine tables of longer transforms would be a large part of the program.
_LONGEST_TRANSFORM = 4096


@dataclass(frozen=True)
class Complex:
    """A complex tensor of the traced program, as two real values."""

    real: Value
    imaginary: Value


_ARITHMETIC: dict[str, Callable[..., Value | Complex]] = {}


def complex_importer_of(target: Any) -> Callable[..., Any] | None:
    """The importer of a call with complex operands."""
    name = _name(target)
    if name not in _MOVES:
        return _ARITHMETIC.get(name)
    move: Any = importer_of(target)

    def on_both_parts(site: Site, *args: Any) -> Any:
        real, imaginary = (move(site, *_parts(args, part)) for part in ("real", "imaginary"))
        if isinstance(real, list):
            return [Complex(*parts) for parts in zip(real, imaginary, strict=True)]
        return Complex(real, imaginary)

    return on_both_parts


def _name(target: Any) -> str:
    return str(target.name()).removeprefix("aten::").partition(".")[0]


def _parts(args: Sequence[Any], part: str) -> list[Any]:
    """The arguments with each complex tensor, in nested lists too, replaced by its real or imaginary part."""
    return [
        getattr(arg, part) if isinstance(arg, Complex) else _parts(arg, part) if isinstance(arg, list | tuple) else arg
        for arg in args
    ]


def _imports_complex(*names: str) -> Callable[[Any], Any]:
    def register(importer: Any) -> Any:
        _ARITHMETIC.update(dict.fromkeys(names, importer))
        return importer

    return register


def _complex_parts(site: Site, x: Any) -> tuple[Any, Any]:
    """Real and imaginary part of an operand, which may be a real number."""
    if isinstance(x, Complex):
        return x.real, x.imaginary
    return (x.real, x.imag) if isinstance(x, complex) else (x, 0.0)


@imports("polar")
def polar(site: Site, size: Value, angle: Value) -> Any:
    return Complex(
        site.binary("multiply", size, site.unary("cos", angle)), site.binary("multiply", size, site.unary("sin", angle))
    )


@imports("complex")
def complex_(site: Site, real: Value, imaginary: Value) -> Any:
    return Complex(real, imaginary)


@imports("view_as_complex")
def view_as_complex(site: Site, pairs: Value) -> Any:
    last = pairs.type.rank - 1
    shape = pairs.type.shape[:-1]
    real, imaginary = (site.reshape(site.slice(pairs, last, part, part + 1), shape) for part in (0, 1))
    return Complex(real, imaginary)


@imports("view_as_real")
@_imports_complex("view_as_real")
def view_as_real(site: Site, z: Complex) -> Value:
    shape = (*z.real.type.shape, 1)
    return site.emit(Concat(len(shape) - 1), site.reshape(z.real, shape), site.reshape(z.imaginary, shape))


@_imports_complex("real")
def _real(site: Site, z: Complex) -> Value:
    return z.real


@_imports_complex("imag")
def _imaginary(site: Site, z: Complex) -> Value:
    return z.imaginary


@_imports_complex("abs")
def _size(site: Site, z: Complex) -> Value:
    squares = (site.binary("multiply", part, part) for part in (z.real, z.imaginary))
    return site.unary("sqrt", site.binary("add", *squares))


@_imports_complex("conj", "_conj", "_conj_physical", "conj_physical")
def _conjugate(site: Site, z: Complex) -> Complex:
    return Complex(z.real, site.unary("negate", z.imaginary))


@_imports_complex("resolve_conj", "_to_copy", "to")
def _same(site: Site, z: Complex, *_: Any) -> Complex:
    return z


@_imports_complex("add")
def _add(site: Site, a: Any, b: Any, alpha: float = 1) -> Complex:
    return _summed(site, "add", a, b, alpha)


@_imports_complex("sub")
def _subtract(site: Site, a: Any, b: Any, alpha: float = 1) -> Complex:
    return _summed(site, "subtract", a, b, alpha)


def _summed(site: Site, function: str, a: Any, b: Any, alpha: float) -> Complex:
    if alpha != 1:
        raise NotExpressible("a scaled sum of complex numbers is not compiled; multiply first")
    (ar, ai), (br, bi) = _complex_parts(site, a), _complex_parts(site, b)
    shape = site.result.shape
    return Complex(
        site.broadcast(site.binary(function, ar, br), shape), site.broadcast(site.binary(function, ai, bi), shape)
    )


@_imports_complex("mul")
def _multiply(site: Site, a: Any, b: Any) -> Complex:
    (ar, ai), (br, bi) = _complex_parts(site, a), _complex_parts(site, b)
    if not isinstance(b, Complex | complex):
        return Complex(site.binary("multiply", ar, br), site.binary("multiply", ai, br))
    if not isinstance(a, Complex):
        return Complex(site.binary("multiply", ar, br), site.binary("multiply", ar, bi))
    real = site.binary("subtract", site.binary("multiply", ar, br), site.binary("multiply", ai, bi))
    return Complex(real, site.binary("add", site.binary("multiply", ar, bi), site.binary("multiply", ai, br)))


@_imports_complex("div")
def _divide(site: Site, a: Any, b: Any) -> Complex:
    if isinstance(b, Complex | complex):
        raise NotExpressible("division by a complex number is not compiled; multiply by its conjugate over its square")
    return Complex(site.binary("divide", a.real, b), site.binary("divide", a.imaginary, b))


@imports("_fft_r2c")
def transform_real(site: Site, x: Value, axes: Sequence[int], scaling: int, one_sided: bool) -> Any:
    """Real FFT of the last axis, then complex FFTs of the other axes."""
    *others, last = (axis_of(x, axis) for axis in axes)
    kept = x.type.shape[last] // 2 + 1 if one_sided else x.type.shape[last]
    z = _transform(site, Complex(x, site.filled(0, x.type)), last, kept, True)
    for axis in others:
        z = _transform(site, z, axis, z.real.type.shape[axis], True)
    return _scaled(site, z, math.prod(x.type.shape[axis] for axis in (*others, last)), scaling)


@imports("_fft_c2c")
@_imports_complex("_fft_c2c")
def transform_complex(site: Site, z: Complex, axes: Sequence[int], scaling: int, forward: bool) -> Complex:
    for axis in axes:
        index = axis_of(z.real, axis)
        z = _transform(site, z, index, z.real.type.shape[index], forward)
    return _scaled(site, z, math.prod(z.real.type.shape[axis] for axis in axes), scaling)


@imports("_fft_c2r")
@_imports_complex("_fft_c2r")
def transform_to_real(site: Site, z: Complex, axes: Sequence[int], scaling: int, size: int) -> Value:
    """Inverse real FFT of a one-sided spectrum; inner frequencies count twice, for their conjugates."""
    *others, last = (axis_of(z.real, axis) for axis in axes)
    for axis in others:
        z = _transform(site, z, axis, z.real.type.shape[axis], False)
    frequencies = np.arange(z.real.type.shape[last])
    weight = np.where((frequencies == 0) | (2 * frequencies == size), 1.0, 2.0)[:, None]
    angle = 2 * np.pi * np.outer(frequencies, np.arange(size)) / size
    cosines = _multiply_axis(site, z.real, last, weight * np.cos(angle))
    sines = _multiply_axis(site, z.imaginary, last, weight * np.sin(angle))
    elements = math.prod(site.result.shape[axis] for axis in (*others, last))
    return site.binary("multiply", site.binary("subtract", cosines, sines), _factor(elements, scaling))


def _transform(site: Site, z: Complex, axis: int, kept: int, forward: bool) -> Complex:
    """A discrete Fourier transform of one axis, as matmuls with tables of sines and cosines."""
    size = z.real.type.shape[axis]
    if size > _LONGEST_TRANSFORM:
        raise NotExpressible(
            f"a Fourier transform of {size} elements is not compiled; the limit is {_LONGEST_TRANSFORM}"
        )
    angle = 2 * np.pi * (np.outer(np.arange(size), np.arange(kept)) % size) / size
    cosine, sine = np.cos(angle), -np.sin(angle) if forward else np.sin(angle)
    real = site.binary(
        "subtract", _multiply_axis(site, z.real, axis, cosine), _multiply_axis(site, z.imaginary, axis, sine)
    )
    return Complex(
        real,
        site.binary("add", _multiply_axis(site, z.real, axis, sine), _multiply_axis(site, z.imaginary, axis, cosine)),
    )


def _multiply_axis(site: Site, x: Value, axis: int, table: Any) -> Value:
    """Multiply one axis by a constant matrix."""
    order = [*(i for i in range(x.type.rank) if i != axis), axis]
    moved = site.emit(Transpose(tuple(order)), x)
    product = site.emit(MatMul(DType.FLOAT32), moved, site.builder.constant(table, DType.FLOAT32))
    return site.emit(Transpose(tuple(int(axis) for axis in np.argsort(order))), product)


def _scaled(site: Site, z: Complex, elements: int, scaling: int) -> Complex:
    factor = _factor(elements, scaling)
    return Complex(site.binary("multiply", z.real, factor), site.binary("multiply", z.imaginary, factor))


def _factor(elements: int, scaling: int) -> float:
    """The factor of PyTorch's `normalization` argument: 1, 1/sqrt(elements), or 1/elements."""
    return (1.0, 1 / math.sqrt(elements), 1 / elements)[scaling]
