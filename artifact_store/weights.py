"""Tensors in and out of a store: large ones as blobs of their own, small ones in packs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from nxpipe.artifact_store.backends.protocol import Sent, nobody
from nxpipe.artifact_store.blobs import PUBLISH_AGAIN, Blobs
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.manifest import Tensor
from nxpipe.artifact_store.pack import PACKED_BELOW, packed, room_for, unpacked

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


def put_weights(blobs: Blobs, tensors: Iterable[Elements], sent: Sent = nobody) -> tuple[Tensor, ...]:
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
