"""Data movement: reshapes, transposes, slices and the like are views where strides can express them, else copies in
HBM."""

from dataclasses import replace

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.lower.lowering import Lowering, NotLowered, lowers, operand_views
from nxpipe.emulator.lower.tiles import fill
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Bitcast, Broadcast, Concat, Flip, Pad, Reshape, Slice, SliceUpdate, Transpose


@lowers(Reshape)
def _reshape(low: Lowering, node: Node, op: Reshape) -> None:
    source = low.stored_view(node.operands[0])
    low.alias(node.result, source.reshaped(op.shape) or low.packed(source).packed_as(op.shape))


@lowers(Transpose)
def _transpose(low: Lowering, node: Node, op: Transpose) -> None:
    low.alias(node.result, low.stored_view(node.operands[0]).transposed(op.order))


@lowers(Broadcast)
def _broadcast(low: Lowering, node: Node, op: Broadcast) -> None:
    low.alias(node.result, low.stored_view(node.operands[0]).broadcast(op.shape))


@lowers(Slice)
def _slice(low: Lowering, node: Node, op: Slice) -> None:
    view = low.stored_view(node.operands[0])
    low.alias(node.result, _window(view, op.starts, node.result.type.shape, op.steps))


def _window(view: View, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]) -> View:
    strides = tuple(stride * step for stride, step in zip(view.strides, steps, strict=True))
    return replace(view.cut(*zip(starts, sizes, strict=True)), strides=strides)


@lowers(Flip)
def _flip(low: Lowering, node: Node, op: Flip) -> None:
    view = low.stored_view(node.operands[0])
    for axis in op.axes:
        last = max(view.shape[axis] - 1, 0) * view.strides[axis]
        strides = (*view.strides[:axis], -view.strides[axis], *view.strides[axis + 1 :])
        view = replace(view, offset=view.offset + last, strides=strides)
    low.alias(node.result, view)


@lowers(Concat)
def _concat(low: Lowering, node: Node, op: Concat) -> None:
    home = low.home(node.result)
    for operand, place in zip(node.operands, operand_views(home, node), strict=True):
        part = low.stored_view(operand)
        if part != place:
            low.copy(place, part)


@lowers(SliceUpdate)
def _slice_update(low: Lowering, node: Node, op: SliceUpdate) -> None:
    update = low.stored_view(node.operands[1])
    home = low.updated(node)
    low.copy(_window(home, op.starts, update.shape, op.steps), update)


@lowers(Pad)
def _pad(low: Lowering, node: Node, op: Pad) -> None:
    """The border is filled in slabs, one before and one behind each axis, inside of those of the axes before it."""
    source, filling = low.stored_view(node.operands[0]), node.operands[1]
    inner = low.home(node.result)
    number = low.number(filling)
    for axis, (before, size) in enumerate(zip(op.before, source.shape, strict=True)):
        behind = inner.shape[axis] - before - size
        around = [(0, each) for each in inner.shape]
        for start, thick in ((0, before), (before + size, behind)):
            slab = inner.cut(*around[:axis], (start, thick))
            if number is None:
                low.copy(slab, low.view(filling).broadcast(slab.shape))
            else:
                fill(low.k, slab, number)
        inner = inner.cut(*around[:axis], (before, size))
    low.copy(inner, source)


@lowers(Bitcast)
def _bitcast(low: Lowering, node: Node, op: Bitcast) -> None:
    """Elements of another size need a row's bytes contiguous, before and after."""
    if any(dtype.on_device.itemsize != dtype.itemsize for dtype in (op.source, op.dtype)):
        raise NotLowered(f"cannot reinterpret {op.source} as {op.dtype}: a NeuronCore has no 64-bit integers")
    source, dtype = low.view(node.operands[0]), op.dtype.on_device
    before, after = source.dtype.itemsize, dtype.itemsize
    if before == after:
        low.alias(node.result, replace(source, dtype=dtype))
        return
    flat = low.packed(source)
    if flat.offset.terms or flat.offset.turns or flat.offset.base:
        flat = low.copied(flat)
    low.alias(node.result, replace(flat, dtype=dtype).packed_as(node.result.type.shape))
