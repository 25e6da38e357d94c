"""An artifact in a folder, ready to be served.

    manifest.json            the manifest, byte for byte: its SHA-256 is the artifact's name
    executables/<name>       one compiled program each
    weights.safetensors      every weight in one file, to be mapped into memory
    files/<path>             what travels with the model

Objects come several at once. What came before an interruption is in the tier, or is written already, and is not
fetched again.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from artifact_store.backends.files import write_at
from artifact_store.backends.protocol import Sent, in_turn, nobody
from artifact_store.blobs import Blobs
from artifact_store.documents import Blob, parse_document
from artifact_store.errors import Refused
from artifact_store.manifest import File, Manifest, Tensor
from artifact_store.transfer.folder import Filled, open_folder
from artifact_store.transfer.ranges import IN_RANGES_ABOVE
from artifact_store.transfer.safetensors import Layout, layout_of
from artifact_store.weights import read_weights

T = TypeVar("T")

WEIGHTS: Final = "weights.safetensors"
_SMALL_AT_ONCE: Final = 16  # each of them mostly waits
_LARGE_AT_ONCE: Final = 2  # one is written while the next comes


@dataclass(frozen=True)
class Fetched:
    """`bytes_written` is 0 when the folder had everything."""

    folder: Path
    manifest: str
    bytes_written: int


def fetch(blobs: Blobs, manifest: Manifest, folder: Path, sent: Sent = nobody) -> Fetched:
    """Bring a folder to hold this artifact, and nothing else; repeating it is cheap, and goes on where it stopped."""
    sent = in_turn(sent)
    document = manifest.to_bytes()
    digest = Blob.of(document).sha256
    files = _files(manifest)
    filled = open_folder(folder, digest)
    missing = {path: blob for path, blob in files.items() if not filled.has(path, blob.sha256)}
    written = sum(map(_size, missing.values()))
    sent(sum(map(_size, files.values())) - written)

    def place(path: str) -> None:
        filled.write(path, missing[path].sha256, lambda file: blobs.copy_into(missing[path], file, (0,), sent))

    _at_once(place, missing.items())
    written += _fetch_weights(blobs, manifest.weights, filled, sent)
    filled.complete(document, digest)
    return Fetched(folder, digest, written)


def size_of(manifest: Manifest) -> int:
    """What `sent` will have been told in the end."""
    return sum(map(_size, _files(manifest).values())) + sum(map(_size, {tensor.stored for tensor in manifest.weights}))


def _size(blob: Blob) -> int:
    return blob.size


def _files(manifest: Manifest) -> dict[str, Blob]:
    for executable in manifest.executables:
        if "/" in executable.name:
            raise Refused(f"the program {executable.name!r} cannot be a file of that name; publish it under another")
    named = [
        *((f"executables/{executable.name}", executable.blob) for executable in manifest.executables),
        *((f"files/{file.path}", file.blob) for file in manifest.files),
    ]
    return {parse_document(File, {"path": path, "blob": blob}).path: blob for path, blob in named}


def _fetch_weights(blobs: Blobs, tensors: Sequence[Tensor], filled: Filled, sent: Sent) -> int:
    if not tensors:
        return 0
    layout = layout_of(tensors)
    size = sum(map(_size, {tensor.stored for tensor in tensors}))
    # The head says which tensor lies where, the digests what it holds: together they name the file's content.
    content = Blob.of(layout.head + "".join(tensor.blob.sha256 for tensor in tensors).encode()).sha256
    if filled.has(WEIGHTS, content):
        sent(size)
        return 0
    filled.write(WEIGHTS, content, lambda file: _write_weights(blobs, tensors, layout, file, sent))
    return size


def _write_weights(blobs: Blobs, tensors: Sequence[Tensor], layout: Layout, file: int, sent: Sent) -> None:
    """Each object is read once, and written wherever a tensor has its content."""
    wanted: dict[Blob, list[tuple[Tensor, int]]] = {}
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        wanted.setdefault(tensor.stored, []).append((tensor, offset))

    def place(stored: Blob) -> None:
        tensors, offsets = zip(*wanted[stored], strict=True)
        if tensors[0].pack is None:
            blobs.copy_into(stored, file, offsets, sent)
            return
        for (_, data), offset in zip(read_weights(blobs, tensors), offsets, strict=True):
            write_at(file, data, offset)
        sent(stored.size)

    os.ftruncate(file, layout.size)
    write_at(file, layout.head, 0)
    _at_once(place, [(stored, stored) for stored in wanted])


def _at_once(function: Callable[[T], None], items: Iterable[tuple[T, Blob]]) -> None:
    """Small objects many at once, each being one request; then large ones, which have several streams each."""
    given = list(items)
    for streams, large in ((_SMALL_AT_ONCE, False), (_LARGE_AT_ONCE, True)):
        chosen = [item for item, blob in given if (blob.size > IN_RANGES_ABOVE) is large]
        if len(chosen) < 2:
            for item in chosen:
                function(item)
            continue
        pool = ThreadPoolExecutor(streams)
        try:
            for done in [pool.submit(function, item) for item in chosen]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
