"""Inputs of a program: validation before a run, and reproducible sample inputs from a seed.

Invalid inputs would give a wrong result without an error: a token id beyond the end of its table reads unrelated memory
or another rank's part of the table, and an integer too wide for its type wraps to another number.
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
# Operators whose results are elements of their operand, unchanged.
_LAYOUT_OPS = (Broadcast, Cast, Flip, Reshape, Slice, Transpose)


def require_inputs(graph: Graph, given: Mapping[str, Array], states: Mapping[str, "Sharding"] = NOT_DIVIDED) -> None:
    """Raise InputsInvalid for inputs that are unknown, missing, or outside the range of their type or lookup table.

    For the graph of one rank, `states` is the sharding of its states.
    """
    for name in given:
        if name not in graph.inputs:
            nearest = difflib.get_close_matches(name, graph.inputs, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise InputsInvalid(f"unknown input {name!r}; the program takes {', '.join(sorted(graph.inputs))}{hint}")
    for name, value in graph.inputs.items():
        if name not in given:
            expected = _type_text(value.type.dtype, value.type.shape)
            raise InputsInvalid(f"input {name!r} is missing; pass it as {expected}")
        sharding = states.get(name)
        _require_type(name, sharding.whole(value.type) if sharding else value.type, np.asarray(given[name]))
    for name, value in graph.inputs.items():
        if not value.type.dtype.is_float:
            _require_range(name, np.asarray(given[name]), graph)


def _require_type(name: str, expected: TensorType, array: Array) -> None:
    declared = expected.dtype
    if array.shape != expected.shape or _kind(array) != _kind(np.empty(0, declared.held)):
        if reason := _other_size(name, array.shape, expected.shape):
            raise InputsInvalid(reason)
        actual, required = _type_text(array.dtype, array.shape), _type_text(declared, expected.shape)
        raise InputsInvalid(f"input {name!r} is {actual}, but the program takes {required}; pass that type and shape")
    if not array.size or declared is DType.BOOL:
        return
    if declared.is_float:
        finite = np.abs(array[np.isfinite(array)].astype(np.float64))
        largest = finite.max(initial=0.0)
        with np.errstate(over="ignore"):
            rounded = round_to(np.asarray([largest], np.float32), declared)
        if not np.isfinite(rounded).all():
            raise InputsInvalid(f"input {name!r} holds {largest:.6g}, which is beyond the range of {declared.value}")
    else:
        limits = np.iinfo(np.dtype(declared.value))
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            worst = low if low < limits.min else high
            raise InputsInvalid(
                f"input {name!r} holds {worst}, and {declared.value} is from {limits.min} to {limits.max}"
            )


_BATCHED: Final = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "pixel_values")
_OF_TEXT: Final = _BATCHED[:-1]


def _other_size(name: str, actual: tuple[int, ...], required: tuple[int, ...]) -> str | None:
    """The sentence about an input that has another batch or length than the program was compiled for."""
    if name not in _BATCHED or len(actual) != len(required):
        return None
    different = [axis for axis, sizes in enumerate(zip(actual, required, strict=True)) if sizes[0] != sizes[1]]
    if different == [0]:
        rows = f"{required[0]} row{'' if required[0] == 1 else 's'}"
        return (
            f"input {name!r} has batch {actual[0]}, and this program was compiled for batch {required[0]}; build with "
            f"--batches {actual[0]}, or pass {rows}"
        )
    if different == [1] and name in _OF_TEXT:
        return (
            f"input {name!r} has {actual[1]:,} tokens, and this program was compiled for a bucket of {required[1]:,}; "
            f"pad it to {required[1]}, or build with --buckets {actual[1]}"
        )
    return None


def _require_range(name: str, array: Array, graph: Graph) -> None:
    if not array.size:
        return
    low, high = int(array.min()), int(array.max())
    for least, rows in lookups(graph.inputs[name], graph):
        if low < least or high >= rows:
            worst = high if high >= rows else low
            raise InputsInvalid(
                f"input {name!r} holds {worst}, which is outside the lookup table of size {rows}; "
                f"pass numbers from 0 to {rows - 1}, such as the ids of the model's own tokenizer"
            )
    if name == "attention_mask" and not {low, high} <= {0, 1}:
        raise InputsInvalid(f"input {name!r} holds {high if high > 1 else low}; a mask is 1 for a token, 0 for padding")
    cache = graph.inputs.get("cache.0.key") if name == "position" else None
    capacity = None if cache is None else cache.type.shape[2]
    if capacity is not None and not 0 <= low <= high <= capacity - _tokens(graph):
        worst = low if low < 0 else high
        raise InputsInvalid(
            f"input {name!r} holds {worst}, but the KV cache has positions 0 to {capacity - 1} and the program writes "
            f"{_tokens(graph)} from there"
        )


def _tokens(graph: Graph) -> int:
    """The tokens that a step reads in each row of the KV cache."""
    return graph.inputs["input_ids"].type.shape[1]


def lookups(value: Value, graph: Graph) -> Iterator[tuple[int, int]]:
    """The lookup tables that an input indexes, each as the least legal index and the number of rows.

    A sharded table counts with the rows of all ranks, because the input's indices are global.
    """
    carriers, local, tables = {value}, set[Value](), dict[Value, int]()
    for node in graph.nodes:
        first = node.operands[0] if node.operands else None
        if isinstance(node.op, RankSlice):
            tables[node.result] = node.operands[0].type.shape[node.op.axis]
        if isinstance(node.op, Cast) and first in tables:
            tables[node.result] = tables[node.operands[0]]
        if isinstance(node.op, _LAYOUT_OPS) and first in carriers:
            carriers.add(node.result)
        elif tables and _is_sharded_lookup(node, carriers, local):
            local.add(node.result)
        for index, least, rows in _indexed(node):
            if index in carriers:
                yield least, rows
            elif index in local and node.operands[0] in tables:
                yield 0, tables[node.operands[0]]


def _is_sharded_lookup(node: Node, carriers: Set[Value], local: Set[Value]) -> bool:
    """True if a node belongs to a lookup in a sharded table: ids minus the rank's first row, and 0 for other ranks'
    rows."""
    if isinstance(node.op, Binary):
        return node.op.function == "subtract" and node.operands[0] in carriers
    return isinstance(node.op, Where) and node.operands[1] in local


def _indexed(node: Node) -> Iterator[tuple[Value, int, int]]:
    if isinstance(node.op, Gather | TakeAlong):
        yield node.operands[1], 0, node.operands[0].type.shape[node.op.axis]
    if isinstance(node.op, Index):  # negative indices count from the end
        shape = node.operands[0].type.shape
        for axis, index in zip(node.op.axes, node.operands[1:], strict=True):
            yield index, -shape[axis], shape[axis]


def _type_text(dtype: object, shape: tuple[int, ...]) -> str:
    name = dtype.value if isinstance(dtype, DType) else str(dtype)
    return f"{name} {list(shape)}"


def _kind(array: Array) -> str:
    """Boolean, integer or float. numpy reports bfloat16, an extension type, as void; it counts as float."""
    if array.dtype == np.bool_:
        return "boolean"
    return "integer" if np.issubdtype(array.dtype, np.integer) else "float"


def example_inputs(graph: Graph, config: Mapping[str, object], seed: int) -> dict[str, Array]:
    """Sample inputs: attention masks of ones, integers within their lookup tables except padding, normal floats."""
    return {name: _example(name, value, graph, config, seed) for name, value in graph.inputs.items()}


def _example(name: str, value: Value, graph: Graph, config: Mapping[str, object], seed: int) -> Array:
    shape, dtype = value.type.shape, value.type.dtype
    if "mask" in name:
        return np.ones(shape, dtype.held)
    # Seeded by name, so that adding an input does not change the others.
    generator = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
    if name == "position":  # the next position of each row, in a KV cache that is half full if it can be
        end = graph.inputs["cache.0.key"].type.shape[2] - _tokens(graph) + 1
        return generator.integers(end // 2, end, shape, dtype.held)
    if dtype.is_float:
        return round_to(generator.standard_normal(shape, np.float32), dtype)
    allowed = np.arange(_rows_of_table(value, graph, config))
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and len(allowed) > 1:
        allowed = allowed[allowed != padding]
    return generator.choice(allowed, shape).astype(dtype.held)


def _rows_of_table(value: Value, graph: Graph, config: Mapping[str, object]) -> int:
    """The number of rows of the smallest table that the input indexes; 2 if it indexes none."""
    rows = {size for _, size in lookups(value, graph)}
    vocabulary = config.get("vocab_size")
    if rows and isinstance(vocabulary, int):
        rows.add(vocabulary)
    return min(rows, default=2)
