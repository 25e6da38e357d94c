"""Masks that say what attention knows by itself: each row sees the keys up to its own place, and no other."""

from dataclasses import replace

import numpy as np

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Attention, Binary
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.rewrite import keep, rewrite


def recognise_causal(graph: Graph, _: PassOptions) -> Graph:
    """Attention then reads no mask, and makes no scores that nobody sees."""

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
    """Each row is at or behind the keys up to its own, in whatever order those are, and before all others."""
    seen = np.minimum(np.arange(1, rows.size + 1), keys.size)
    furthest = np.maximum.accumulate(keys)[seen - 1]
    nearest = np.minimum.accumulate(keys[::-1])[::-1][np.minimum(seen, keys.size - 1)]
    return bool(((furthest <= rows) & ((seen == keys.size) | (rows < nearest))).all())
