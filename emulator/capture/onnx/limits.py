"""Limits of the work and memory that an ONNX file may cause, and the error for a file that exceeds them.

A file of a few kilobytes can cause any amount of work: nested loops, functions that call each other, tables of any
size. Each limit is several times the need of the largest exported models. Fields are counted in the encoded file,
before protobuf allocates messages: an empty message takes two bytes in the file and a hundred in memory. Bytes of
tensors are skipped, so files with large weights are counted quickly.
"""

from functools import cache
from typing import Any, Final

from onnx import ModelProto

from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import NOWHERE, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Operator

MiB: Final = 2**20

FILE_BYTES: Final = 2**31 - 1  # the limit of protobuf
FILE_FIELDS: Final = 2_000_000  # of all messages; the bytes of a tensor are one field, a node has about ten
UNCOUNTED_BYTES: Final = 4 * MiB  # files up to this size are not counted; their messages take little memory
FILE_NODES: Final = 50_000  # a decoder of 80 layers has 20,000 when it is exported without functions
FILE_NAMES: Final = 2_000_000  # operands, results and attributes of all nodes
NAME_CHARACTERS: Final = 1024  # the name of an ONNX node is in the origin of each of its graph nodes
EXPANDED_NODES: Final = 150_000  # nodes read and created with functions and loops expanded; about a minute
LOOP_ITERATIONS: Final = 4096  # of one unrolled loop
DEPTH: Final = 48  # of nested bodies and calls; Python's recursion limit is about three times that
CONSTANT_BYTES: Final = 1024 * MiB  # all tables that the importer creates or reads
SHARED_DATA: Final = 4  # average number of tensors per byte of external data; tied weights have two


class BeyondLimit(CaptureError):
    """A file exceeds a limit of the importer."""

    def __init__(self, name: str, what: str, count: int, limit: int, remedy: str) -> None:
        super().__init__(f"{name} {what.format(f'{count:,}')}, and the limit is {limit:,}; {remedy}")


class BoundedBuilder(GraphBuilder):
    """A graph builder that counts nodes and the bytes of tables, and raises BeyondLimit above the limits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._steps = 0
        self._bytes = 0

    def step(self, count: int = 1) -> None:
        """Count nodes that were read or created, or an equal amount of work."""
        self._steps += count
        if self._steps > EXPANDED_NODES:
            raise BeyondLimit(
                self._name,
                "has more than {} nodes with its loops and functions expanded",
                EXPANDED_NODES,
                EXPANDED_NODES,
                "use operators on whole tensors in place of loops, or export a smaller part of the model",
            )

    def handle(self, nbytes: int) -> None:
        """Count bytes of tables that were created or read."""
        self._bytes += nbytes
        if self._bytes > CONSTANT_BYTES:
            raise BeyondLimit(
                self._name,
                "computes with {} bytes of constants",
                self._bytes,
                CONSTANT_BYTES,
                "make large tables initialisers, which are weights, or compute them at run time",
            )

    def add(self, op: Operator, *operands: Value, origin: Origin = NOWHERE) -> Value:
        self.step()
        return super().add(op, *operands, origin=origin)

    def constant(self, data: Array, dtype: DType) -> Value:
        self.handle(data.nbytes)
        return super().constant(data, dtype)


_VARINT, _FIXED64, _BYTES, _GROUP, _END_OF_GROUP, _FIXED32 = range(6)


def require_few_fields(data: bytes, name: str) -> None:
    """Raise BeyondLimit for an encoded model with too many fields. Damaged files pass: the parser refuses them."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    try:
        count = _count_fields(data)
    except IndexError:
        return
    if count > FILE_FIELDS:
        remedy = "export the model in smaller parts, with its weights as raw data"
        raise BeyondLimit(name, "has more than {} fields", FILE_FIELDS, FILE_FIELDS, remedy)


def _count_fields(data: bytes) -> int:
    stack, count = [(0, len(data), ModelProto.DESCRIPTOR)], 0
    while stack:
        at, end, kind = stack.pop()
        messages = _message_fields(kind)
        while at < end and count <= FILE_FIELDS:
            count += 1
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _BYTES:
                length, at = _varint(data, at)
                if tag >> 3 in messages:
                    stack.append((at, min(at + length, end), messages[tag >> 3]))
                at += length
            elif wire == _VARINT:
                _, at = _varint(data, at)
            else:
                at += {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
    return count


@cache
def _message_fields(kind: Any) -> dict[int, Any]:
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
