"""Operators that only move elements: a change of view where strides can say it, else copies in HBM."""

from dataclasses import replace

from emulator.graph import Node
from emulator.lower.lowering import Lowering, lowers
from emulator.ops import Broadcast, Concat, Flip, Reshape, Slice, SliceUpdate, Transpose


@lowers(Reshape)
def _reshape(low: Lowering, node: Node, op: Reshape) -> None:
    source = low.view(node.operands[0])
    view = source.reshaped(op.shape)
    if view is None:
        view = low.packed(source).reshaped(op.shape)
    low.alias(node.result, view or replace(source, shape=op.shape, strides=(0,) * len(op.shape)))


@lowers(Transpose)
def _transpose(low: Lowering, node: Node, op: Transpose) -> None:
    low.alias(node.result, low.view(node.operands[0]).transposed(op.order))


@lowers(Broadcast)
def _broadcast(low: Lowering, node: Node, op: Broadcast) -> None:
    low.alias(node.result, low.view(node.operands[0]).broadcast(op.shape))


@lowers(Slice)
def _slice(low: Lowering, node: Node, op: Slice) -> None:
    view = low.view(node.operands[0])
    cut = view.cut(*zip(op.starts, node.result.type.shape, strict=True))
    strides = tuple(stride * step for stride, step in zip(view.strides, op.steps, strict=True))
    low.alias(node.result, replace(cut, strides=strides))


@lowers(Flip)
def _flip(low: Lowering, node: Node, op: Flip) -> None:
    view = low.view(node.operands[0])
    for axis in op.axes:
        last = (view.shape[axis] - 1) * view.strides[axis]
        strides = (*view.strides[:axis], -view.strides[axis], *view.strides[axis + 1 :])
        view = replace(view, offset=view.offset + last, strides=strides)
    low.alias(node.result, view)


@lowers(Concat)
def _concat(low: Lowering, node: Node, op: Concat) -> None:
    home, start = low.home(node.result), 0
    for operand in node.operands:
        part = low.view(operand)
        spans = [(0, size) for size in part.shape]
        spans[op.axis] = (start, part.shape[op.axis])
        low.copy(home.cut(*spans), part)
        start += part.shape[op.axis]


@lowers(SliceUpdate)
def _slice_update(low: Lowering, node: Node, op: SliceUpdate) -> None:
    """In place where the result is to be where the operand is, as states are."""
    source, update = map(low.view, node.operands)
    home = low.home(node.result)
    if home != source:
        low.copy(home, source)
    hole = home.cut(*zip(op.starts, update.shape, strict=True))
    strides = tuple(stride * step for stride, step in zip(home.strides, op.steps, strict=True))
    low.copy(replace(hole, strides=strides), update)
