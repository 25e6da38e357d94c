"""Tensors made from nothing: ranges and fillings."""

from typing import Any

import numpy as np

from emulator.capture.aten.base import Site, imports
from emulator.graph import Value
from emulator.ops import Iota


def _arange(site: Site, start: float, step: float) -> Value:
    (length,) = site.result.shape
    dtype = site.result.dtype
    if dtype.is_integer and isinstance(start, int) and isinstance(step, int):
        return site.emit(Iota(length, start, step, dtype))
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
