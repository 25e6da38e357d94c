"""One file that is put together from many blobs: where each lies in it, and what proves all of it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Tensor
from nxpipe.artifact_store.transfer.safetensors import layout_of
from nxpipe.artifact_store.transfer.spans import sha256_between


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
