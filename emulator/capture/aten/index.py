"""Reads and writes at computed places."""

from collections.abc import Sequence
from typing import Any

from emulator.capture.aten.base import NotExpressible, Site, axis_of, imports
from emulator.graph import Value
from emulator.ops import Gather, Index, IndexUpdate, TakeAlong
from emulator.types import DType


@imports("embedding")
def embedding(site: Site, table: Value, indices: Value, *_: Any) -> Value:
    return site.emit(Gather(0), table, indices)


@imports("index_select")
def index_select(site: Site, x: Value, dim: int, indices: Value) -> Value:
    return site.emit(Gather(axis_of(x, dim)), x, indices)


@imports("gather")
def gather(site: Site, x: Value, dim: int, indices: Value, *_: Any) -> Value:
    return site.emit(TakeAlong(axis_of(x, dim)), x, indices)


def _addressed(indices: Sequence[Value | None]) -> tuple[tuple[int, ...], list[Value]]:
    """The axes that have an index, and the indices; the other axes are taken whole."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.type.dtype is DType.BOOL for _, index in given):
        raise NotExpressible("the size of a boolean selection depends on data; use torch.where")
    return tuple(axis for axis, _ in given), [index for _, index in given]


@imports("index.Tensor")
def index(site: Site, x: Value, indices: Sequence[Value | None]) -> Value:
    axes, given = _addressed(indices)
    return site.emit(Index(axes), x, *given)


@imports("index_put")
def index_put(site: Site, x: Value, indices: Sequence[Value | None], update: Value, accumulate: bool = False) -> Value:
    axes, given = _addressed(indices)
    return site.emit(IndexUpdate(axes, accumulate), x, update, *given)


@imports("index_copy")
def index_copy(site: Site, x: Value, dim: int, indices: Value, update: Value) -> Value:
    return site.emit(IndexUpdate((axis_of(x, dim),), accumulate=False), x, update, indices)


@imports("index_add")
def index_add(site: Site, x: Value, dim: int, indices: Value, update: Value, alpha: float) -> Value:
    scaled = update if alpha == 1 else site.binary("multiply", update, alpha)
    return site.emit(IndexUpdate((axis_of(x, dim),), accumulate=True), x, scaled, indices)
