"""The log of one channel: finding its end, reading it back, and adding to it in a race with others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from artifact_store.backends.protocol import Backend, Found
from artifact_store.channel.generation import Generation, Head
from artifact_store.documents import parse_document
from artifact_store.errors import Corrupt, InvalidDocument, StoreUnavailable
from artifact_store.layout import CHANNELS, generation_path, head_path, log_folder, number_of
from artifact_store.records import Records

_ATTEMPTS: Final = 1000  # each one lost means that somebody else's promotion went through
_BROKEN: Final = "compare the log with a replica or a backup; the generations after it cannot be trusted"


@dataclass(frozen=True)
class Appended:
    """What stands at the end of the log, and whether this call put it there."""

    generation: Generation
    changed: bool


class ChannelLog:
    def __init__(self, backend: Backend, channel: str) -> None:
        # The name becomes a path: it is checked as strictly as in a document.
        self.channel = parse_document(Head, {"format": "nxpipe.head/1", "channel": channel, "generation": 1}).channel
        self._backend = backend
        self._records = Records(backend)

    def tip(self) -> Generation | None:
        """The newest generation, and so what the channel serves now."""
        found = self._read(self._hint())
        if found is None:
            # A head beyond the log cannot come from us; a listing shows what is really there.
            found = self._read(max(self._listed(), default=0))
        while found is not None and (later := self._read(found.generation + 1)) is not None:
            found = later
        return found

    def read(self, generation: int) -> Generation | None:
        return self._read(generation)

    def back_from(self, newest: Generation | None) -> Iterator[Generation]:
        """Every generation, the newest first, each proved by the digest that its successor holds."""
        at = newest
        while at is not None:
            yield at
            if at.previous is None:
                return
            earlier = self._read(at.generation - 1)
            if earlier is None or earlier.digest != at.previous:
                fault = "is missing" if earlier is None else f"has the digest {earlier.digest}"
                where = f"{self._backend.url}/{generation_path(self.channel, at.generation - 1)}"
                raise Corrupt(where, f"it {fault}, and generation {at.generation} follows {at.previous}", _BROKEN)
            at = earlier

    def append(self, make: Callable[[Generation | None], Generation | None]) -> Appended:
        """Add what `make` wants to follow the tip that it is shown; None means that the tip is good as it is."""
        for _ in range(_ATTEMPTS):
            tip = self.tip()
            wanted = make(tip)
            if wanted is None:
                if tip is None:
                    raise InvalidDocument(f"channel {self.channel} is empty, and nothing was to be added")
                return Appended(tip, changed=False)
            if self._records.create_or_read(wanted).write_id == wanted.write_id:
                self._records.replace(Head(channel=self.channel, generation=wanted.generation))
                return Appended(wanted, changed=True)
        raise StoreUnavailable(
            f"{_ATTEMPTS} others wrote to channel {self.channel} of {self._backend.url} first; a retry is safe"
        )

    def _read(self, generation: int) -> Generation | None:
        return self._records.read(Generation, generation_path(self.channel, generation)) if generation else None

    def _hint(self) -> int:
        """The head's generation; without a usable head, the newest in a listing."""
        try:
            head = self._records.read(Head, head_path(self.channel))
        except Corrupt:
            head = None  # it is a hint, and the next promotion writes it anew
        return head.generation if head else max(self._listed(), default=0)

    def _listed(self) -> Iterator[int]:
        folder = log_folder(self.channel)
        for path in self._backend.paths(folder):
            number = number_of(path.removeprefix(folder))
            if number is not None:
                yield number


def channels(backend: Backend) -> list[str]:
    """The names of all channels, in order."""
    return channels_among(backend.walk(CHANNELS))


def channels_among(listed: Iterable[Found]) -> list[str]:
    """Those that have an object in a listing."""
    paths = [found.path for found in listed if found.path.startswith(CHANNELS)]
    return sorted({path.split("/")[1] for path in paths if path.count("/") >= 2})
