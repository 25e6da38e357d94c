"""Matrix products, attention and convolutions as StableHLO.

Operands are in their declared type and products are summed in float32: a `dot_general` or `convolution` of narrow
operands with a float32 result, which is what the tensor engine computes.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from nxpipe.emulator.hlo.arithmetic import as_float32, rounded, settled
from nxpipe.emulator.hlo.movement import rows as rows_of
from nxpipe.emulator.hlo.reductions import fold, running
from nxpipe.emulator.hlo.writer import HloWriter, Shape, Tensor
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ops import Attention, Convolution, GroupedMatMul
from nxpipe.emulator.ops.linalg import group_size

_LOWEST: Final = float(np.finfo(np.float32).min)


def linear(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    x, weight, *bias = operands
    result = w.dot(x, weight, ((), ()), (x.rank - 1, 1))
    for operand in bias:
        result = w.binary("add", result, w.expanded(as_float32(w, operand), result.shape))
    return settled(w, result, node.result.type.dtype)


def matmul(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    batch = node.result.type.shape[:-2]
    a, b = (w.expanded(x, (*batch, *x.shape[-2:])) for x in operands)
    return settled(w, _product(w, a, b), node.result.type.dtype)


def _product(w: HloWriter, a: Tensor, b: Tensor, *, transposed: bool = False) -> Tensor:
    """Matrix products of tensors with equal leading axes; `transposed`: with the transpose of the right matrices."""
    batch = range(b.rank - 2)
    return w.dot(a, b, (batch, batch), (a.rank - 1, b.rank - 1 if transposed else b.rank - 2))


def grouped_matmul(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """For fewer rows than groups, a matrix for each row; else a product with each matrix, of which rows take theirs."""
    rows, matrices, ends = operands
    assert isinstance(node.op, GroupedMatMul)
    count, groups = rows.shape[0], matrices.shape[0]
    shape = node.result.type.shape
    if 0 in (count, groups):
        return w.filled(0, shape, settled(w, w.filled(0, (), "f32"), node.op.out).element)
    group = _group_of_rows(w, ends, count)
    if count < groups:
        own = rows_of(w, matrices, w.binary("minimum", group, groups - 1), 0)
        product = w.reshape(_product(w, w.reshape(rows, (count, 1, rows.shape[1])), own), shape)
        inside = w.broadcast(w.compare("LT", group, groups), shape, (0,))
        return settled(w, w.select(inside, product, 0), node.op.out)
    result = w.filled(0, shape, "f32")
    for number in range(groups):
        matrix = w.reshape(w.part(matrices, 0, number, number + 1), matrices.shape[1:])
        is_own = w.broadcast(w.compare("EQ", group, number), shape, (0,))
        result = w.select(is_own, w.dot(rows, matrix, ((), ()), (1, 0)), result)
    return settled(w, result, node.op.out)


def _group_of_rows(w: HloWriter, ends: Tensor, count: int) -> Tensor:
    """The group of each row: the number of groups that end at it or before. A group that ends before an earlier one is
    empty."""
    lasts = running(w, "maximum", w.convert(ends, "i32"), 0)
    shape = (count, *lasts.shape)
    ended = w.compare("LE", w.broadcast(lasts, shape, (1,)), w.iota(shape, 0, "i32"))
    return fold(w, "add", w.convert(ended, "i32"), (1,))


def attention(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (q, k, v, *mask), type_ = node.op, operands, node.result.type
    assert isinstance(op, Attention)
    heads = (*type_.shape[:-1], k.shape[-2])  # the shape of scores, with one axis of query heads
    group = group_size(q.shape, k.shape)
    if group > 1:
        shared = (*q.shape[:-3], k.shape[-3])
        q = w.reshape(q, (*shared, group, *q.shape[-2:]))
    else:
        q, k, v = (w.expanded(x, (*type_.shape[:-2], *x.shape[-2:])) for x in (q, k, v))
    split = (*q.shape[:-1], k.shape[-2])
    scores = w.binary("multiply", _product(w, q, k, transposed=True), op.scale)
    visible = _causal(w, split) if op.causal else None
    for operand in mask:
        whole = w.reshape(w.expanded(operand, heads), split)
        if operand.element != "i1":
            scores = w.binary("add", scores, as_float32(w, whole))
        else:
            visible = whole if visible is None else w.binary("and", visible, whole)
    probabilities = rounded(w, _probabilities(w, scores, visible), op.probabilities)
    if op.probabilities is not node.operands[2].type.dtype:
        probabilities, v = as_float32(w, probabilities), as_float32(w, v)
    return settled(w, w.reshape(_product(w, probabilities, v), type_.shape), type_.dtype)


def _causal(w: HloWriter, shape: Shape) -> Tensor:
    """True where the position of a key is at most that of the query."""
    matrix = shape[-2:]
    return w.expanded(w.compare("GE", w.iota(matrix, 0, "i32"), w.iota(matrix, 1, "i32")), shape)


def _probabilities(w: HloWriter, scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the last axis. Infinities are avoided where keys are masked by truth values, since not every device
    computes with them; a row without visible keys has only zeros."""
    axes = (scores.rank - 1,)
    known = scores if visible is None else w.select(visible, scores, _LOWEST)
    kept = list(range(scores.rank - 1))
    highest = fold(w, "maximum", known, axes)
    finite = w.select(w.compare("EQ", highest, -math.inf), 0, highest)
    exponentials = w.unary("exponential", w.binary("subtract", scores, w.broadcast(finite, scores.shape, kept)))
    if visible is not None:
        exponentials = w.select(visible, exponentials, 0)
    total = fold(w, "add", exponentials, axes)
    divisor = w.select(w.compare("EQ", total, 0), 1, total)
    return w.binary("divide", exponentials, w.broadcast(divisor, scores.shape, kept))


def convolution(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, weight, *bias), type_ = node.op, operands, node.result.type
    assert isinstance(op, Convolution)
    if x.element.startswith("f8"):  # exact, and supported by every convolution
        x, weight = w.convert(x, "bf16"), w.convert(weight, "bf16")
    padded = w.pad(x, 0, (0, 0, *op.before), (0, 0, *op.after))
    result = w.convolution(padded, weight, type_.shape[2:], op.stride, op.dilation, op.groups)
    for operand in bias:
        result = w.binary("add", result, w.broadcast(as_float32(w, operand), result.shape, (1,)))
    return settled(w, result, type_.dtype)
