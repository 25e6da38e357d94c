"""Tensors made from nothing: ranges and fillings."""

from typing import Any

import numpy as np

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, imports
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Iota, Where


def _arange(site: Site, start: float, step: float) -> Value:
    (length,) = site.result.shape
    dtype = site.result.dtype
    if dtype.is_integer:  # PyTorch cuts both to integers first, and then counts
        return site.emit(Iota(length, int(start), int(step), dtype))
    return site.builder.constant(start + step * np.arange(length), dtype)


@imports("arange.default")
def arange(site: Site, *_: Any) -> Value:
    return _arange(site, 0, 1)


@imports("arange.start")
def arange_start(site: Site, start: float, *_: Any) -> Value:
    return _arange(site, start, 1)


@imports("arange.start_step")
def arange_start_step(site: Site, start: float, end: float, step: float, *_: Any) -> Value:
    return _arange(site, start, step)


@imports("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_permuted")
def zeros(site: Site, *_: Any) -> Value:
    return site.filled(0, site.result)


@imports("ones", "ones_like", "new_ones")
def ones(site: Site, *_: Any) -> Value:
    return site.filled(1, site.result)


@imports("full", "full_like")
def full(site: Site, shape_or_like: object, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("new_full")
def new_full(site: Site, like: Value, shape: object, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("fill")
def fill(site: Site, like: Value, number: Value | float) -> Value:
    return site.broadcast(site.cast(site.value(number), site.result.dtype), site.result.shape)


@imports("scalar_tensor")
def scalar_tensor(site: Site, number: float, *_: Any) -> Value:
    return site.filled(number, site.result)


@imports("copy")
def copy(site: Site, like: Value, source: Value, *_: Any) -> Value:
    return site.broadcast(site.cast(source, site.result.dtype), site.result.shape)


@imports("eye")
def eye(site: Site, *_: Any) -> Value:
    rows, columns = site.result.shape
    return site.builder.constant(np.eye(rows, columns), site.result.dtype)


@imports("linspace")
def linspace(site: Site, start: Value | float, end: Value | float, *_: Any) -> Value:
    """Counted from both ends, as PyTorch does, so that both are met exactly."""
    count, whole = site.result.elements, site.result.dtype.is_integer
    places = np.arange(count)
    first_half = places < count // 2 if count > 1 else places == 0
    if isinstance(start, Value) or isinstance(end, Value):
        if whole:
            raise NotExpressible("integers between tensors are cut off in 64 bits; make the bounds Python numbers")
        return _between_tensors(site, site.value(start), site.value(end), first_half)
    low, high = (float(int(bound) if whole else bound) for bound in (start, end))
    step = (high - low) / max(count - 1, 1)
    numbers = np.where(first_half, low + step * places, high - step * (count - 1 - places))
    return site.builder.constant(np.trunc(numbers) if whole else numbers, site.result.dtype)


def _between_tensors(site: Site, start: Value, end: Value, first_half: Any) -> Value:
    count = len(first_half)
    low, high = site.cast(start, DType.FLOAT32), site.cast(end, DType.FLOAT32)
    step = site.binary("divide", site.binary("subtract", high, low), float(max(count - 1, 1)))

    def steps(number: Any) -> Value:
        return site.binary("multiply", step, site.builder.constant(number, DType.FLOAT32))

    up = site.binary("add", low, steps(np.arange(count)))
    down = site.binary("subtract", high, steps(count - 1 - np.arange(count)))
    return site.emit(Where(), site.builder.constant(first_half, DType.BOOL), up, down)


@imports("tril_indices")
def tril_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.tril_indices(rows, offset, columns)), site.result.dtype)


@imports("triu_indices")
def triu_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.triu_indices(rows, offset, columns)), site.result.dtype)
