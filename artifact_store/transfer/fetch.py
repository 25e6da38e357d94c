"""An artifact in a folder, ready to be served.

    manifest.json            the manifest, byte for byte: its SHA-256 is the artifact's name
    executables/<name>.nxe   one compiled program each; .neff, of backend neuronx
    weights.safetensors      every weight in one file, to be mapped into memory
    files/<path>             what travels with the model

Objects come several at once. What came before an interruption is in the tier, or is written already, and is not
fetched again.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.files import write_at
from nxpipe.artifact_store.backends.protocol import Sent, in_turn, nobody
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob, parse_document
from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.manifest import File, Manifest, Tensor
from nxpipe.artifact_store.transfer.at_once import at_once
from nxpipe.artifact_store.transfer.folder import Filled, holds, open_folder
from nxpipe.artifact_store.transfer.reading import BlobsFromAfar
from nxpipe.artifact_store.transfer.whole import Whole, weights_file
from nxpipe.artifact_store.weights import read_weights

WEIGHTS: Final = "weights.safetensors"
_ENDINGS: Final = {"emulator": ".nxe", "neuronx": ".neff"}  # of a program, by the backend that made it


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
    missing = {path: blob for path, blob in files.items() if not filled.has(path, blob.sha256, holds(blob.sha256))}
    written = sum(map(_size, missing.values()))
    sent(sum(map(_size, files.values())) - written)

    def place(path: str) -> None:
        filled.write(path, missing[path].sha256, lambda file: blobs.copy_into(missing[path], file, (0,), sent))

    at_once(place, missing.items())
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
        if "/" in executable.name or executable.name in (".", ".."):
            raise Refused(f"the program {executable.name!r} cannot be a file of that name; publish it under another")
    ending = _ENDINGS.get(manifest.backend, "")
    named = [
        *((f"executables/{executable.name}{ending}", executable.blob) for executable in manifest.executables),
        *((f"files/{file.path}", file.blob) for file in manifest.files),
    ]
    return {parse_document(File, {"path": path, "blob": blob}).path: blob for path, blob in named}


def _fetch_weights(blobs: Blobs, tensors: Sequence[Tensor], filled: Filled, sent: Sent) -> int:
    if not tensors:
        return 0
    whole = weights_file(tensors)
    size = sum(map(_size, whole.stored))
    if filled.has(WEIGHTS, whole.content, whole.is_right):
        sent(size)
        return 0
    if isinstance(blobs, BlobsFromAfar):
        blobs.assemble(whole, filled.spot, lambda path, handle: filled.adopt(WEIGHTS, path, handle), sent)
        filled.note(WEIGHTS, whole.content)
    else:
        filled.write(WEIGHTS, whole.content, lambda file: _write_weights(blobs, whole, file, sent))
    return size


def _write_weights(blobs: Blobs, whole: Whole, file: int, sent: Sent) -> None:
    """Out of a store that is near: each object is read once, and written wherever a tensor has its content."""

    def place(stored: Blob) -> None:
        placed = whole.stored[stored]
        if placed[0].tensor.pack is None:
            blobs.copy_into(stored, file, [each.at for each in placed], sent)
            return
        tensors = [each.tensor for each in placed]
        for (_, data), each in zip(read_weights(blobs, tensors), placed, strict=True):
            write_at(file, data, each.at)
        sent(stored.size)

    os.ftruncate(file, whole.size)
    write_at(file, whole.head, 0)
    at_once(place, [(stored, stored) for stored in whole.stored])
