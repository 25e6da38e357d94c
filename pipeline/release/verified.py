"""What this machine has verified: a file for each manifest, whose name says under which conditions.

It is not kept in the store. Whoever can write there could otherwise say that somebody else has looked.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.documents import written_now
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.models.versions import compiler_digest
from nxpipe.pipeline.util.whole_file import write_whole

if TYPE_CHECKING:
    from nxpipe.pipeline.release.state import Release

_FORMAT: Final = "nxpipe.verified/1"


@dataclass(frozen=True)
class Verified:
    """`conditions` are all that the answer hangs on, beside the manifest."""

    folder: Path
    conditions: dict[str, object]

    @classmethod
    def of(cls, release: "Release") -> Self:
        made = {"nxpipe": VERSION, "compiler": compiler_digest(), "thresholds": asdict(release.thresholds)}
        return cls(release.kept / "verified", {"format": _FORMAT, "store": release.store.url, **made})

    def __contains__(self, manifest_digest: str) -> bool:
        return self._path(manifest_digest).exists()

    def note(self, manifest_digest: str) -> None:
        write_whole(self._path(manifest_digest), canonical_json({**self._said(manifest_digest), "at": written_now()}))

    def _path(self, manifest_digest: str) -> Path:
        return self.folder / f"{sha256_hex(canonical_json(self._said(manifest_digest)))}.json"

    def _said(self, manifest_digest: str) -> dict[str, object]:
        return {**self.conditions, "manifest": manifest_digest}
