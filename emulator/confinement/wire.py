"""Wire format between client and server: a JSON document and its binary buffers. Never a pickle.

A message is the length of the document, the number of buffers and the length of each, as 64-bit integers, then the
document and the buffers. Received messages are checked against a closed list of types.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.passes import PassOptions

_WORD: Final = struct.Struct("<Q")
_DOCUMENT: Final = 2**28  # bytes
_BUFFERS: Final = 2**20
_NUMPY: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NARROW: Final = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
_DTYPES: Final = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _NARROW
}
_REQUEST: Final = ("config", "task", "phase", "batch", "sequence", "dtype", "capacity")
_OPTIONS: Final = ("autocast", "autocast_type", "target", "tensor_parallel", "published_plan")

Buffers = list[Any]


class BadMessage(Exception):
    """A received message violates the wire format."""


def send(to: socket.socket, value: Any) -> None:
    buffers: Buffers = []
    document = json.dumps(_pack(value, buffers)).encode()
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = [len(document), len(views), *(view.nbytes for view in views)]
    to.sendall(b"".join(map(_WORD.pack, lengths)) + document)
    for view in views:
        to.sendall(view)


def receive(source: socket.socket, most: int, wait: Callable[[], None] = lambda: None) -> Any:
    """The next message, with at most `most` bytes of buffers; EOFError at the end. `wait` is called before each
    read."""

    def exactly(length: int) -> bytearray:
        data = bytearray(length)
        view, filled = memoryview(data), 0
        while filled < length:
            wait()
            count = source.recv_into(view[filled:])
            if not count:
                raise EOFError
            filled += count
        return data

    def word() -> int:
        return int(_WORD.unpack(exactly(_WORD.size))[0])

    length, count = word(), word()
    if length > _DOCUMENT or count > _BUFFERS:
        raise BadMessage(f"a document of {length:,} bytes and {count:,} buffers")
    lengths = [word() for _ in range(count)]
    if sum(lengths) > most:
        raise BadMessage(f"{sum(lengths):,} bytes of buffers")
    document = exactly(length)
    buffers = [exactly(length) for length in lengths]
    try:
        return _unpack(json.loads(document), buffers)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as fault:
        raise BadMessage(f"{type(fault).__name__} {fault}") from fault


def _pack(value: Any, buffers: Buffers) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_pack(part, buffers) for part in value]
    kind, parts = _pack_parts(value, buffers)
    return {"is": kind, "of": parts}


def _pack_parts(value: Any, buffers: Buffers) -> tuple[str, Any]:
    if isinstance(value, tuple):
        return "tuple", [_pack(part, buffers) for part in value]
    if isinstance(value, Mapping):
        return "dict", [[str(key), _pack(part, buffers)] for key, part in value.items()]
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        buffers.append(array.reshape(-1).view(np.uint8) if array.size else b"")
        return "array", [array.dtype.name, list(np.shape(value)), len(buffers) - 1]
    if isinstance(value, Graph):
        buffers.append(value.to_bytes())
        return "graph", len(buffers) - 1
    if isinstance(value, TensorType):
        return "type", [list(value.shape), value.dtype.value]
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, CaptureRequest):
        return "request", [_pack(getattr(value, name), buffers) for name in _REQUEST]
    if isinstance(value, PassOptions):
        return "options", [_pack(getattr(value, name), buffers) for name in _OPTIONS]
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _unpack(value: Any, buffers: Buffers) -> Any:
    if isinstance(value, list):
        return [_unpack(part, buffers) for part in value]
    if not isinstance(value, dict):
        return value
    kind, parts = value["is"], value["of"]
    return _KINDS[kind](parts, buffers)


def _array(parts: Any, buffers: Buffers) -> Any:
    name, shape, number = parts
    return np.frombuffer(buffers[number], _DTYPES[name]).reshape([_size(size) for size in shape])


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a size of {value!r}")
    return value


def _mapping(parts: Any, buffers: Buffers) -> dict[str, Any]:
    return {_text(key): _unpack(part, buffers) for key, part in parts}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a string")
    return value


_KINDS: Final[dict[str, Callable[[Any, Buffers], Any]]] = {
    "tuple": lambda parts, buffers: tuple(_unpack(part, buffers) for part in parts),
    "dict": _mapping,
    "array": _array,
    "graph": lambda number, buffers: decode(bytes(buffers[number])),
    "type": lambda parts, _: TensorType(tuple(_size(size) for size in parts[0]), DType(parts[1])),
    "path": lambda text, _: Path(_text(text)),
    "request": lambda parts, buffers: CaptureRequest(*(_unpack(part, buffers) for part in parts)),
    "options": lambda parts, buffers: PassOptions(*(_unpack(part, buffers) for part in parts)),
}


def dumps(request: dict[str, Any]) -> bytes:
    """A short message between the client and the zygote."""
    return json.dumps(request).encode()


def loads(request: bytes) -> Any:
    return json.loads(request)
