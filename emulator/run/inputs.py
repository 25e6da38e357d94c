"""Inputs of a program: validation before it runs, and sample inputs, equal for equal seeds on every machine.

A token id beyond the end of its table would read unrelated memory, or another rank's part of the table; an integer too
wide for its type would become another number. Both would give a result, and a wrong one.
"""

import difflib
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Final

import numpy as np

from nxpipe.emulator.errors import InputsInvalid
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, round_to
from nxpipe.emulator.ops import (
    Binary,
    Broadcast,
    Cast,
    Flip,
    Gather,
    Index,
    RankSlice,
    Reshape,
    Slice,
    TakeAlong,
    Transpose,
    Where,
)

if TYPE_CHECKING:
    from nxpipe.emulator.passes.shard import Sharding


NOT_DIVIDED: Final[Mapping[str, "Sharding"]] = {}
# The results of these are elements of their operand, unchanged.
_ARRANGING = (Broadcast, Cast, Flip, Reshape, Slice, Transpose)


def require_inputs(graph: Graph, given: Mapping[str, Array], states: Mapping[str, "Sharding"] = NOT_DIVIDED) -> None:
    """Raise InputsInvalid for inputs that are unknown, missing, or outside of their types or tables.

    The graph may be one rank's: then `states` gives the sharding of its states.
    """
    for name in given:
        if name not in graph.inputs:
            near = difflib.get_close_matches(name, graph.inputs, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputsInvalid(f"unknown input {name!r}; the program takes {', '.join(sorted(graph.inputs))}{hint}")
    for name, value in graph.inputs.items():
        if name not in given:
            raise InputsInvalid(f"input {name!r} is missing; pass it as {_spelled(value.type.dtype, value.type.shape)}")
        piece = states.get(name)
        _require_type(name, piece.whole(value.type) if piece else value.type, np.asarray(given[name]))
    for name, value in graph.inputs.items():
        if not value.type.dtype.is_float:
            _require_meaning(name, np.asarray(given[name]), graph)


def _require_type(name: str, wanted: TensorType, array: Array) -> None:
    declared = wanted.dtype
    if array.shape != wanted.shape or _kind(array) != _kind(np.empty(0, declared.held)):
        found, takes = _spelled(array.dtype, array.shape), _spelled(declared, wanted.shape)
        raise InputsInvalid(f"input {name!r} is {found}, and the program takes {takes}; pass that type and shape")
    if not array.size or declared is DType.BOOL:
        return
    if declared.is_float:
        finite = np.abs(array[np.isfinite(array)].astype(np.float64))
        largest = finite.max(initial=0.0)
        with np.errstate(over="ignore"):
            kept = round_to(np.asarray([largest], np.float32), declared)
        if not np.isfinite(kept).all():
            raise InputsInvalid(f"input {name!r} holds {largest:.6g}, which is beyond what {declared.value} can hold")
    else:
        held = np.iinfo(np.dtype(declared.value))
        low, high = int(array.min()), int(array.max())
        if low < held.min or high > held.max:
            worst = low if low < held.min else high
            raise InputsInvalid(f"input {name!r} holds {worst}, and {declared.value} is from {held.min} to {held.max}")


def _require_meaning(name: str, array: Array, graph: Graph) -> None:
    if not array.size:
        return
    low, high = int(array.min()), int(array.max())
    for least, rows in lookups(graph.inputs[name], graph):
        if low < least or high >= rows:
            worst = high if high >= rows else low
            raise InputsInvalid(
                f"input {name!r} holds {worst}, which is outside of the lookup table of size {rows}; "
                f"pass numbers from 0 to {rows - 1}, such as the ids of the model's own tokenizer"
            )
    if name == "attention_mask" and not {low, high} <= {0, 1}:
        raise InputsInvalid(f"input {name!r} holds {high if high > 1 else low}; a mask is 1 for a token, 0 for padding")
    room = graph.inputs["cache.0.key"].type.shape[2] if name == "position" and "cache.0.key" in graph.inputs else None
    if room is not None and not 0 <= low <= high < room:
        worst = high if high >= room else low
        raise InputsInvalid(f"input {name!r} holds {worst}, and the KV cache has positions 0 to {room - 1}")


def lookups(value: Value, graph: Graph) -> Iterator[tuple[int, int]]:
    """The lookup tables of this input: the least allowed index, and the number of rows.

    Of a rank's share of a table, all rows count: the others are another rank's.
    """
    carriers, local, tables = {value}, set[Value](), dict[Value, int]()
    for node in graph.nodes:
        first = node.operands[0] if node.operands else None
        if isinstance(node.op, RankSlice):
            tables[node.result] = node.operands[0].type.shape[node.op.axis]
        if isinstance(node.op, Cast) and first in tables:
            tables[node.result] = tables[node.operands[0]]
        if isinstance(node.op, _ARRANGING) and first in carriers:
            carriers.add(node.result)
        elif tables and _counts_from_own_rows(node, carriers, local):
            local.add(node.result)
        for index, least, rows in _indexed(node):
            if index in carriers:
                yield least, rows
            elif index in local and node.operands[0] in tables:
                yield 0, tables[node.operands[0]]


def _counts_from_own_rows(node: Node, carriers: Set[Value], local: Set[Value]) -> bool:
    """The lookup in a rank's rows of a divided table: ids less its first row, and 0 for rows of other ranks."""
    if isinstance(node.op, Binary):
        return node.op.function == "subtract" and node.operands[0] in carriers
    return isinstance(node.op, Where) and node.operands[1] in local


def _indexed(node: Node) -> Iterator[tuple[Value, int, int]]:
    if isinstance(node.op, Gather | TakeAlong):
        yield node.operands[1], 0, node.operands[0].type.shape[node.op.axis]
    if isinstance(node.op, Index):  # which counts negative numbers from the end
        shape = node.operands[0].type.shape
        for axis, index in zip(node.op.axes, node.operands[1:], strict=True):
            yield index, -shape[axis], shape[axis]


def _spelled(dtype: object, shape: tuple[int, ...]) -> str:
    name = dtype.value if isinstance(dtype, DType) else str(dtype)
    return f"{name} {list(shape)}"


def _kind(array: Array) -> str:
    """Boolean, integer or float; numpy files bfloat16 under void, because an extension brings it."""
    if array.dtype == np.bool_:
        return "boolean"
    return "integer" if np.issubdtype(array.dtype, np.integer) else "float"


def example_inputs(graph: Graph, config: Mapping[str, object], seed: int) -> dict[str, Array]:
    """Attention masks of ones, integers that index their tables and avoid padding, and normal floats."""
    return {name: _example(name, value, graph, config, seed) for name, value in graph.inputs.items()}


def _example(name: str, value: Value, graph: Graph, config: Mapping[str, object], seed: int) -> Array:
    shape, dtype = value.type.shape, value.type.dtype
    if "mask" in name:
        return np.ones(shape, dtype.held)
    # Seeded by name, so that adding an input does not change the others.
    generator = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
    if name == "position":  # each row's next place in a cache that is half full or more
        capacity = graph.inputs["cache.0.key"].type.shape[2]
        return generator.integers(capacity // 2, capacity, shape, dtype.held)
    if dtype.is_float:
        return round_to(generator.standard_normal(shape, np.float32), dtype)
    allowed = np.arange(_rows_of_table(value, graph, config))
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and len(allowed) > 1:
        allowed = allowed[allowed != padding]
    return generator.choice(allowed, shape).astype(dtype.held)


def _rows_of_table(value: Value, graph: Graph, config: Mapping[str, object]) -> int:
    """How many rows the smallest table has that this input indexes; two, when it indexes none."""
    rows = {size for _, size in lookups(value, graph)}
    vocabulary = config.get("vocab_size")
    if rows and isinstance(vocabulary, int):
        rows.add(vocabulary)
    return min(rows, default=2)
