"""What manifests say lies in packs, and whether it does: a pack may have its own digest and yet lack a tensor."""

from collections.abc import Iterable
from typing import Final

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pack import MAX_PACK_BYTES, unpacked
from nxpipe.artifact_store.verified import read_at_most

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
