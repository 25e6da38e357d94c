"""The safetensors format: a header in JSON, then every tensor's bytes, ready to be mapped into memory.

Whoever serves a model maps one file, and pages come in as they are touched; nothing is parsed but the header.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.manifest import Tensor

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
class Layout:
    """The first bytes of a file, and where in it each tensor begins."""

    head: bytes
    offsets: tuple[int, ...]
    size: int


def layout_of(tensors: Iterable[Tensor]) -> Layout:
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
    return Layout(head, tuple(len(head) + places[number] for number in range(len(given))), len(head) + end)


def _width(tensor: Tensor) -> int:
    """Bytes of one element, as far as alignment goes."""
    elements = 1
    for length in tensor.shape:
        elements *= length
    return tensor.blob.size // elements if elements else 0
