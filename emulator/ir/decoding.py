"""Decoding of graphs from untrusted bytes: the inverse of `encoding`.

Every count, number and name is checked before it is used, and `GraphBuilder` checks the graph like any other. The work
is at most linear in the number of bytes.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_type_hints

import numpy as np

from nxpipe.emulator.errors import GraphInvalid
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.encoding import MAGIC, PREFIX
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Origin, Value
from nxpipe.emulator.ir.types import DType, TensorType, is_reasonable
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import OPERATORS, Attribute, Operator


def _unpack(data: bytes, type_: TensorType) -> Array:
    if type_.dtype is DType.BFLOAT16:
        flat: Array = (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif type_.dtype is DType.FLOAT16:
        flat = np.frombuffer(data, "<f2").astype(np.float32)
    elif type_.dtype.is_float and type_.dtype.itemsize == 1:
        flat = np.frombuffer(data, type_.dtype.stored).astype(np.float32)
    elif type_.dtype is DType.BOOL:
        flat = np.unpackbits(np.frombuffer(data, np.uint8), count=type_.elements, bitorder="little").astype(np.bool_)
    else:
        flat = np.frombuffer(data, type_.dtype.held.newbyteorder("<")).astype(type_.dtype.held)
    return flat.reshape(type_.shape)


def decode(data: bytes) -> Graph:
    """The graph from its canonical bytes; raises GraphInvalid for any other bytes."""
    if len(data) < PREFIX.size:
        raise GraphInvalid(f"{len(data)} bytes are too few for a graph")
    magic, length = PREFIX.unpack_from(data)
    if magic != MAGIC or length > len(data) - PREFIX.size:
        raise GraphInvalid("the bytes do not begin with the header of a graph, or end inside the header")
    start = PREFIX.size + length
    try:
        header = json.loads(data[PREFIX.size : start].decode("ascii"))
    except (ValueError, RecursionError) as fault:
        raise GraphInvalid(f"the graph's header is not JSON: {fault}") from None
    graph = _Reader(header, memoryview(data)[start:]).graph()
    if graph.to_bytes() != data:
        raise GraphInvalid("the bytes are not the canonical form of the graph that they describe")
    return graph


class _Reader:
    """Builds a graph from an untrusted header."""

    def __init__(self, header: object, elements: memoryview) -> None:
        self._header = _shaped(header, dict)
        self._elements = elements
        self._builder = GraphBuilder()
        self._values: list[Value] = []

    def graph(self) -> Graph:
        for name, *type_ in self._rows("inputs", (str, str, list)):
            self._values.append(self._builder.input(name, read_type(*type_)))
        for name, *type_ in self._rows("parameters", (str, str, list)):
            self._values.append(self._builder.parameter(name, read_type(*type_)))
        for type_ in self._rows("constants", (str, list)):
            self._values.append(self._constant(read_type(*type_)))
        origins = [Origin(*row) for row in self._rows("origins", (str, str))]
        repeats = deque(_row(row, (int, int, int, list, list, list)) for row in self._section("repeats"))
        for position, row in enumerate(self._section("nodes"), 1):
            self._node(_shaped(row, list), origins)
            if repeats and repeats[0][1] == position:
                self._repeat(*repeats.popleft())
        if repeats:
            raise GraphInvalid(f"a repeat ends at node {str(repeats[0][1])[:40]}, which is absent or ends another")
        for name, number in self._rows("outputs", (str, int)):
            self._builder.output(name, self._value(number))
        return self._builder.build()

    def _section(self, name: str) -> list[Any]:
        section: list[Any] = _shaped(self._header.get(name), list)
        return section

    def _rows(self, section: str, kinds: tuple[type, ...]) -> Iterable[list[Any]]:
        for row in self._section(section):
            yield _row(row, kinds)

    def _constant(self, type_: TensorType) -> Value:
        size = -(-type_.elements // 8) if type_.dtype is DType.BOOL else type_.nbytes
        if size > len(self._elements):
            raise GraphInvalid(f"a constant of type {type_} needs {size} bytes, but {len(self._elements)} remain")
        data, self._elements = bytes(self._elements[:size]), self._elements[size:]
        return self._builder.constant(_unpack(data, type_), type_.dtype)

    def _node(self, row: list[Any], origins: list[Origin]) -> None:
        name, plain, operands = _row(row[:3], (str, dict, list))
        op = read_operator(name, plain)
        origin = NOWHERE
        if len(row) > 3:
            (index,) = _row(row[3:], (int,))
            if not 0 <= index < len(origins):
                raise GraphInvalid(f"a node has the origin {index}, but there are {len(origins)} origins")
            origin = origins[index]
        values = [self._value(_shaped(number, int)) for number in operands]
        self._values.append(self._builder.add(op, *values, origin=origin))

    def _repeat(self, start: int, stop: int, count: int, *tables: list[Any]) -> None:
        if count < 2:
            raise GraphInvalid(f"a repeat has the count {str(count)[:40]}")
        carried, taken, given = (
            self._links(table, width) for table, width in zip(tables, (2, count, count + 1), strict=True)
        )
        self._values += self._builder.repeat(
            (start, stop, count),
            carried={self._value(entry): self._value(leaving) for entry, leaving in carried},
            taken={self._value(first): tuple(map(self._value, later)) for first, *later in taken},
            # The numbers in the rest of the row are those that the builder assigns; the comparison with the canonical
            # form rejects others.
            given=[self._value(computed) for computed, *_ in given],
        )

    def _links(self, table: list[Any], width: int) -> list[list[int]]:
        rows = [[_shaped(number, int) for number in _shaped(row, list)] for row in table]
        if any(len(row) != width for row in rows):
            raise GraphInvalid(f"a table of a repeat does not have {str(width)[:40]} numbers in each row")
        return rows

    def _value(self, number: int) -> Value:
        if not 0 <= number < len(self._values):
            raise GraphInvalid(f"value {number} is used before it is defined")
        return self._values[number]


def _shaped(plain: object, kind: type) -> Any:
    # Compare the exact type, because True is an int in Python.
    if type(plain) is not kind:
        raise GraphInvalid(f"the header has {str(plain)[:40]!r} where a {kind.__name__} is required")
    return plain


def _row(plain: object, kinds: tuple[type, ...]) -> list[Any]:
    row: list[Any] = _shaped(plain, list)
    if len(row) != len(kinds):
        raise GraphInvalid(f"the header has a row of {len(row)} entries where {len(kinds)} are required")
    return [_shaped(entry, kind) for entry, kind in zip(row, kinds, strict=True)]


def _read_dtype(name: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise GraphInvalid(f"unknown element type {name[:40]!r}") from None


def read_type(dtype: str, sizes: list[Any]) -> TensorType:
    type_ = TensorType(tuple(_shaped(size, int) for size in sizes), _read_dtype(dtype))
    if min(type_.shape, default=0) < 0 or not is_reasonable(type_):
        raise GraphInvalid(f"a tensor of {type_.rank} axes has impossible sizes: {str(type_.shape)[:80]}")
    return type_


@cache
def _fields(kind: type[Operator]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def read_operator(name: str, plain: dict[str, Any]) -> Operator:
    kind = OPERATORS.get(name)
    if kind is None or plain.keys() != _fields(kind).keys():
        raise GraphInvalid(f"unknown operator {name[:40]!r} with attributes {str(sorted(plain))[:80]}")
    return kind(**{attribute: _read_attribute(hint, plain[attribute]) for attribute, hint in _fields(kind).items()})


def _read_attribute(hint: Any, plain: object) -> Attribute:
    if hint is float:
        return _read_float(_shaped(plain, str))
    if hint is DType:
        return _read_dtype(_shaped(plain, str))
    if hint in (bool, int, str):
        result: Attribute = _shaped(plain, hint)
        _require_word(result)
        return result
    numbers: tuple[Any, ...] = tuple(_shaped(entry, get_args(hint)[0]) for entry in _shaped(plain, list))
    for number in numbers:
        _require_word(number)
    return numbers


def _require_word(number: object) -> None:
    if isinstance(number, int | float) and not -(2**63) <= number < 2**63:
        raise GraphInvalid("an attribute does not fit 64 bits")


def _read_float(digits: str) -> float:
    try:
        return float.fromhex(digits)
    except (ValueError, OverflowError):
        raise GraphInvalid(f"{digits[:40]!r} is not a float in hexadecimal") from None
