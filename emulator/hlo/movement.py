"""Operators that move elements to places known in advance, as StableHLO."""

from collections.abc import Sequence

import numpy as np

from nxpipe.emulator.errors import NotExpressible
from nxpipe.emulator.hlo.arithmetic import truth
from nxpipe.emulator.hlo.writer import ELEMENTS, Tensor, Writer
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops.movement import (
    Bitcast,
    Broadcast,
    Concat,
    Flip,
    Iota,
    Pad,
    Reshape,
    Slice,
    SliceUpdate,
    Transpose,
)


def reshape(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Reshape)
    return w.reshape(operands[0], node.op.shape)


def transpose(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Transpose)
    return w.transpose(operands[0], node.op.order)


def broadcast(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Broadcast)
    return w.expanded(operands[0], node.op.shape)


def slice_(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op = node.op
    assert isinstance(op, Slice)
    return w.slice(operands[0], op.starts, op.stops, op.steps)


def slice_update(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """An update in place; where the window has gaps, a choice between the operand and the spread update."""
    op, (x, update) = node.op, operands
    assert isinstance(op, SliceUpdate)
    if 0 in update.shape:
        return x
    if all(step == 1 or size == 1 for step, size in zip(op.steps, update.shape, strict=True)):
        return w.update_slice(x, update, op.starts)
    spans = tuple((size - 1) * step + 1 for size, step in zip(update.shape, op.steps, strict=True))
    after = tuple(size - start - span for size, start, span in zip(x.shape, op.starts, spans, strict=True))
    between = tuple(step - 1 for step in op.steps)
    inside = w.pad(w.filled(True, update.shape, "i1"), False, op.starts, after, between)
    return w.select(inside, w.pad(update, 0, op.starts, after, between), x)


def concat(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Concat)
    return w.concatenate(operands, node.op.axis)


def pad(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, filling) = node.op, operands
    assert isinstance(op, Pad)
    return w.pad(x, filling, op.before, op.after)


def bitcast(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The same bytes; truth values are stored as bytes."""
    op, (x,) = node.op, operands
    assert isinstance(op, Bitcast)
    if op.source is op.dtype:
        return x
    if any(dtype.on_device.itemsize != dtype.itemsize for dtype in (op.source, op.dtype)):
        raise NotExpressible(f"{op.label} from {op.source} to {op.dtype}", "a device has no 64-bit integers")
    stored = w.convert(x, "ui8") if op.source is DType.BOOL else x
    target = "ui8" if op.dtype is DType.BOOL else ELEMENTS[op.dtype]
    before, after = op.source.itemsize, op.dtype.itemsize
    if before > after:
        stored = w.bitcast(stored, (*x.shape, before // after), target)
    elif before < after:
        split = (*x.shape[:-1], x.shape[-1] * before // after, after // before)
        stored = w.bitcast(w.reshape(stored, split), split[:-1], target)
    elif stored.element != target:
        stored = w.bitcast(stored, x.shape, target)
    result = w.reshape(stored, node.result.type.shape)
    return truth(w, result) if op.dtype is DType.BOOL else result


def flip(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    assert isinstance(node.op, Flip)
    return w.reverse(operands[0], node.op.axes)


def iota(w: Writer, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op = node.op
    assert isinstance(op, Iota)
    counted = w.iota((op.length,), 0, "i32")
    if op.step != 1:
        counted = w.binary("multiply", counted, _word(op.step))
    if op.start:
        counted = w.binary("add", counted, _word(op.start))
    return w.convert(counted, ELEMENTS[op.dtype])


def _word(number: int) -> int:
    """A number modulo 2^32, as an i32 holds it."""
    return int(np.asarray(number & 0xFFFFFFFF, np.uint32).astype(np.int32))
