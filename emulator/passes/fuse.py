"""Fusion: norms, activations and attention written out, replaced by operators that the hardware executes as one.

Every pattern names a computation that stands in the graph already, operation for operation. The result may differ in
the last bit of float32, because the parts' intermediate results are no longer rounded, and in no more than that.
`recognise_causal` removes masks that attention knows by itself: each row sees the keys up to its own position.
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
    Linear,
    MatMul,
    Reduce,
    Reshape,
    RmsNorm,
    Softmax,
    Transpose,
    Unary,
)
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite

_FLOAT32 = DType.FLOAT32


def fuse(graph: Graph, _: PassOptions) -> Graph:
    """Replace the last operation of each pattern by the whole; what it no longer reads is dead."""

    def rebuild(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value:
        value, candidate, view = None, replace(node, operands=operands), _View(builder)
        while (found := _first_found(view, candidate)) is not None:  # one fusion may make the next one possible
            value, fused = found, builder.node_of(found)
            if fused is None:
                break
            candidate = fused
        return keep(builder, node, operands) if value is None else value

    return rewrite(graph, rebuild)


@dataclass(frozen=True)
class _View:
    """Looks backwards through the new graph."""

    builder: GraphBuilder

    def binary(self, value: Value, function: str) -> tuple[Value, Value] | None:
        """The two operands, if a binary function of this name made the value."""
        node = self.builder.node_of(value)
        if node is None or node.op != Binary(function):
            return None
        return node.operands[0], node.operands[1]

    def unary(self, value: Value, function: str) -> Value | None:
        node = self.builder.node_of(value)
        return node.operands[0] if node is not None and node.op == Unary(function) else None

    def scalar(self, value: Value) -> float | None:
        """The number, if the value is a constant of rank zero."""
        table = self.builder.table_of(value)
        return float(table[()]) if table is not None and not table.ndim else None

    def scaled(self, value: Value, function: str = "multiply") -> tuple[Value, float] | None:
        """A value and the number that it is combined with, on either side."""
        pair = self.binary(value, function)
        for kept, other in (pair, pair[::-1]) if pair else ():
            number = self.scalar(other)
            if number is not None:
                return kept, number
        return None

    def is_scaled(self, value: Value, function: str, number: float) -> Value | None:
        """The other operand, if the value combines it with exactly this number (as float32)."""
        found = self.scaled(value, function)
        return found[0] if found and np.float32(found[1]) == np.float32(number) else None


def _first_found(view: _View, node: Node) -> Value | None:
    candidates = (pattern(view, node) for pattern in PATTERNS)
    return next((found for found in candidates if found is not None and found.type == node.result.type), None)


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
    """The epsilon, if a value is one over the root of the mean square of another's rows."""
    shifted = view.unary(inverse, "rsqrt")
    mean = view.scaled(shifted, "add") if shifted else None
    node = view.builder.node_of(mean[0]) if mean else None
    if mean is None or node is None or x.type.dtype is not _FLOAT32:
        return None
    if node.op != Reduce("mean", (x.type.rank - 1,), keep=True):
        return None
    return mean[1] if view.binary(node.operands[0], "multiply") == (x, x) else None


def tanh_gelu(view: _View, node: Node) -> Value | None:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), in the spellings that models use."""
    if node.op != Binary("multiply"):
        return None
    for half, rest in _sides((node.operands[0], node.operands[1])):
        x = view.is_scaled(half, "multiply", 0.5)
        one_plus = view.is_scaled(rest, "add", 1.0)
        inner = view.unary(one_plus, "tanh") if one_plus else None
        if x is not None and inner is not None and (_cubic(view, x, inner) or _factored_cubic(view, x, inner)):
            return view.builder.add(Unary("gelu_tanh"), x, origin=node.origin)
    return None


_ROOT = float(np.sqrt(2 / np.pi))


def _near(found: float, number: float) -> bool:
    """Models write constants with as many digits as their authors had patience for."""
    return abs(found - number) <= 1e-6 * abs(number)


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
    """A product in float32, and the addition of a row to each of its rows."""
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
    """Key heads repeated for each query head that they serve: attention does that by itself."""
    if not isinstance(node.op, Attention):
        return None
    query, key, value, *mask = node.operands
    single = [_unrepeated(view, key), _unrepeated(view, value)]
    if single[0] is None or single[1] is None or single[0].type.shape[:-1] != single[1].type.shape[:-1]:
        return None
    if query.type.shape[:-3] != single[0].type.shape[:-3] or query.type.shape[-3] != key.type.shape[-3]:
        return None
    return view.builder.add(node.op, query, *[v for v in single if v is not None], *mask, origin=node.origin)


def _unrepeated(view: _View, heads: Value) -> Value | None:
    """[..., heads, length, width], from [..., heads / n, 1 -> n, length, width]."""
    merged = view.builder.node_of(heads)
    repeated = view.builder.node_of(merged.operands[0]) if merged and isinstance(merged.op, Reshape) else None
    if repeated is None or not isinstance(repeated.op, Broadcast) or heads.type.rank < 3:
        return None
    narrow, wide = repeated.operands[0].type.shape, repeated.op.shape
    if len(wide) != heads.type.rank + 1 or narrow != (*wide[:-3], 1, *wide[-2:]):
        return None
    if heads.type.shape != (*wide[:-4], wide[-4] * wide[-3], *wide[-2:]):
        return None
    spread = view.builder.node_of(repeated.operands[0])
    wanted = (*wide[:-3], *wide[-2:])
    if spread is not None and isinstance(spread.op, Reshape) and spread.operands[0].type.shape == wanted:
        return spread.operands[0]
    return view.builder.add(Reshape(wanted), repeated.operands[0], origin=repeated.origin)


def written_out_attention(view: _View, node: Node) -> Value | None:
    """softmax(scale * (q k^T) + mask) v, as models without a fused attention write it."""
    if not isinstance(node.op, MatMul):
        return None
    softmax = view.builder.node_of(node.operands[0])
    if softmax is None or softmax.op != Softmax(node.operands[0].type.rank - 1, log=False):
        return None
    scores, masks = _masked(view, softmax.operands[0])
    product, scale = _scores(view, scores)
    if product is None or not isinstance(product.op, MatMul) or product.op.out is not _FLOAT32:
        return None
    query, turned, value = *product.operands, node.operands[1]
    transposed = view.builder.node_of(turned)
    rank = turned.type.rank
    turn = (*range(rank - 2), rank - 1, rank - 2)
    plain = query.type.shape[:-2] == turned.type.shape[:-2] == value.type.shape[:-2] and rank >= 3
    if not plain or len({query.type.dtype, turned.type.dtype, value.type.dtype}) > 1:
        return None
    key = _turned_back(view, transposed, turned, turn, node)
    op = Attention(scale=scale, causal=False, probabilities=softmax.result.type.dtype, out=node.op.out)
    return view.builder.add(op, query, key, value, *masks, origin=node.origin)


def _turned_back(view: _View, transposed: Node | None, turned: Value, turn: tuple[int, ...], node: Node) -> Value:
    """The keys before they were transposed; canonicalisation may have merged that with another transposition."""
    if transposed is not None and isinstance(transposed.op, Transpose):
        if transposed.op.order == turn:
            return transposed.operands[0]
        order = tuple(transposed.op.order[axis] for axis in turn)
        return view.builder.add(Transpose(order), transposed.operands[0], origin=node.origin)
    return view.builder.add(Transpose(turn), turned, origin=node.origin)


def _masked(view: _View, value: Value) -> tuple[Value, list[Value]]:
    """Scores, and the float mask that is added to them, if one is."""
    for scores, mask in _sides(view.binary(value, "add")):
        if scores.type.shape != value.type.shape or scores.type.dtype is not _FLOAT32 or not mask.type.dtype.is_float:
            continue
        if _scores(view, scores)[0] is not None and not _can_hide_all(view, mask):
            return scores, [mask]
    return value, []


def _can_hide_all(view: _View, mask: Value) -> bool:
    """A row of minus infinities is not a number when written out, and zero in fused attention."""
    table = view.builder.table_of(mask)
    if table is not None:
        return bool(np.isneginf(table).all(axis=-1).any())
    node = view.builder.node_of(mask)
    return node is not None and any(view.scalar(operand) == -np.inf for operand in node.operands)


def _scores(view: _View, value: Value) -> tuple[Node | None, float]:
    """The matrix product that made the scores, and the scale applied to it."""
    scaled, divided = view.scaled(value), view.binary(value, "divide")
    by = view.scalar(divided[1]) if divided else None
    if scaled is not None:
        value, scale = scaled
    elif divided is not None and by:
        value, scale = divided[0], 1 / by
    else:
        scale = 1.0
    node = view.builder.node_of(value)
    return (node if node is not None and isinstance(node.op, MatMul) else None), scale


Pattern = Callable[[_View, Node], Value | None]
PATTERNS: tuple[Pattern, ...] = (rms_norm, tanh_gelu, silu, bias, written_out_attention, grouped_heads)


def recognise_causal(graph: Graph, _: PassOptions) -> Graph:
    """Attention then reads no mask, and computes no scores that the mask would hide."""

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
    """A table that says so, or the comparison of places that would make it."""
    if mask.type.elements != rows * keys or mask.type.shape[-2:] != (rows, keys):
        return False
    table = builder.table_of(mask)
    if table is not None:
        return bool(np.array_equal(table.reshape(rows, keys), np.tri(rows, keys, dtype=np.bool_)))
    places = _compared(builder, mask)
    return places is not None and _sees_up_to_itself(*places)


def _compared(builder: GraphBuilder, mask: Value) -> tuple[Array, Array] | None:
    """Known places of keys and of rows, where a key's has to be at most the row's."""
    node = builder.node_of(mask)
    if node is None or node.op not in (Binary("less_equal"), Binary("greater_equal")):
        return None
    key, row = node.operands if node.op == Binary("less_equal") else node.operands[::-1]
    of_keys, of_rows = builder.table_of(key), builder.table_of(row)
    if of_keys is None or of_rows is None or of_keys.size != mask.type.shape[-1] or of_rows.size != mask.type.shape[-2]:
        return None
    along = key.type.shape[-1:] == mask.type.shape[-1:] and row.type.shape[-2:] == (mask.type.shape[-2], 1)
    return (of_keys.reshape(-1), of_rows.reshape(-1)) if along else None


def _sees_up_to_itself(keys: Array, rows: Array) -> bool:
    """Each row attends to the keys up to its own position, in any order, and to no others."""
    seen = np.minimum(np.arange(1, rows.size + 1), keys.size)
    furthest = np.maximum.accumulate(keys)[seen - 1]
    nearest = np.minimum.accumulate(keys[::-1])[::-1][np.minimum(seen, keys.size - 1)]
    return bool(((furthest <= rows) & ((seen == keys.size) | (rows < nearest))).all())
