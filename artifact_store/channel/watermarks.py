"""Watermarks: the newest generation of each channel that this machine acted on, to detect a rolled-back log.

There is one small file for each channel of each store. It lies outside of all stores, so that write access to a store
is not enough to change it.
"""

from pathlib import Path
from typing import Final, Literal

from nxpipe.artifact_store.backends.files import flush_to_disk, os_errors, scratch
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.artifact_store.documents import Count, Digest, Label, Sealed, Text, Time
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.url import is_remote

_REMOVE: Final = "remove that file, and this machine starts again from the content of the store"


class Mark(Sealed):
    """One generation whose whole chain was verified."""

    format: Literal["nxpipe.mark/1"] = "nxpipe.mark/1"
    store: Text
    channel: Label
    generation: Count
    digest: Digest
    at: Time

    @property
    def path(self) -> str:
        return f"{sha256_hex(self.store.encode())[:16]}/{self.channel}"

    @classmethod
    def of(cls, url: str, tip: Generation) -> "Mark":
        return cls(store=url, channel=tip.channel, generation=tip.generation, digest=tip.digest, at=tip.at)


class Marks:
    """The watermarks of one store, in a folder of this machine."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url

    def file(self, channel: str) -> Path:
        """The file of a channel's watermark. Remove it after a deliberate restore of the store from an older copy."""
        return self._folder / sha256_hex(self._url.encode())[:16] / channel

    def read(self, channel: str) -> Mark | None:
        file = self.file(channel)
        with os_errors(f"read {file}"):
            try:
                data = file.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        try:
            mark = Mark.from_bytes(data)
            if (mark.store, mark.channel) != (self._url, channel):
                raise InvalidDocument(f"it is the mark of channel {mark.channel} of {mark.store}")
        except InvalidDocument as fault:
            raise Corrupt(str(file), str(fault), _REMOVE) from fault
        return mark

    @property
    def is_remote(self) -> bool:
        return is_remote(self._url)

    def keep(self, tip: Generation, *, reset: bool = False) -> None:
        """Write the watermark durably. An older generation replaces a newer one only with `reset`."""
        mark, known = Mark.of(self._url, tip), self.read(tip.channel)
        if known is not None and (known == mark or (known.generation >= mark.generation and not reset)):
            return
        file = self.file(tip.channel)
        with scratch(file.parent) as new, os_errors(f"write {file}"):
            new.write(mark.to_bytes())
            new.finish()
            flush_to_disk(new.path)
            new.path.replace(file)
