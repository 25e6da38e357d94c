"""Views, joins, cuts and repetitions."""

from collections.abc import Sequence
from typing import Any

from nxpipe.emulator.capture.aten.base import NotExpressible, Site, along_an_axis, axes_of, axis_of, imports
from nxpipe.emulator.capture.composites.windows import continued
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Bitcast, Concat, Flip, Iota, Pad, SliceUpdate, Transpose, Where


@imports("view", "view_as", "reshape", "reshape_as", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def reshape(site: Site, x: Value, *_: Any) -> Value:
    return site.reshape(x, site.result.shape)


@imports("as_strided")
def as_strided(site: Site, x: Value, *_: Any) -> Value:
    raise NotExpressible("strides describe memory, which a graph does not have; use slices, unfold, expand or permute")


@imports("view.dtype")
def reinterpret(site: Site, x: Value, *_: Any) -> Value:
    return site.emit(Bitcast(x.type.dtype, site.result.dtype), x)


@imports("expand", "expand_as", "broadcast_to")
def expand(site: Site, x: Value, *_: Any) -> Value:
    return site.broadcast(x, site.result.shape)


def _transposed(site: Site, x: Value, order: Sequence[int]) -> Value:
    return site.emit(Transpose(tuple(order)), x)


@imports("permute")
def permute(site: Site, x: Value, order: Sequence[int]) -> Value:
    return _transposed(site, x, [axis_of(x, axis) for axis in order])


@imports("transpose.int", "swapaxes")
def transpose(site: Site, x: Value, a: int, b: int) -> Value:
    order = list(range(x.type.rank))
    if order:
        a, b = axis_of(x, a), axis_of(x, b)
        order[a], order[b] = b, a
    return _transposed(site, x, order)


@imports("t", "numpy_T")
def reverse_axes(site: Site, x: Value) -> Value:
    return _transposed(site, x, range(x.type.rank)[::-1])


@imports("mT")
def transpose_matrices(site: Site, x: Value) -> Value:
    return transpose(site, x, -2, -1)


@imports("select.int")
def select(site: Site, x: Value, dim: int, index: int) -> Value:
    axis = axis_of(x, dim)
    place = index % x.type.shape[axis]
    return site.reshape(site.slice(x, axis, place, place + 1), site.result.shape)


def _bounds(x: Value, axis: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    start, stop, step = slice(start, end, step).indices(x.type.shape[axis])
    return start, max(start, stop), step


@imports("slice.Tensor")
def slice_(site: Site, x: Value, dim: int, start: int | None, end: int | None, step: int) -> Value:
    axis = axis_of(x, dim)
    return site.slice(x, axis, *_bounds(x, axis, start, end, step))


@imports("narrow")
def narrow(site: Site, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(site, x, dim, start, start + length, 1)


def _updated(site: Site, x: Value, update: Value, axis: int, start: int, stop: int, step: int) -> Value:
    starts, stops, steps = [0] * x.type.rank, list(x.type.shape), [1] * x.type.rank
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return site.emit(SliceUpdate(tuple(starts), tuple(stops), tuple(steps)), x, update)


@imports("slice_scatter")
def slice_scatter(
    site: Site, x: Value, update: Value, dim: int, start: int | None, end: int | None, step: int
) -> Value:
    axis = axis_of(x, dim)
    return _updated(site, x, update, axis, *_bounds(x, axis, start, end, step))


@imports("select_scatter")
def select_scatter(site: Site, x: Value, update: Value, dim: int, index: int) -> Value:
    axis = axis_of(x, dim)
    place = index % x.type.shape[axis]
    row = (*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :])
    return _updated(site, x, site.reshape(update, row), axis, place, place + 1, 1)


@imports("cat", "concat")
def cat(site: Site, parts: Sequence[Value], dim: int = 0) -> Value:
    # PyTorch lets an empty vector join tensors of any rank.
    joined = [site.cast(part, site.result.dtype) for part in parts if part.type.shape != (0,)]
    if not joined:
        return parts[0]
    return joined[0] if len(joined) == 1 else site.emit(Concat(axis_of(joined[0], dim)), *joined)


@imports("stack")
def stack(site: Site, parts: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(site.result.shape)
    row = (*site.result.shape[:axis], 1, *site.result.shape[axis + 1 :])
    return site.emit(Concat(axis), *(site.reshape(site.cast(part, site.result.dtype), row) for part in parts))


@imports("split", "split_with_sizes", "chunk")
def split(site: Site, x: Value, sizes: object, dim: int = 0) -> list[Value]:
    """Every overload's result sizes are known, so how they were asked for does not matter."""
    axis, start, parts = axis_of(x, dim), 0, []
    for result in site.results:
        parts.append(site.slice(x, axis, start, start + result.shape[axis]))
        start += result.shape[axis]
    return parts


@imports("unbind")
def unbind(site: Site, x: Value, dim: int) -> list[Value]:
    return [select(site, x, dim, index) for index in range(x.type.shape[axis_of(x, dim)])]


@imports("flip")
def flip(site: Site, x: Value, dims: Sequence[int]) -> Value:
    return site.emit(Flip(axes_of(x, dims) if dims else ()), x)


@imports("roll")
def roll(site: Site, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    if not dims:
        return site.reshape(roll(site, site.reshape(x, (x.type.elements,)), shifts, (0,)), x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(x, dim)
        size = x.type.shape[axis]
        cut = -shift % max(size, 1)
        if cut:
            x = site.emit(Concat(axis), site.slice(x, axis, cut, size), site.slice(x, axis, 0, cut))
    return x


@imports("repeat")
def repeat(site: Site, x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - x.type.rank) + x.type.shape
    apart = [part for size in shape for part in (1, size)]
    repeated = [part for times, size in zip(repeats, shape, strict=True) for part in (times, size)]
    return site.reshape(site.broadcast(site.reshape(x, apart), repeated), site.result.shape)


@imports("repeat_interleave.self_int")
def repeat_interleave(site: Site, x: Value, repeats: int, dim: int | None, *_: Any) -> Value:
    if dim is None:
        x, dim = site.reshape(x, (x.type.elements,)), 0
    axis = axis_of(x, dim)
    before, after = x.type.shape[: axis + 1], x.type.shape[axis + 1 :]
    return site.reshape(
        site.broadcast(site.reshape(x, (*before, 1, *after)), (*before, repeats, *after)), site.result.shape
    )


@imports("constant_pad_nd")
def constant_pad_nd(site: Site, x: Value, pad: Sequence[int], number: float = 0) -> Value:
    """PyTorch lists paddings from the last axis backwards; negative ones cut."""
    before, after = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        before[-1 - i], after[-1 - i] = pad[2 * i], pad[2 * i + 1]
    for axis, size in enumerate(x.type.shape):
        if before[axis] < 0 or after[axis] < 0:
            x = site.slice(x, axis, max(-before[axis], 0), size - max(-after[axis], 0))
    filling = site.builder.scalar(number, x.type.dtype)
    return site.emit(Pad(tuple(max(b, 0) for b in before), tuple(max(a, 0) for a in after)), x, filling)


@imports("pad")
def pad_(site: Site, x: Value, pad: Sequence[int], mode: str, number: float | None = None) -> Value:
    return constant_pad_nd(site, x, pad, number or 0) if mode == "constant" else _padded(site, x, pad, _MODES[mode])


_MODES = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def _padded(site: Site, x: Value, pad: Sequence[int], mode: str) -> Value:
    """With the tensor's own elements, an axis at a time; before it goes round in circles, it is cut."""
    for i in range(len(pad) // 2):
        axis, before, after = x.type.rank - 1 - i, pad[2 * i], pad[2 * i + 1]
        if mode == "wrap" and min(before, after) < 0:
            x = site.slice(x, axis, max(-before, 0), x.type.shape[axis] - max(-after, 0))
            before, after = max(before, 0), max(after, 0)
        x = continued(site, x, axis, before, after, mode)
    return x


@imports("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(site: Site, x: Value, pad: Sequence[int]) -> Value:
    return _padded(site, x, pad, "reflect")


@imports("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(site: Site, x: Value, pad: Sequence[int]) -> Value:
    return _padded(site, x, pad, "edge")


@imports("diff")
@along_an_axis
def diff(site: Site, x: Value, times: int, dim: int, before: Value | None = None, after: Value | None = None) -> Value:
    """Each element less the one in front of it."""
    axis = axis_of(x, dim)
    parts = [site.cast(part, site.result.dtype) for part in (before, x, after) if part is not None]
    x = site.emit(Concat(axis), *parts) if len(parts) > 1 else x
    function = "not_equal" if x.type.dtype is DType.BOOL else "subtract"
    for size in range(x.type.shape[axis], max(x.type.shape[axis] - times, 0), -1):
        x = site.binary(function, site.slice(x, axis, 1, size), site.slice(x, axis, 0, size - 1))
    return x


def _triangle(site: Site, x: Value, comparison: str, diagonal: int) -> Value:
    rows, columns = x.type.shape[-2:]
    row = site.reshape(site.emit(Iota(rows, diagonal, 1, DType.INT64)), (rows, 1))
    column = site.emit(Iota(columns, 0, 1, DType.INT64))
    kept = site.binary(comparison, column, row)
    return site.emit(Where(), kept, x, site.filled(0, TensorType((), x.type.dtype)))


@imports("tril")
def tril(site: Site, x: Value, diagonal: int = 0) -> Value:
    return _triangle(site, x, "less_equal", diagonal)


@imports("triu")
def triu(site: Site, x: Value, diagonal: int = 0) -> Value:
    return _triangle(site, x, "greater_equal", diagonal)
