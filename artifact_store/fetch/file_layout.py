"""Layout of a file that is assembled from many blobs: safetensors header, and the offset of each tensor.

Readers map a safetensors file into memory and load pages on access; only the header is parsed.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from nxpipe.artifact_store.backends.protocol import CHUNK
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Tensor


def chunks_between(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """The bytes from `start` to `stop`, or to the end of the file."""
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
# Types by the names of the format; TF32 has the bytes of FP32.
DTYPES: Final = {name: dtype for dtype, name in _NAMES.items() if dtype != "tfloat32"}
_ALIGNMENT: Final = 8
_RESERVED: Final = "__metadata__"


@dataclass(frozen=True)
class FileLayout:
    """The header of a file, the offset of each tensor, and the file's size in bytes."""

    head: bytes
    offsets: tuple[int, ...]
    size: int


def layout_of(tensors: Iterable[Tensor]) -> FileLayout:
    """The layout of tensors, those with the widest elements first: the format forbids gaps for alignment.

    A tensor whose type the format does not know is stored as bytes, with its type in the metadata.
    """
    ordered = list(tensors)
    header: dict[str, object] = {}
    metadata = {"format": "pt"}
    offsets: dict[int, int] = {}
    end = 0
    for number in sorted(range(len(ordered)), key=lambda number: -_width(ordered[number])):
        tensor, offsets[number] = ordered[number], end
        end += tensor.blob.size
        dtype, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            metadata[f"dtype of {tensor.name}"] = f"{tensor.dtype} {shape}"
            dtype, shape = "U8", [tensor.blob.size]
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[number], end]}
    text = json.dumps({_RESERVED: metadata, **header}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return FileLayout(head, tuple(len(head) + offsets[number] for number in range(len(ordered))), len(head) + end)


def _width(tensor: Tensor) -> int:
    """Bytes of one element, for alignment; 0 for an empty tensor."""
    elements = 1
    for length in tensor.shape:
        elements *= length
    return tensor.blob.size // elements if elements else 0


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor and its offset in a file."""

    tensor: Tensor
    at: int


@dataclass(frozen=True)
class AssembledFile:
    """A safetensors file: its header, size in bytes, and tensors."""

    head: bytes
    size: int
    pieces: tuple[PlacedTensor, ...]

    @cached_property
    def content(self) -> str:
        """The digest that identifies the file's content, of the header and the tensors' digests."""
        return Blob.of(self.head + "".join(piece.tensor.blob.sha256 for piece in self.pieces).encode()).sha256

    @cached_property
    def stored(self) -> dict[Blob, list[PlacedTensor]]:
        """The tensors of the file by the object that stores them."""
        by_object: dict[Blob, list[PlacedTensor]] = {}
        for piece in self.pieces:
            by_object.setdefault(piece.tensor.stored, []).append(piece)
        return by_object

    def is_right(self, descriptor: int) -> bool:
        """True if the open file has exactly this content; reads and hashes all of it."""
        if os.fstat(descriptor).st_size != self.size or os.pread(descriptor, len(self.head), 0) != self.head:
            return False
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return all(pool.map(lambda piece: _is_intact(descriptor, piece), self.pieces))


def weights_file(tensors: Sequence[Tensor]) -> AssembledFile:
    layout = layout_of(tensors)
    return AssembledFile(layout.head, layout.size, tuple(map(PlacedTensor, tensors, layout.offsets)))


def file_of(head: bytes, tensors: Sequence[Tensor]) -> AssembledFile:
    """The file of this header, with the tensors one after another."""
    ends = list(accumulate((tensor.blob.size for tensor in tensors), initial=len(head)))
    return AssembledFile(head, ends[-1], tuple(map(PlacedTensor, tensors, ends)))


def _is_intact(descriptor: int, piece: PlacedTensor) -> bool:
    blob = piece.tensor.blob
    return sha256_between(descriptor, piece.at, piece.at + blob.size) == blob.sha256
