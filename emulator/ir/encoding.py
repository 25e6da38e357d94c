"""Canonical encoding of a graph: equal graphs have equal bytes on every machine, and each graph has one encoding.

    8 bytes   magic "NXGRAPH2"
    8 bytes   length of the header, little-endian
    header    JSON in ASCII, keys sorted, no spaces
    data      the constants' elements, little-endian, one after another in the header's order

The header has `inputs`, `parameters` ([name, dtype, shape] each), `constants` ([dtype, shape]), `nodes` ([operator,
attributes, operand numbers] and, if known, an index into `origins`), `origins` ([module, source]), `outputs`
([name, number]) and `repeats` ([start, stop, count, carried, taken, given], the last three as rows of numbers). Values
are numbered in order of appearance: inputs, parameters, constants, nodes; the `given` values of a repeat follow its
last node. Result types are not stored, because shape rules infer them. Float attributes are exact C99 hexadecimal
strings. bfloat16 elements take two bytes, tfloat32 elements four, booleans one bit.

`decoding` encodes the graph again and compares, so it accepts the canonical bytes only.
"""

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nxpipe.emulator.ir.nodes import NOWHERE, Node, Origin, Repeat, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Attribute, attributes

if TYPE_CHECKING:
    from nxpipe.emulator.ir.graph import Graph

MAGIC: Final = b"NXGRAPH2"
PREFIX: Final = struct.Struct("<8sQ")


def encode(graph: "Graph") -> bytes:
    """The canonical bytes of a graph whose values are numbered in order of appearance."""
    origins = {
        origin: i for i, origin in enumerate(dict.fromkeys(n.origin for n in graph.nodes if n.origin != NOWHERE))
    }
    header = {
        "constants": [_plain_type(value.type) for value in graph.constants],
        "inputs": _plain_interface(graph.inputs),
        "nodes": [_plain_node(node, origins) for node in graph.nodes],
        "origins": [[origin.module, origin.source] for origin in origins],
        "outputs": [[name, value.id] for name, value in graph.outputs.items()],
        "parameters": _plain_interface(graph.parameters),
        "repeats": [_plain_repeat(repeat) for repeat in graph.repeats],
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    elements = (_pack(data, value.type.dtype) for value, data in graph.constants.items())
    return b"".join([PREFIX.pack(MAGIC, len(text)), text, *elements])


def _plain_type(type_: TensorType) -> list[Any]:
    return [type_.dtype.value, list(type_.shape)]


def _plain_interface(values: Mapping[str, Value]) -> list[list[Any]]:
    return [[name, *_plain_type(value.type)] for name, value in values.items()]


def _plain_node(node: Node, origins: Mapping[Origin, int]) -> list[Any]:
    plain = {name: _plain_attribute(attribute) for name, attribute in attributes(node.op).items()}
    origin = [origins[node.origin]] if node.origin in origins else []
    return [node.op.name, plain, [operand.id for operand in node.operands], *origin]


def _plain_repeat(repeat: Repeat) -> list[Any]:
    carried = [[entry.id, leaving.id] for entry, leaving in repeat.carried.items()]
    taken = [[first.id, *(value.id for value in later)] for first, later in repeat.taken.items()]
    given = [[value.id, *(result.id for result in results)] for value, results in repeat.given.items()]
    return [repeat.start, repeat.stop, repeat.count, carried, taken, given]


def _plain_attribute(attribute: Attribute) -> object:
    if isinstance(attribute, float):
        return attribute.hex()
    return list(attribute) if isinstance(attribute, tuple) else attribute


def _pack(data: Array, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:
        return (data.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    if dtype is DType.FLOAT16:
        return data.astype("<f2").tobytes()
    if dtype.is_float and dtype.itemsize == 1:
        return data.astype(dtype.stored).tobytes()
    if dtype is DType.BOOL:
        return np.packbits(data, axis=None, bitorder="little").tobytes()
    return data.astype(data.dtype.newbyteorder("<")).tobytes()
