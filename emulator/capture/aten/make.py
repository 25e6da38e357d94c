"""Tensors made from nothing: ranges and fillings."""

from typing import Any

import numpy as np

from emulator.capture.aten.base import NotExpressible, Site, imports
from emulator.graph import Value
from emulator.ops import Iota


def _arange(site: Site, start: float, step: float) -> Value:
    (length,) = site.result.shape
    dtype = site.result.dtype
    if dtype.is_integer and isinstance(start, int) and isinstance(step, int):
        return site.emit(Iota(length, start, step, dtype))
    numbers = start + step * np.arange(length)
    return site.builder.constant(np.trunc(numbers) if dtype.is_integer else numbers, dtype)


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
    if isinstance(start, Value) or isinstance(end, Value) or site.result.dtype.is_integer:
        raise NotExpressible("a range between tensors, or of integers, is not compiled; use torch.arange")
    numbers = np.linspace(start, end, site.result.elements, dtype=np.float32)
    return site.builder.constant(numbers, site.result.dtype)


@imports("tril_indices")
def tril_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.tril_indices(rows, offset, columns)), site.result.dtype)


@imports("triu_indices")
def triu_indices(site: Site, rows: int, columns: int, offset: int = 0, *_: Any) -> Value:
    return site.builder.constant(np.stack(np.triu_indices(rows, offset, columns)), site.result.dtype)
