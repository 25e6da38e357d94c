"""Many small tensors in one blob. Section 5 of docs/store-format.md gives the bytes."""

import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import InvalidDocument

PACKED_BELOW: Final = 64 * 1024  # bytes of a tensor: above, an object of its own costs less than reading a pack
MAX_PACK_BYTES: Final = 4 * 1024**2
MAX_TENSORS: Final = 65536

_MAGIC: Final = b"NXPACK1\n"
_HEAD: Final = struct.Struct("<8sQ")
_ENTRY: Final = struct.Struct("<32sQ")
_ALIGNMENT: Final = 64


def packed(parts: Mapping[Blob, bytes | memoryview]) -> bytes:
    """The one pack of these tensors."""
    entries = sorted(parts, key=lambda blob: blob.sha256)
    pieces = [_HEAD.pack(_MAGIC, len(entries))]
    pieces += [_ENTRY.pack(bytes.fromhex(blob.sha256), blob.size) for blob in entries]
    end = sum(map(len, pieces))
    for blob in entries:
        pieces += [bytes(-end % _ALIGNMENT), bytes(parts[blob])]
        end += -end % _ALIGNMENT + blob.size
    return b"".join(pieces)


def room_for(blobs: Mapping[Blob, object], another: Blob) -> bool:
    """Whether a pack of these could take another without growing beyond its limit."""
    room = _ENTRY.size + _ALIGNMENT
    size = _HEAD.size + sum(room + blob.size for blob in (*blobs, another))
    return len(blobs) < MAX_TENSORS and size <= MAX_PACK_BYTES


def unpacked(data: bytes | memoryview) -> dict[str, memoryview]:
    """Every tensor by its digest. Whatever `packed` would not have written is refused."""
    view = memoryview(data)
    if len(view) > MAX_PACK_BYTES:
        raise InvalidDocument(f"a pack of {len(view)} bytes is beyond {MAX_PACK_BYTES}")
    found: dict[str, memoryview] = {}
    table = _table(view)
    end = _HEAD.size + len(table) * _ENTRY.size
    for digest, size in table:
        start = end + -end % _ALIGNMENT
        if start + size > len(view):
            raise InvalidDocument(f"tensor {digest} of {size} bytes reaches beyond the end of its pack")
        if any(view[end:start]):
            raise InvalidDocument(f"the padding before tensor {digest} is not zero")
        end = start + size
        found[digest] = view[start:end]
    if end != len(view):
        raise InvalidDocument(f"{len(view) - end} bytes follow the last tensor of a pack")
    for digest, piece in found.items():
        if sha256_hex(piece) != digest:
            raise InvalidDocument(f"tensor {digest} of a pack has another content")
    return found


def _table(view: memoryview) -> list[tuple[str, int]]:
    if len(view) < _HEAD.size:
        raise InvalidDocument(f"{len(view)} bytes are too few for a pack")
    magic, count = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise InvalidDocument("it does not begin as a pack does")
    if not 1 <= count <= MAX_TENSORS or _HEAD.size + count * _ENTRY.size > len(view):
        raise InvalidDocument(f"a pack of {len(view)} bytes cannot hold {count} tensors")
    entries = _ENTRY.iter_unpack(view[_HEAD.size : _HEAD.size + count * _ENTRY.size])
    table = [(digest.hex(), size) for digest, size in entries]
    if any(one[0] >= other[0] for one, other in pairwise(table)):
        raise InvalidDocument("the digests of a pack do not ascend")
    return table
