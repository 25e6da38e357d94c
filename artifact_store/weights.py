"""Tensors in and out of a store: large ones as blobs of their own, small ones in packs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from artifact_store.backends.protocol import Sent, nobody
from artifact_store.blobs import PUBLISH_AGAIN, Blobs
from artifact_store.documents import Blob
from artifact_store.errors import Corrupt, InvalidDocument
from artifact_store.manifest import Tensor
from artifact_store.pack import PACKED_BELOW, packed, room_for, unpacked


@dataclass(frozen=True)
class Elements:
    """One tensor's name, kind and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def put_weights(blobs: Blobs, tensors: Iterable[Elements], sent: Sent = nobody) -> tuple[Tensor, ...]:
    """Store tensors, and name them in the order in which they came; equal content is stored once.

    Small ones are packed in that order, so that a change of one leaves the packs of the others as they are.
    """
    stored: list[Tensor] = []
    small: dict[Blob, memoryview] = {}
    waiting: list[Elements] = []

    def close() -> None:
        pack = blobs.put(packed(small), sent)
        stored.extend(_named(each, pack) for each in waiting)
        small.clear()
        waiting.clear()

    order: dict[str, int] = {}
    for each in tensors:
        order[each.name] = len(order)
        if each.data.nbytes >= PACKED_BELOW:
            stored.append(_named(each, None, blobs.put(each.data, sent)))
            continue
        blob = Blob.of(each.data)
        if small and blob not in small and not room_for(small, blob):
            close()
        small.setdefault(blob, each.data)
        waiting.append(each)
    if waiting:
        close()
    return tuple(sorted(stored, key=lambda tensor: order[tensor.name]))


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


def _named(each: Elements, pack: Blob | None, blob: Blob | None = None) -> Tensor:
    return Tensor(name=each.name, dtype=each.dtype, shape=each.shape, blob=blob or Blob.of(each.data), pack=pack)
