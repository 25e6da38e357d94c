"""Operators that fold axes, as StableHLO: sums, extremes, norms, pooling, orders, matrix products and convolutions.

A fold has one operand; a position is found by comparison with the extreme. There is no `sort`, which the compiler
refuses for trn2 and trn3: a short axis is sorted by counting, a long one by a bitonic network.

Operands of products are in their declared type and products are summed in float32: a `dot_general` or `convolution` of
narrow operands with a float32 result, which is what the tensor engine computes.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from nxpipe.emulator.hlo.arithmetic import (
    as_float32,
    operand_of,
    reciprocal_root,
    rounded,
    settled,
    truth,
    widened,
)
from nxpipe.emulator.hlo.movement import rows as rows_of
from nxpipe.emulator.hlo.writer import ELEMENTS, HloWriter, Shape, Tensor, elements_of
from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import (
    ArgReduce,
    ArgSort,
    Attention,
    Convolution,
    Cumulate,
    GroupedMatMul,
    LayerNorm,
    Pool,
    Reduce,
    RmsNorm,
    Softmax,
)
from nxpipe.emulator.ops.linalg import group_size

_LOWEST: Final = float(np.finfo(np.float32).min)
_COUNTED: Final = 256  # the longest axis that is sorted by counting, whose work grows with the square of the length


def neutral(opcode: str, x: Tensor) -> float:
    """The number that a fold of the tensor's type begins with."""
    if opcode in ("add", "multiply"):
        return float(opcode == "multiply")
    if x.is_float:
        return -math.inf if opcode == "maximum" else math.inf
    limits = np.iinfo(x.numpy.name)
    return int(limits.min if opcode == "maximum" else limits.max)


def fold(w: HloWriter, opcode: str, x: Tensor, axes: Sequence[int]) -> Tensor:
    return w.reduce(opcode, x, axes, neutral(opcode, x))


def spread(w: HloWriter, opcode: str, x: Tensor, axes: Sequence[int]) -> Tensor:
    """The fold, repeated over the folded axes."""
    return w.reduced(opcode, x, axes, neutral(opcode, x))


_OPCODES: Final = {
    "all": "minimum",
    "any": "maximum",
    "max": "maximum",
    "mean": "add",
    "min": "minimum",
    "prod": "multiply",
    "sum": "add",
}


def reduce(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x,), type_ = node.op, operands, node.result.type
    assert isinstance(op, Reduce)
    opcode = _OPCODES[op.function]
    if op.function in ("all", "any"):
        x = w.convert(truth(w, x), "i32")
    elif x.element == "i1" or not x.is_float:
        x = w.convert(x, "i32" if x.element == "i1" else ELEMENTS[type_.dtype])
    wide = widened(w, x)
    initial = {"all": 1, "any": 0}.get(op.function, neutral(opcode, wide))
    result = w.reduce(opcode, wide, op.axes, initial)
    if op.function == "mean":
        result = w.binary("divide", result, elements_of(tuple(x.shape[axis] for axis in op.axes)))
    return w.reshape(settled(w, result, type_.dtype), type_.shape)


def arg_reduce(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The first position that holds the extreme; with NaN the first NaN, whether or not an extreme is NaN then."""
    op, (x,) = node.op, operands
    assert isinstance(op, ArgReduce)
    x = w.convert(x, "i32") if x.element == "i1" else widened(w, x)
    extreme = spread(w, "maximum" if op.function == "argmax" else "minimum", x, (op.axis,))
    first = _first_position(w, w.compare("EQ", x, extreme), op.axis)
    if x.is_float:
        first_nan = _first_position(w, w.compare("NE", x, x), op.axis)
        first = w.select(w.compare("LT", first_nan, x.shape[op.axis]), first_nan, first)
    return w.reshape(first, node.result.type.shape)


def _first_position(w: HloWriter, found: Tensor, axis: int) -> Tensor:
    """The first true position on an axis; the length of the axis if there is none."""
    positions = w.select(found, w.iota(found.shape, axis, "i32"), found.shape[axis])
    return fold(w, "minimum", positions, (axis,))


def cumulate(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x,), dtype = node.op, operands, node.result.type.dtype
    assert isinstance(op, Cumulate)
    opcode = {"cummax": "maximum", "cummin": "minimum", "cumprod": "multiply", "cumsum": "add"}[op.function]
    if x.element == "i1":
        x = w.convert(x, "i32")
    return settled(w, running(w, opcode, operand_of(w, x, dtype) if dtype is not DType.BOOL else x, op.axis), dtype)


def running(w: HloWriter, opcode: str, x: Tensor, axis: int) -> Tensor:
    """The fold of each element with all before it, in as many steps as the length has binary digits."""
    length, distance = x.shape[axis], 1
    while distance < length:
        before = tuple(distance if at == axis else 0 for at in range(x.rank))
        shifted = w.pad(w.part(x, axis, 0, length - distance), neutral(opcode, x), before, (0,) * x.rank)
        x = w.binary(opcode, x, shifted)
        distance *= 2
    return x


# Softmax and norms


def softmax(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x,) = node.op, operands
    assert isinstance(op, Softmax)
    wide = as_float32(w, x)
    shifted = w.binary("subtract", wide, spread(w, "maximum", wide, (op.axis,)))
    exponentials = w.unary("exponential", shifted)
    total = spread(w, "add", exponentials, (op.axis,))
    if op.log:
        return settled(w, w.binary("subtract", shifted, w.unary("log", total)), node.result.type.dtype)
    return settled(w, w.binary("divide", exponentials, total), node.result.type.dtype)


def _mean(w: HloWriter, x: Tensor, axes: int) -> Tensor:
    """The mean over the last axes, which are removed."""
    folded = range(x.rank - axes, x.rank)
    return w.binary("divide", fold(w, "add", x, folded), elements_of(x.shape[x.rank - axes :]))


def _over_rows(w: HloWriter, numbers: Tensor, shape: Shape) -> Tensor:
    """One number for each row, repeated over the last axes."""
    return w.broadcast(numbers, shape, range(numbers.rank))


def _scaled(w: HloWriter, x: Tensor, axes: int, epsilon: float) -> Tensor:
    """x divided by the root of the mean of its squares over the last axes."""
    mean_square = _mean(w, w.binary("multiply", x, x), axes)
    factor = reciprocal_root(w, w.binary("add", mean_square, epsilon))
    return w.binary("multiply", x, _over_rows(w, factor, x.shape))


def layer_norm(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, *affine) = node.op, operands
    assert isinstance(op, LayerNorm)
    wide = as_float32(w, x)
    centred = w.binary("subtract", wide, _over_rows(w, _mean(w, wide, op.axes), x.shape))
    result = _scaled(w, centred, op.axes, op.epsilon)
    for opcode, operand in zip(("multiply", "add"), affine, strict=False):
        result = w.binary(opcode, result, w.expanded(as_float32(w, operand), x.shape))
    return settled(w, result, node.result.type.dtype)


def rms_norm(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    op, (x, *weight) = node.op, operands
    assert isinstance(op, RmsNorm)
    result = _scaled(w, as_float32(w, x), op.axes, op.epsilon)
    for operand in weight:
        result = w.binary("multiply", result, w.expanded(as_float32(w, operand), x.shape))
    return settled(w, result, node.result.type.dtype)


# Pooling


def pool(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """Axis by axis, because a window's fold is that of the folds of its rows: one slice for each element of a row."""
    op, (x,), type_ = node.op, operands, node.result.type
    assert isinstance(op, Pool)
    opcode = "maximum" if op.function == "max_pool" else "add"
    result = widened(w, x)
    margin = ((0, 0, *op.before), (0, 0, *op.after))
    result = w.pad(result, neutral(opcode, result), *margin)
    for axis, (length, stride, dilation) in enumerate(zip(op.window, op.stride, op.dilation, strict=True), start=2):
        result = _pooled(w, opcode, result, axis, (length, stride, dilation, type_.shape[axis]))
    return settled(w, result, type_.dtype)


def _pooled(w: HloWriter, opcode: str, x: Tensor, axis: int, window: tuple[int, int, int, int]) -> Tensor:
    length, stride, dilation, positions = window
    if positions == dilation == 1:
        part = w.part(x, axis, 0, length)
        return w.reshape(fold(w, opcode, part, (axis,)), (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    result = None
    for place in range(0, length * dilation, dilation):
        stop = place + (positions - 1) * stride + 1 if positions else place
        part = w.part(x, axis, place, stop, stride)
        result = part if result is None else w.binary(opcode, result, part)
    assert result is not None
    return result


# Order


def arg_sort(w: HloWriter, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """Elements are ordered by a key and, where keys are equal, by a rank, which is different for each element: its
    position, after or before all others if the element is NaN, for which the key is an infinity."""
    op, (x,) = node.op, operands
    assert isinstance(op, ArgSort)
    axis, length = op.axis, x.shape[op.axis]
    key = w.convert(x, "i32") if x.element == "i1" else widened(w, x)
    rank = w.iota(x.shape, axis, "i32")
    if key.is_float:
        is_nan = w.compare("NE", key, key)
        key = w.select(is_nan, math.inf, key)
        last = w.unary("not", is_nan) if op.descending else is_nan
        rank = w.binary("add", rank, w.select(last, w.like(rank, length), 0))
    order = _Order("GT" if op.descending else "LT", axis, length)
    sort = order.counted if length <= _COUNTED else order.network
    return sort(w, key, rank)


class _Order:
    """The sorting of an axis; `before` is the comparison of keys for which the first operand comes first."""

    def __init__(self, before: str, axis: int, length: int) -> None:
        self._before, self._axis, self._length = before, axis, length

    def _precedes(self, w: HloWriter, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        is_equal = w.binary("and", w.compare("EQ", one[0], other[0]), w.compare("LT", one[1], other[1]))
        return w.binary("or", w.compare(self._before, one[0], other[0]), is_equal)

    def counted(self, w: HloWriter, key: Tensor, rank: Tensor) -> Tensor:
        """The place of an element is the number of elements before it; its position is then found at that place."""
        axis, shape = self._axis, key.shape
        square = (*shape[:axis], self._length, self._length, *shape[axis + 1 :])
        down = [at if at <= axis else at + 1 for at in range(key.rank)]  # the first of the two axes
        across = [at if at < axis else at + 1 for at in range(key.rank)]
        rows, columns = ((w.broadcast(key, square, axes), w.broadcast(rank, square, axes)) for axes in (down, across))
        places = fold(w, "add", w.convert(self._precedes(w, rows, columns), "i32"), (axis,))
        at_place = w.compare("EQ", w.broadcast(places, square, down), w.iota(square, axis + 1, "i32"))
        positions = w.select(at_place, w.iota(square, axis, "i32"), 0)
        return fold(w, "add", positions, (axis,))

    def network(self, w: HloWriter, key: Tensor, rank: Tensor) -> Tensor:
        """Batcher's bitonic network over the next power of two: log2(n)^2 / 2 steps of comparisons in pairs."""
        shape, size = key.shape, 1 << (self._length - 1).bit_length()
        outer, inner = elements_of(shape[: self._axis]), elements_of(shape[self._axis + 1 :])
        flat = (outer, self._length, inner)
        missing = (0, size - self._length, 0)
        last = neutral("maximum" if self._before == "GT" else "minimum", key)
        key = w.pad(w.reshape(key, flat), last, (0, 0, 0), missing)
        rank = w.reshape(rank, flat)
        if missing[1]:  # behind all others, each with a rank of its own
            behind = w.binary("add", w.iota((outer, missing[1], inner), 1, "i32"), 2 * self._length)
            rank = w.concatenate((rank, behind), 1)
        span = 2
        while span <= size:
            distance = span // 2
            while distance:
                key, rank = self._exchange(w, key, rank, distance, span)
                distance //= 2
            span *= 2
        rank = w.part(rank, 1, 0, self._length)
        wrapped = w.binary("subtract", rank, self._length)
        return w.reshape(w.select(w.compare("GE", rank, self._length), wrapped, rank), shape)

    def _exchange(self, w: HloWriter, key: Tensor, rank: Tensor, distance: int, span: int) -> tuple[Tensor, Tensor]:
        """One step: elements at a distance are exchanged unless they are in order; every other span is in reverse."""
        outer, size, inner = key.shape
        blocks = size // (2 * distance)
        split: Shape = (outer, blocks, 2, distance, inner)
        half: Shape = (outer, blocks, 1, distance, inner)
        pairs = [[w.part(w.reshape(x, split), 2, side, side + 1) for x in (key, rank)] for side in (0, 1)]
        low, high = ((pair[0], pair[1]) for pair in pairs)
        in_order = self._precedes(w, low, high)
        if span < size:
            reverse = (np.arange(blocks) * 2 * distance // span % 2).astype(np.bool_)
            in_order = w.binary("xor", in_order, w.broadcast(w.table(reverse, "i1"), half, (1,)))
        result = []
        for one, other in zip(low, high, strict=True):
            parts = w.select(in_order, one, other), w.select(in_order, other, one)
            result.append(w.reshape(w.concatenate(parts, 2), key.shape))
        return result[0], result[1]


# Contractions


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
