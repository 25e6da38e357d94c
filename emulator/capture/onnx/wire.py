"""How many parts the bytes of an ONNX file have, counted before protobuf makes objects of them.

An empty message takes two bytes in a file and a hundred in memory, so a file of 2 GiB can ask for 100 GiB. Bytes of
tensors are stepped over, which makes this quick for files that are large because of their weights.
"""

from functools import cache
from typing import Any

from onnx import ModelProto

from nxpipe.emulator.capture.onnx.limits import FILE_PARTS, UNCOUNTED_BYTES, BeyondLimit

_VARINT, _FIXED64, _BYTES, _GROUP, _END_OF_GROUP, _FIXED32 = range(6)


def require_few_parts(data: bytes, name: str) -> None:
    """Damaged bytes end the count: the parser refuses them."""
    if len(data) <= UNCOUNTED_BYTES:  # so few that their parts fit into memory, whatever they are
        return
    try:
        count = _parts(data)
    except IndexError:
        return
    if count > FILE_PARTS:
        way_out = "export the model in smaller parts, with its weights as raw data"
        raise BeyondLimit(name, "holds more than {} fields", FILE_PARTS, FILE_PARTS, way_out)


def _parts(data: bytes) -> int:
    waiting, count = [(0, len(data), ModelProto.DESCRIPTOR)], 0
    while waiting:
        at, end, kind = waiting.pop()
        inside = _messages_in(kind)
        while at < end and count <= FILE_PARTS:
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
