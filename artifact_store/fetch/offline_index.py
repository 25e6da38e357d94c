"""Offline index: action records, channel heads and signatures that this machine has read, for use without a network.

Laid out as the store is, below `seen/` of the cache. A file's modification time says when it was last confirmed.
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
    def __init__(self, tier: Path, url: str) -> None:
        base = f"seen/{sha256_hex(url.encode())[:16]}"
        super().__init__(tier / base)
        self._files = SafeFolder(tier, PRIVATE, base)
        self.url = f"{url} (as last seen from here)"

    def keep(self, record: Sealed) -> None:
        """Not flushed to the disk: one that a power loss has torn does not match its seal."""
        self.keep_objects([(record.path, record.to_bytes())])

    def keep_objects(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """By path, as they lie in the store."""
        for path, data in objects:
            with scratch(self._root / SCRATCH, 0o644, self._files) as file, os_errors(f"write {self._file(path)}"):
                file.write(data)
                file.finish()
                self._files.rename(f"{SCRATCH}/{file.path.name}", path)

    def _counts(self, seen: os.stat_result) -> bool:
        """In a cache that several users share, what another user says a channel serves is not what we have seen."""
        return is_ours(seen)

    def keep_channel(self, tip: Generation) -> None:
        self.keep(tip)
        self.keep(Head(channel=tip.channel, generation=tip.generation))

    def age_of_artifact(self, request_key: str) -> float:
        return self._age(action_path(request_key))

    def age_of_channel(self, channel: str) -> float:
        """Seconds since the channel was seen to be so."""
        return self._age(head_path(channel))

    def _age(self, path: str) -> float:
        stat = self.stat(path)
        return self.now() - stat.modified if stat else 0.0
