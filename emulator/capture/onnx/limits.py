"""Limits on what an ONNX file may demand of the compiler, and the error for a file that exceeds them.

A file of a few kilobytes can demand any amount of work: loops in loops, functions that call each other, tables of any
size. Each limit is several times the need of the largest exported models. Messages are counted in the bytes of the
file, before protobuf allocates them: an empty message takes two bytes in a file and a hundred in memory. Bytes of
tensors are skipped, so that files that are large because of their weights are counted quickly.
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

FILE_BYTES: Final = 2**31 - 1  # protobuf reads no message that is longer
FILE_FIELDS: Final = 2_000_000  # fields of all messages, the bytes of a tensor being one; a node takes about ten
UNCOUNTED_BYTES: Final = 4 * MiB  # as many parts as that can have take no more memory
FILE_NODES: Final = 50_000  # a decoder of 80 layers has 20,000 when it is exported without functions
FILE_NAMES: Final = 2_000_000  # operands, results and attributes of all nodes
NAME_CHARACTERS: Final = 1024  # a name is repeated in the origin of each node that is made of its node
EXPANDED_NODES: Final = 150_000  # nodes read and made, once functions and loops are written out: a check of a minute
LOOP_ITERATIONS: Final = 4096  # a loop that turns more often is none that a program with fixed shapes should have
DEPTH: Final = 48  # bodies in bodies and calls in calls; Python's stack ends at about three times that
CONSTANT_BYTES: Final = 1024 * MiB  # all tables that the importer makes or computes with
SHARED_DATA: Final = 4  # tied weights are read twice; more often than this on the average is a bomb


class BeyondLimit(CaptureError):
    """The file asks for more than the compiler does for any model."""

    def __init__(self, name: str, what: str, found: int, limit: int, way_out: str) -> None:
        super().__init__(f"{name} {what.format(f'{found:,}')}, and the limit is {limit:,}; {way_out}")


class BoundedBuilder(GraphBuilder):
    """A graph in the making that counts nodes and the bytes of tables, and refuses what is beyond the limits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._steps = 0
        self._bytes = 0

    def step(self, count: int = 1) -> None:
        """Nodes were read or written, or as much work was done as they take."""
        self._steps += count
        if self._steps > EXPANDED_NODES:
            raise BeyondLimit(
                self._name,
                "has more than {} nodes once its loops and functions are written out",
                EXPANDED_NODES,
                EXPANDED_NODES,
                "use operators on whole tensors in place of loops, or export a smaller part of the model",
            )

    def handle(self, nbytes: int) -> None:
        """Tables of so many bytes were made, or computed with."""
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
    """Damaged bytes end the count: the parser refuses them."""
    if len(data) <= UNCOUNTED_BYTES:  # so few that their parts fit into memory, whatever they are
        return
    try:
        count = _parts(data)
    except IndexError:
        return
    if count > FILE_FIELDS:
        way_out = "export the model in smaller parts, with its weights as raw data"
        raise BeyondLimit(name, "holds more than {} fields", FILE_FIELDS, FILE_FIELDS, way_out)


def _parts(data: bytes) -> int:
    waiting, count = [(0, len(data), ModelProto.DESCRIPTOR)], 0
    while waiting:
        at, end, kind = waiting.pop()
        inside = _messages_in(kind)
        while at < end and count <= FILE_FIELDS:
            count += 1
            tag, at = _number(data, at)
            wire = tag & 7
            if wire == _BYTES:
                length, at = _number(data, at)
                if tag >> 3 in inside:
                    waiting.append((at, min(at + length, end), inside[tag >> 3]))
                at += length
            elif wire == _VARINT:
                _, at = _number(data, at)
            else:
                at += {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
    return count


@cache
def _messages_in(kind: Any) -> dict[int, Any]:
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place behind it."""
    found = shift = 0
    while True:
        byte = data[at]
        found |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise IndexError
