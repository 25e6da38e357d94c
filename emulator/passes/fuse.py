"""Fusion: replaces decomposed norms, activations and attention by fused operators of the hardware.

Each pattern matches a computation in the graph, operation by operation. The result may differ in the last bit of
float32 only, because intermediate results are no longer rounded. `recognise_causal` replaces causal masks by causal
attention, in which each row sees the keys up to its own position.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Concat,
    Flip,
    Linear,
    MatMul,
    Reduce,
    Reshape,
    RmsNorm,
    Slice,
    Softmax,
    Transpose,
    Unary,
)
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite

_FLOAT32 = DType.FLOAT32


def fuse(graph: Graph, _: PassOptions) -> Graph:
    """Replace the last operation of each matching pattern by the fused operator; the other operations become dead."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        value, candidate, view = None, replace(node, operands=operands), _View(builder)
        while (match := _first_match(view, candidate)) is not None:  # a fusion may enable another one
            value, fused = match, builder.node_of(match)
            if fused is None:
                break
            candidate = fused
        return keep(builder, node, operands) if value is None else value

    return rewrite(graph, rebuild)


@dataclass(frozen=True)
class _View:
    """Pattern matching on the definitions of values in the new graph."""

    builder: GraphBuilder

    def binary(self, value: Value, function: str) -> tuple[Value, Value] | None:
        """The two operands, if a binary function with this name defines the value."""
        node = self.builder.node_of(value)
        if node is None or node.op != Binary(function):
            return None
        return node.operands[0], node.operands[1]

    def unary(self, value: Value, function: str) -> Value | None:
        node = self.builder.node_of(value)
        return node.operands[0] if node is not None and node.op == Unary(function) else None

    def scalar(self, value: Value) -> float | None:
        """The number, if the value is a constant of rank 0."""
        table = self.builder.table_of(value)
        return float(table[()]) if table is not None and not table.ndim else None

    def scaled(self, value: Value, function: str = "multiply") -> tuple[Value, float] | None:
        """The other operand and the number, if the value combines a value with a constant number on either side."""
        pair = self.binary(value, function)
        for operand, other in (pair, pair[::-1]) if pair else ():
            number = self.scalar(other)
            if number is not None:
                return operand, number
        return None

    def is_scaled(self, value: Value, function: str, number: float) -> Value | None:
        """The other operand, if the value combines it with exactly this number in float32."""
        match = self.scaled(value, function)
        return match[0] if match and np.float32(match[1]) == np.float32(number) else None


def _first_match(view: _View, node: Node) -> Value | None:
    candidates = (pattern(view, node) for pattern in PATTERNS)
    return next((value for value in candidates if value is not None and value.type == node.result.type), None)


def _sides(pair: tuple[Value, Value] | None) -> tuple[tuple[Value, Value], ...]:
    return (pair, (pair[1], pair[0])) if pair else ()


def rms_norm(view: _View, node: Node) -> Value | None:
    """x * rsqrt(mean(x * x) + epsilon) over the last axis, then a scale, which may be a weight plus one."""
    if node.op != Binary("multiply"):
        return None
    for x, inverse in _sides((node.operands[0], node.operands[1])):
        epsilon = _inverse_root_mean_square(view, x, inverse)
        if epsilon is not None:
            return view.builder.add(RmsNorm(1, epsilon), x, origin=node.origin)
    for x, scale in _sides((node.operands[0], node.operands[1])):
        norm = view.builder.node_of(x)
        unscaled = norm is not None and isinstance(norm.op, RmsNorm) and norm.op.axes == len(norm.operands) == 1
        if norm is not None and unscaled and scale.type == x.type.with_shape(x.type.shape[-1:]):
            return view.builder.add(norm.op, norm.operands[0], scale, origin=node.origin)
    return None


def _inverse_root_mean_square(view: _View, x: Value, inverse: Value) -> float | None:
    """The epsilon, if `inverse` is the reciprocal root of the mean square of the rows of `x`."""
    shifted = view.unary(inverse, "rsqrt")
    mean = view.scaled(shifted, "add") if shifted else None
    node = view.builder.node_of(mean[0]) if mean else None
    if mean is None or node is None or x.type.dtype is not _FLOAT32:
        return None
    if node.op != Reduce("mean", (x.type.rank - 1,), keep=True):
        return None
    return mean[1] if view.binary(node.operands[0], "multiply") == (x, x) else None


def tanh_gelu(view: _View, node: Node) -> Value | None:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), in the variants that models use."""
    if node.op != Binary("multiply"):
        return None
    for half, factor in _sides((node.operands[0], node.operands[1])):
        x = view.is_scaled(half, "multiply", 0.5)
        one_plus = view.is_scaled(factor, "add", 1.0)
        inner = view.unary(one_plus, "tanh") if one_plus else None
        if x is not None and inner is not None and (_cubic(view, x, inner) or _factored_cubic(view, x, inner)):
            return view.builder.add(Unary("gelu_tanh"), x, origin=node.origin)
    return None


_ROOT = float(np.sqrt(2 / np.pi))


def _near(value: float, number: float) -> bool:
    """True if a constant is `number` within 1e-6: models round such constants to different numbers of digits."""
    return abs(value - number) <= 1e-6 * abs(number)


def _cubic(view: _View, x: Value, inner: Value) -> bool:
    """sqrt(2/pi) * (x + 0.044715 * x**3)"""
    outer = view.scaled(inner)
    if outer is None or not _near(outer[1], _ROOT):
        return False
    for left, right in _sides(view.binary(outer[0], "add")):
        term = view.scaled(right)
        if left == x and term is not None and _near(term[1], 0.044715) and _is_cube(view, x, term[0]):
            return True
    return False


def _is_cube(view: _View, x: Value, value: Value) -> bool:
    power = view.binary(value, "power")
    if power is not None:
        return power[0] == x and view.scalar(power[1]) == 3
    return any(a == x and view.binary(b, "multiply") == (x, x) for a, b in _sides(view.binary(value, "multiply")))


def _factored_cubic(view: _View, x: Value, inner: Value) -> bool:
    """(sqrt(2/pi) * x) * (1 + (0.044715 * x) * x)"""
    for scaled, factor in _sides(view.binary(inner, "multiply")):
        outer, square = view.scaled(scaled), view.scaled(factor, "add")
        if outer is None or square is None or outer[0] != x or not _near(outer[1], _ROOT) or square[1] != 1:
            continue
        for term, other in _sides(view.binary(square[0], "multiply")):
            small = view.scaled(term)
            if other == x and small is not None and small[0] == x and _near(small[1], 0.044715):
                return True
    return False


def bias(view: _View, node: Node) -> Value | None:
    """A float32 matrix product plus a bias row."""
    for product, row in _sides((node.operands[0], node.operands[1])) if node.op == Binary("add") else ():
        linear = view.builder.node_of(product)
        if linear is None or linear.op != Linear(_FLOAT32) or len(linear.operands) != 2 or product.type.rank < 2:
            continue
        if row.type.shape == product.type.shape[-1:] and row.type.dtype.is_float:
            return view.builder.add(linear.op, *linear.operands, row, origin=node.origin)
    return None


def silu(view: _View, node: Node) -> Value | None:
    """x * sigmoid(x)"""
    for x, gate in _sides((node.operands[0], node.operands[1])) if node.op == Binary("multiply") else ():
        if view.unary(gate, "sigmoid") == x:
            return view.builder.add(Unary("silu"), x, origin=node.origin)
    return None


def grouped_heads(view: _View, node: Node) -> Value | None:
    """Grouped-query attention: remove the repetition of key and value heads, which the attention operator performs."""
    if not isinstance(node.op, Attention):
        return None
    query, key, value, *mask = node.operands
    unrepeated = [_unrepeated(view, key), _unrepeated(view, value)]
    if unrepeated[0] is None or unrepeated[1] is None or unrepeated[0].type.shape[:-1] != unrepeated[1].type.shape[:-1]:
        return None
    if query.type.shape[:-3] != unrepeated[0].type.shape[:-3] or query.type.shape[-3] != key.type.shape[-3]:
        return None
    return view.builder.add(node.op, query, *[v for v in unrepeated if v is not None], *mask, origin=node.origin)


def _unrepeated(view: _View, heads: Value) -> Value | None:
    """The heads before repetition: [..., heads / n, length, width], if `heads` is a broadcast of them to n copies."""
    merged = view.builder.node_of(heads)
    repeated = view.builder.node_of(merged.operands[0]) if merged and isinstance(merged.op, Reshape) else None
    if repeated is None or not isinstance(repeated.op, Broadcast) or heads.type.rank < 3:
        return None
    narrow, wide = repeated.operands[0].type.shape, repeated.op.shape
    if len(wide) != heads.type.rank + 1 or narrow != (*wide[:-3], 1, *wide[-2:]):
        return None
    if heads.type.shape != (*wide[:-4], wide[-4] * wide[-3], *wide[-2:]):
        return None
    expanded = view.builder.node_of(repeated.operands[0])
    shape = (*wide[:-3], *wide[-2:])
    if expanded is not None and isinstance(expanded.op, Reshape) and expanded.operands[0].type.shape == shape:
        return expanded.operands[0]
    return view.builder.add(Reshape(shape), repeated.operands[0], origin=repeated.origin)


def decomposed_attention(view: _View, node: Node) -> Value | None:
    """softmax(scale * (q k^T) + mask) v: attention in models that do not call a fused operator."""
    if not isinstance(node.op, MatMul):
        return None
    softmax = view.builder.node_of(node.operands[0])
    if softmax is None or softmax.op != Softmax(node.operands[0].type.rank - 1, log=False):
        return None
    scores, masks = _masked(view, softmax.operands[0])
    product, scale = _scores(view, scores)
    if product is None or not isinstance(product.op, MatMul) or product.op.out is not _FLOAT32:
        return None
    query, key_t, value = *product.operands, node.operands[1]
    transposed = view.builder.node_of(key_t)
    rank = key_t.type.rank
    order = (*range(rank - 2), rank - 1, rank - 2)
    batched_alike = query.type.shape[:-2] == key_t.type.shape[:-2] == value.type.shape[:-2] and rank >= 3
    if not batched_alike or len({query.type.dtype, key_t.type.dtype, value.type.dtype}) > 1:
        return None
    key = _untransposed(view, transposed, key_t, order, node)
    op = Attention(scale=scale, causal=False, probabilities=softmax.result.type.dtype, out=node.op.out)
    return view.builder.add(op, query, key, value, *masks, origin=node.origin)


def _untransposed(view: _View, transposed: Node | None, key_t: Value, order: tuple[int, ...], node: Node) -> Value:
    """The keys before the transposition, which canonicalisation may have merged with another one."""
    if transposed is not None and isinstance(transposed.op, Transpose):
        if transposed.op.order == order:
            return transposed.operands[0]
        merged = tuple(transposed.op.order[axis] for axis in order)
        return view.builder.add(Transpose(merged), transposed.operands[0], origin=node.origin)
    return view.builder.add(Transpose(order), key_t, origin=node.origin)


def _masked(view: _View, value: Value) -> tuple[Value, list[Value]]:
    """The scores, and the float mask that is added to them, if any."""
    for scores, mask in _sides(view.binary(value, "add")):
        if scores.type.shape != value.type.shape or scores.type.dtype is not _FLOAT32 or not mask.type.dtype.is_float:
            continue
        if _scores(view, scores)[0] is not None and not _can_hide_all(view, mask):
            return scores, [mask]
    return value, []


def _can_hide_all(view: _View, mask: Value) -> bool:
    """True if a mask may hide all keys of a row. Such a row is NaN when decomposed, but 0 in fused attention."""
    table = view.builder.table_of(mask)
    if table is not None:
        return bool(np.isneginf(table).all(axis=-1).any())
    node = view.builder.node_of(mask)
    return node is not None and any(view.scalar(operand) == -np.inf for operand in node.operands)


def _scores(view: _View, value: Value) -> tuple[Node | None, float]:
    """The matrix product of the scores, and the scale that is applied to it."""
    scaled, divided = view.scaled(value), view.binary(value, "divide")
    divisor = view.scalar(divided[1]) if divided else None
    if scaled is not None:
        value, scale = scaled
    elif divided is not None and divisor:
        value, scale = divided[0], 1 / divisor
    else:
        scale = 1.0
    node = view.builder.node_of(value)
    return (node if node is not None and isinstance(node.op, MatMul) else None), scale


def swapped_halves(view: _View, node: Node) -> Value | None:
    """concat(-x[h:], x[:h]) * y, as in rotary embeddings: the halves of x in the opposite order are a view, and the
    signs are applied to y, which all heads share. Changes of sign are exact."""
    for joined, factor in _sides(_factors(node)):
        halves = _halves(view, joined)
        if halves is None or factor.type.shape[-1:] != joined.type.shape[-1:]:
            continue
        x, signs = halves
        half, rank = x.type.shape[-1] // 2, x.type.rank

        def split(value: Value, half: int = half) -> Value:
            return view.builder.add(Reshape((*value.type.shape[:-1], 2, half)), value, origin=node.origin)

        flipped = view.builder.add(Flip((rank - 1,)), split(x), origin=node.origin)
        scale = split(factor)
        if signs != (1, 1):
            table = view.builder.constant(np.array(signs, np.float32)[:, None], factor.type.dtype)
            scale = view.builder.add(Binary("multiply"), scale, table, origin=node.origin)
        product = view.builder.add(Binary("multiply"), flipped, scale, origin=node.origin)
        return view.builder.add(Reshape(node.result.type.shape), product, origin=node.origin)
    return None


def _factors(node: Node) -> tuple[Value, Value] | None:
    if node.op != Binary("multiply") or not all(operand.type.dtype.is_float for operand in node.operands):
        return None
    return node.operands[0], node.operands[1]


def _halves(view: _View, value: Value) -> tuple[Value, tuple[int, int]] | None:
    """The x of a concatenation of the second and the first half of x along the last axis, with the sign of each."""
    joined = view.builder.node_of(value)
    if joined is None or joined.op != Concat(value.type.rank - 1) or len(joined.operands) != 2:
        return None
    sources, signs = [], []
    for number, operand in enumerate(joined.operands):
        part = view.builder.node_of(operand)
        signs.append(1)
        if part is not None and part.op == Unary("negate"):
            signs[-1], part = -1, view.builder.node_of(part.operands[0])
        if part is None or not isinstance(part.op, Slice):
            return None
        (x,), (*outer, size) = part.operands, part.operands[0].type.shape
        first = 0 if number else size // 2
        starts, stops = (*(0,) * len(outer), first), (*outer, first + size // 2)
        if size % 2 or part.op != Slice(starts, stops, (1,) * x.type.rank):
            return None
        sources.append(x)
    return (sources[0], (signs[0], signs[1])) if sources[0] == sources[1] else None


Pattern = Callable[[_View, Node], Value | None]
PATTERNS: tuple[Pattern, ...] = (rms_norm, tanh_gelu, silu, bias, decomposed_attention, grouped_heads, swapped_halves)


def recognise_causal(graph: Graph, _: PassOptions) -> Graph:
    """Replace attention with a causal mask by causal attention, which reads no mask and skips hidden scores."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        if not isinstance(node.op, Attention) or node.op.causal or len(operands) < 4:
            return keep(builder, node, operands)
        *matrices, mask = operands
        rows, keys = operands[0].type.shape[-2], operands[1].type.shape[-2]
        if mask.type.dtype is not DType.BOOL or not _is_causal(builder, mask, rows, keys):
            return keep(builder, node, operands)
        return builder.add(replace(node.op, causal=True), *matrices, origin=node.origin)

    return rewrite(graph, rebuild)


def _is_causal(builder: GraphBuilder, mask: Value, rows: int, keys: int) -> bool:
    """True if a mask is causal: as a constant table, or as a comparison of known positions."""
    if mask.type.elements != rows * keys or mask.type.shape[-2:] != (rows, keys):
        return False
    table = builder.table_of(mask)
    if table is not None:
        return bool(np.array_equal(table.reshape(rows, keys), np.tri(rows, keys, dtype=np.bool_)))
    positions = _compared_positions(builder, mask)
    return positions is not None and _is_lower_triangular(*positions)


def _compared_positions(builder: GraphBuilder, mask: Value) -> tuple[Array, Array] | None:
    """The known positions of keys and rows, if the mask is `key position <= row position`."""
    node = builder.node_of(mask)
    if node is None or node.op not in (Binary("less_equal"), Binary("greater_equal")):
        return None
    key, row = node.operands if node.op == Binary("less_equal") else node.operands[::-1]
    key_positions, row_positions = builder.table_of(key), builder.table_of(row)
    if (
        key_positions is None
        or row_positions is None
        or key_positions.size != mask.type.shape[-1]
        or row_positions.size != mask.type.shape[-2]
    ):
        return None
    aligned = key.type.shape[-1:] == mask.type.shape[-1:] and row.type.shape[-2:] == (mask.type.shape[-2], 1)
    return (key_positions.reshape(-1), row_positions.reshape(-1)) if aligned else None


def _is_lower_triangular(keys: Array, rows: Array) -> bool:
    """True if each row attends to exactly the keys up to its own index."""
    visible = np.minimum(np.arange(1, rows.size + 1), keys.size)
    last_visible = np.maximum.accumulate(keys)[visible - 1]
    first_hidden = np.minimum.accumulate(keys[::-1])[::-1][np.minimum(visible, keys.size - 1)]
    return bool(((last_visible <= rows) & ((visible == keys.size) | (rows < first_hidden))).all())
