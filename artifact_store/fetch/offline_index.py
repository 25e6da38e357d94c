"""Offline index: action records, channel heads and signatures that this machine has read, for use without a network.

It has the layout of a store, below `seen/` of the cache. The modification time of a file is its last confirmation.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from nxpipe.artifact_store.backends.files import os_errors, scratch
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.no_symlinks import PRIVATE, SafeFolder, is_ours
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Generation, Head
from nxpipe.artifact_store.documents import Sealed
from nxpipe.artifact_store.layout import SCRATCH, action_path, head_path


class OfflineIndex(LocalFolder):
    """The offline index of one store, in a cache folder."""

    def __init__(self, cache: Path, url: str) -> None:
        base = f"seen/{sha256_hex(url.encode())[:16]}"
        super().__init__(cache / base)
        self._files = SafeFolder(cache, PRIVATE, base)
        self.url = f"{url} (as last seen from here)"

    def keep(self, record: Sealed) -> None:
        """Store a record. It is not flushed to disk: its seal reveals damage by a power loss."""
        self.keep_objects([(record.path, record.to_bytes())])

    def keep_objects(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """Store objects under their paths in the store."""
        for path, data in objects:
            with scratch(self._root / SCRATCH, 0o644, self._files) as file, os_errors(f"write {self._file(path)}"):
                file.write(data)
                file.finish()
                self._files.rename(f"{SCRATCH}/{file.path.name}", path)

    def _counts(self, status: os.stat_result) -> bool:
        """In a shared cache, files of other users are not trusted."""
        return is_ours(status)

    def keep_channel(self, tip: Generation) -> None:
        self.keep(tip)
        self.keep(Head(channel=tip.channel, generation=tip.generation))

    def age_of_artifact(self, request_key: str) -> float:
        return self._age(action_path(request_key))

    def age_of_channel(self, channel: str) -> float:
        """Seconds since the channel was last read."""
        return self._age(head_path(channel))

    def _age(self, path: str) -> float:
        stat = self.stat(path)
        return self.now() - stat.modified if stat else 0.0
