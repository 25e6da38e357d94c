"""Tensors of a store: large ones as blobs, small ones in packs. Section 5 of docs/reference/store-format.md."""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from nxpipe.artifact_store.backends.protocol import Sent, ignore_progress
from nxpipe.artifact_store.blobs import PUBLISH_AGAIN, Blobs, read_at_most
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest, Tensor

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


_IN_MEMORY: Final = 128 * 1024**2  # bytes of tensors that are stored at once, where storing waits for a network


@dataclass(frozen=True)
class Elements:
    """One tensor's name, kind and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class _Object:
    """What becomes one object: a large tensor, or a pack of small ones; `tensors` names them when it is stored."""

    data: bytes | memoryview
    tensors: Callable[[Blob], list[Tensor]]


def put_weights(blobs: Blobs, tensors: Iterable[Elements], sent: Sent = ignore_progress) -> tuple[Tensor, ...]:
    """Store tensors, and name them in the order in which they came; equal content is stored once.

    Small ones are packed in that order, so that a change of one leaves the packs of the others as they are.
    """
    order: dict[str, int] = {}
    stored: list[Tensor] = []
    for objects in _in_batches(_objects(tensors, order)):
        for each, blob in zip(objects, blobs.put_all([each.data for each in objects], sent), strict=True):
            stored += each.tensors(blob)
    return tuple(sorted(stored, key=lambda tensor: order[tensor.name]))


def _objects(tensors: Iterable[Elements], order: dict[str, int]) -> Iterator[_Object]:
    small: dict[Blob, memoryview] = {}
    waiting: list[tuple[Elements, Blob]] = []

    def closed() -> _Object:
        members, data = list(waiting), packed(small)
        small.clear()
        waiting.clear()
        return _Object(data, lambda pack: [_named(each, blob, pack) for each, blob in members])

    for each in tensors:
        order[each.name] = len(order)
        if each.data.nbytes >= PACKED_BELOW:
            yield _Object(each.data, partial(_alone, each))
            continue
        blob = Blob.of(each.data)
        if small and blob not in small and not room_for(small, blob):
            yield closed()
        small.setdefault(blob, each.data)
        waiting.append((each, blob))
    if waiting:
        yield closed()


def _in_batches(objects: Iterable[_Object]) -> Iterator[list[_Object]]:
    """As many as may be in memory together."""
    batch: list[_Object] = []
    size = 0
    for each in objects:
        if batch and size + memoryview(each.data).nbytes > _IN_MEMORY:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += memoryview(each.data).nbytes
    if batch:
        yield batch


def read_weights(blobs: Blobs, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytes | memoryview]]:
    """Each tensor with its bytes, verified; each pack is read once, in whatever order its tensors are asked for."""
    packs: dict[Blob, dict[str, memoryview]] = {}
    for tensor in tensors:
        if tensor.pack is None:
            yield tensor, blobs.read(tensor.blob)
            continue
        if tensor.pack not in packs:
            packs[tensor.pack] = _opened(blobs, tensor.pack)
        piece = packs[tensor.pack].get(tensor.blob.sha256)
        if piece is None or len(piece) != tensor.blob.size:
            raise Corrupt(
                f"pack {tensor.pack.sha256}", f"it does not hold {tensor.name} ({tensor.blob.sha256})", PUBLISH_AGAIN
            )
        yield tensor, piece


def _opened(blobs: Blobs, pack: Blob) -> dict[str, memoryview]:
    try:
        return unpacked(blobs.read(pack))
    except InvalidDocument as fault:
        raise Corrupt(f"pack {pack.sha256}", str(fault), PUBLISH_AGAIN) from fault


def _alone(each: Elements, blob: Blob) -> list[Tensor]:
    return [_named(each, blob, None)]


def _named(each: Elements, blob: Blob, pack: Blob | None) -> Tensor:
    return Tensor(name=each.name, dtype=each.dtype, shape=each.shape, blob=blob, pack=pack)


# Its bytes are those that were published, so no copy of it is better.
_WRITTEN_SO: Final = "it was written so: remove the action records of artifacts that name it, and publish those anew"


class Packs:
    """Gathered from manifests first; then each pack is proved when its bytes come by."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._expected: dict[str, dict[Blob, str]] = {}  # by pack, each tensor and whose it is

    def expect(self, manifest: Manifest, document: Blob) -> None:
        for tensor in manifest.weights:
            if tensor.pack is not None:
                expected = self._expected.setdefault(tensor.pack.sha256, {})
                expected.setdefault(tensor.blob, f"{tensor.name} of {manifest.name}")

    def hold(self, blob: Blob) -> bool:
        return blob.sha256 in self._expected

    def prove(self, pack: Blob, chunks: Iterable[bytes]) -> None:
        """Every tensor in it by its digest, and every one that a manifest looks for in it."""
        where = f"{self._url}/{blob_path(pack)}"
        try:
            sizes = {digest: len(piece) for digest, piece in unpacked(read_at_most(MAX_PACK_BYTES, chunks)).items()}
        except InvalidDocument as fault:
            raise Corrupt(where, f"it is no pack, for {fault}", _WRITTEN_SO) from fault
        expected = self._expected[pack.sha256]
        lacking = [whose for tensor, whose in expected.items() if sizes.get(tensor.sha256) != tensor.size]
        if lacking:
            raise Corrupt(
                where, f"it lacks {len(lacking)} of {len(expected)} tensors, the first one {lacking[0]}", _WRITTEN_SO
            )
