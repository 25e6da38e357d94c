"""Layout of a file that is assembled from many blobs: safetensors header, and the offset of each tensor.

A safetensors file is mapped into memory by its readers and pages come in as they are touched; only the header is
parsed.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from nxpipe.artifact_store.backends.protocol import CHUNK
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Tensor


def chunks_between(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """The bytes as far as there are any."""
    while start < stop and (chunk := os.pread(descriptor, min(CHUNK, stop - start), start)):
        yield chunk
        start += len(chunk)


def sha256_between(descriptor: int, start: int, stop: int) -> str:
    return sha256_of_chunks(chunks_between(descriptor, start, stop))


_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "tfloat32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT: Final = 8
_RESERVED: Final = "__metadata__"


@dataclass(frozen=True)
class FileLayout:
    """The first bytes of a file, and where in it each tensor begins."""

    head: bytes
    offsets: tuple[int, ...]
    size: int


def layout_of(tensors: Iterable[Tensor]) -> FileLayout:
    """The widest elements first, so that each tensor is aligned without a gap, which the format forbids.

    A type that the format has no name for is given as plain bytes, and named in the metadata.
    """
    given = list(tensors)
    header: dict[str, object] = {}
    metadata = {"format": "pt"}
    places: dict[int, int] = {}
    end = 0
    for number in sorted(range(len(given)), key=lambda number: -_width(given[number])):
        tensor, places[number] = given[number], end
        end += tensor.blob.size
        dtype, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            metadata[f"dtype of {tensor.name}"] = f"{tensor.dtype} {shape}"
            dtype, shape = "U8", [tensor.blob.size]
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [places[number], end]}
    text = json.dumps({_RESERVED: metadata, **header}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return FileLayout(head, tuple(len(head) + places[number] for number in range(len(given))), len(head) + end)


def _width(tensor: Tensor) -> int:
    """Bytes of one element, as far as alignment goes."""
    elements = 1
    for length in tensor.shape:
        elements *= length
    return tensor.blob.size // elements if elements else 0


@dataclass(frozen=True)
class Placed:
    tensor: Tensor
    at: int


@dataclass(frozen=True)
class Whole:
    head: bytes
    size: int
    pieces: tuple[Placed, ...]

    @cached_property
    def content(self) -> str:
        """The head says which tensor lies where, the digests what it holds: together they name the file's content."""
        return Blob.of(self.head + "".join(piece.tensor.blob.sha256 for piece in self.pieces).encode()).sha256

    @cached_property
    def stored(self) -> dict[Blob, list[Placed]]:
        """Which objects it is made of, and where what is in each lies."""
        found: dict[Blob, list[Placed]] = {}
        for piece in self.pieces:
            found.setdefault(piece.tensor.stored, []).append(piece)
        return found

    def is_right(self, descriptor: int) -> bool:
        """By its bytes, whoever wrote them."""
        if os.fstat(descriptor).st_size != self.size or os.pread(descriptor, len(self.head), 0) != self.head:
            return False
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return all(pool.map(lambda piece: _is_there(descriptor, piece), self.pieces))


def weights_file(tensors: Sequence[Tensor]) -> Whole:
    layout = layout_of(tensors)
    return Whole(layout.head, layout.size, tuple(map(Placed, tensors, layout.offsets)))


def _is_there(descriptor: int, piece: Placed) -> bool:
    blob = piece.tensor.blob
    return sha256_between(descriptor, piece.at, piece.at + blob.size) == blob.sha256
