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

PACKED_BELOW: Final = 64 * 1024  # bytes of a tensor; a larger one is read faster as an object of its own
MAX_PACK_BYTES: Final = 4 * 1024**2
MAX_TENSORS: Final = 65536

_MAGIC: Final = b"NXPACK1\n"
_HEAD: Final = struct.Struct("<8sQ")
_ENTRY: Final = struct.Struct("<32sQ")
_ALIGNMENT: Final = 64


def packed(parts: Mapping[Blob, bytes | memoryview]) -> bytes:
    """The canonical pack of these tensors."""
    entries = sorted(parts, key=lambda blob: blob.sha256)
    pieces = [_HEAD.pack(_MAGIC, len(entries))]
    pieces += [_ENTRY.pack(bytes.fromhex(blob.sha256), blob.size) for blob in entries]
    end = sum(map(len, pieces))
    for blob in entries:
        pieces += [bytes(-end % _ALIGNMENT), bytes(parts[blob])]
        end += -end % _ALIGNMENT + blob.size
    return b"".join(pieces)


def fits_in_pack(blobs: Mapping[Blob, object], another: Blob) -> bool:
    """True if a pack of `blobs` and `another` stays within the size limit."""
    overhead = _ENTRY.size + _ALIGNMENT
    size = _HEAD.size + sum(overhead + blob.size for blob in (*blobs, another))
    return len(blobs) < MAX_TENSORS and size <= MAX_PACK_BYTES


def unpacked(data: bytes | memoryview) -> dict[str, memoryview]:
    """Every tensor by its digest. Bytes that `packed` would not write raise InvalidDocument."""
    view = memoryview(data)
    if len(view) > MAX_PACK_BYTES:
        raise InvalidDocument(f"a pack of {len(view)} bytes is beyond {MAX_PACK_BYTES}")
    tensors: dict[str, memoryview] = {}
    table = _table(view)
    end = _HEAD.size + len(table) * _ENTRY.size
    for digest, size in table:
        start = end + -end % _ALIGNMENT
        if start + size > len(view):
            raise InvalidDocument(f"tensor {digest} of {size} bytes reaches beyond the end of its pack")
        if any(view[end:start]):
            raise InvalidDocument(f"the padding before tensor {digest} is not zero")
        end = start + size
        tensors[digest] = view[start:end]
    if end != len(view):
        raise InvalidDocument(f"{len(view) - end} bytes follow the last tensor of a pack")
    for digest, piece in tensors.items():
        if sha256_hex(piece) != digest:
            raise InvalidDocument(f"tensor {digest} of a pack has a different digest")
    return tensors


def _table(view: memoryview) -> list[tuple[str, int]]:
    if len(view) < _HEAD.size:
        raise InvalidDocument(f"{len(view)} bytes are too few for a pack")
    magic, count = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise InvalidDocument("it does not begin with the magic number of a pack")
    if not 1 <= count <= MAX_TENSORS or _HEAD.size + count * _ENTRY.size > len(view):
        raise InvalidDocument(f"a pack of {len(view)} bytes cannot hold {count} tensors")
    entries = _ENTRY.iter_unpack(view[_HEAD.size : _HEAD.size + count * _ENTRY.size])
    table = [(digest.hex(), size) for digest, size in entries]
    if any(entry[0] >= successor[0] for entry, successor in pairwise(table)):
        raise InvalidDocument("the digests of a pack are not in ascending order")
    return table


_IN_MEMORY: Final = 128 * 1024**2  # bytes of tensors that are stored concurrently, to hide the latency of a network


@dataclass(frozen=True)
class Elements:
    """One tensor to store: name, type, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class _Object:
    """The content of one object: a large tensor or a pack of small ones; `tensors` lists them once it is stored."""

    data: bytes | memoryview
    tensors: Callable[[Blob], list[Tensor]]


def put_weights(blobs: Blobs, tensors: Iterable[Elements], sent: Sent = ignore_progress) -> tuple[Tensor, ...]:
    """Store tensors and return their entries in the order of the input; equal content is stored once.

    Small tensors are packed in that order, so that a change of one tensor leaves the other packs unchanged.
    """
    order: dict[str, int] = {}
    stored: list[Tensor] = []
    for objects in _in_batches(_objects(tensors, order)):
        datas = [content.data for content in objects]
        for content, blob in zip(objects, blobs.put_all(datas, sent), strict=True):
            stored += content.tensors(blob)
    return tuple(sorted(stored, key=lambda tensor: order[tensor.name]))


def _objects(tensors: Iterable[Elements], order: dict[str, int]) -> Iterator[_Object]:
    small: dict[Blob, memoryview] = {}
    waiting: list[tuple[Elements, Blob]] = []

    def closed() -> _Object:
        members, data = list(waiting), packed(small)
        small.clear()
        waiting.clear()
        return _Object(data, lambda pack: [_entry(elements, blob, pack) for elements, blob in members])

    for elements in tensors:
        order[elements.name] = len(order)
        if elements.data.nbytes >= PACKED_BELOW:
            yield _Object(elements.data, partial(_unpacked_entry, elements))
            continue
        blob = Blob.of(elements.data)
        if small and blob not in small and not fits_in_pack(small, blob):
            yield closed()
        small.setdefault(blob, elements.data)
        waiting.append((elements, blob))
    if waiting:
        yield closed()


def _in_batches(objects: Iterable[_Object]) -> Iterator[list[_Object]]:
    """Batches of at most _IN_MEMORY bytes, or of one object."""
    batch: list[_Object] = []
    size = 0
    for content in objects:
        if batch and size + memoryview(content.data).nbytes > _IN_MEMORY:
            yield batch
            batch, size = [], 0
        batch.append(content)
        size += memoryview(content.data).nbytes
    if batch:
        yield batch


def read_weights(blobs: Blobs, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytes | memoryview]]:
    """Each tensor with its bytes, verified; each pack is read once, regardless of the order of its tensors."""
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


def _unpacked_entry(elements: Elements, blob: Blob) -> list[Tensor]:
    return [_entry(elements, blob, None)]


def _entry(elements: Elements, blob: Blob, pack: Blob | None) -> Tensor:
    return Tensor(name=elements.name, dtype=elements.dtype, shape=elements.shape, blob=blob, pack=pack)


# The pack has the digest that was published, so every copy of it has the same defect.
_WRITTEN_SO: Final = (
    "it was published in this form: remove the action records of artifacts that name it, and publish them again"
)


class Packs:
    """The packs that manifests name, and the tensors expected in each; `verify` checks the bytes of a pack."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._expected: dict[str, dict[Blob, str]] = {}  # by pack: each tensor and its name in a manifest

    def expect(self, manifest: Manifest, document: Blob) -> None:
        for tensor in manifest.tensors():
            if tensor.pack is not None:
                expected = self._expected.setdefault(tensor.pack.sha256, {})
                expected.setdefault(tensor.blob, f"{tensor.name} of {manifest.name}")

    def includes(self, blob: Blob) -> bool:
        return blob.sha256 in self._expected

    def verify(self, pack: Blob, chunks: Iterable[bytes]) -> None:
        """Verify the digest of every tensor in a pack, and that it holds every tensor that a manifest expects."""
        where = f"{self._url}/{blob_path(pack)}"
        try:
            sizes = {digest: len(piece) for digest, piece in unpacked(read_at_most(MAX_PACK_BYTES, chunks)).items()}
        except InvalidDocument as fault:
            raise Corrupt(where, f"it is not a valid pack: {fault}", _WRITTEN_SO) from fault
        expected = self._expected[pack.sha256]
        missing = [name for tensor, name in expected.items() if sizes.get(tensor.sha256) != tensor.size]
        if missing:
            raise Corrupt(
                where, f"it lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}", _WRITTEN_SO
            )
