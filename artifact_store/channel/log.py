"""Log of one channel: finding its head, reading it back, appending by conditional create."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from nxpipe.artifact_store.backends.protocol import Backend, Found
from nxpipe.artifact_store.channel.generation import Generation, Head
from nxpipe.artifact_store.channel.watermarks import Mark, Marks
from nxpipe.artifact_store.documents import (
    parse_document,
    seconds_since_1970,
)
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, StoreUnavailable
from nxpipe.artifact_store.layout import CHANNELS, generation_path, head_path, log_folder, number_of
from nxpipe.artifact_store.records import Records

_ATTEMPTS: Final = 1000  # each one lost means that somebody else's promotion went through
_BROKEN: Final = "compare the log with a replica or a backup; the generations after it cannot be trusted"
_PUT_BACK: Final = "put the log back from a replica or a backup"
_REMOVED: Final = "put it back from a replica or a backup; if the head alone is wrong, remove that one object"
CLOCKS_DIFFER: Final = 900.0  # seconds between the clocks of two who wrote to one folder


@dataclass(frozen=True)
class Appended:
    """What stands at the end of the log, and whether this call put it there."""

    generation: Generation
    changed: bool


class ChannelLog:
    def __init__(self, backend: Backend, channel: str, marks: Marks | None = None, *, binding: bool = True) -> None:
        """`binding`: a log that does not go on from the mark is refused; else it is proved from its start."""
        # The name becomes a path: it is checked as strictly as in a document.
        self.channel = parse_document(Head, {"format": "nxpipe.head/1", "channel": channel, "generation": 1}).channel
        self._backend = backend
        self._marks = marks
        self._binding = binding
        self._records = Records(backend)
        self._proved: Generation | None = None  # the last tip, back from which all was proved

    def tip(self) -> Generation | None:
        """The newest generation, and so what the channel serves now.

        The chain of digests is proved from it back to the generation that this machine has marked; without a mark, to
        the first one.
        """
        tip, seen = self.newest(), self._proved or (self._marks.read(self.channel) if self._marks else None)
        if seen is not None and not _goes_on_from(tip, seen):
            if self._binding:
                raise self._taken_back(tip, seen)
            seen = None
        if tip is not None:
            self._prove(tip, seen)
            self._proved = tip
        return tip

    def newest(self, *, further: bool = True) -> Generation | None:
        """The same, and nothing is proved of it but its seal. `further`: behind the one that the head names, too."""
        try:
            head = self._records.read(Head, head_path(self.channel))
        except Corrupt:
            head = None  # it is a hint, and the next promotion writes it anew
        found = self._read(head.generation if head else max(self._listed(), default=0))
        if found is None and head is not None:
            # A generation is written before the head that names it, so no crash leaves this.
            where = f"{self._backend.url}/{head_path(self.channel)}"
            raise Corrupt(where, f"it names generation {head.generation}, which is missing from the log", _REMOVED)
        while further and found is not None and (later := self._read(found.generation + 1)) is not None:
            found = later
        return found

    def read(self, generation: int) -> Generation | None:
        return self._read(generation)

    def insist_on_no_more(self) -> None:
        """That nothing lies beyond the tip: one generation between was removed then. It takes a listing."""
        tip, last = self.tip(), max(self._listed(), default=0)
        end = tip.generation if tip else 0
        if last > end:
            where = f"{self._backend.url}/{generation_path(self.channel, end + 1)}"
            raise Corrupt(where, f"it is missing, and the log holds generation {last}", _BROKEN)

    def back_from(self, newest: Generation | None) -> Iterator[Generation]:
        """Every generation, the newest first, each proved by the digest that its successor holds."""
        at = newest
        while at is not None:
            yield at
            if at.previous is None:
                return
            earlier = self._read(at.generation - 1)
            if earlier is None:
                where = f"{self._backend.url}/{generation_path(self.channel, at.generation - 1)}"
                raise Corrupt(where, f"it is missing, and generation {at.generation} follows {at.previous}", _BROKEN)
            self._insist_on_link(earlier, at)
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

    def _taken_back(self, tip: Generation | None, seen: Mark | Generation) -> Corrupt:
        """What was seen once is never taken back: only a later generation may take its place."""
        if tip is None or tip.generation < seen.generation:
            fault = f"it ends at generation {tip.generation if tip else 0}"
        else:
            fault = f"its generation {tip.generation} has the digest {tip.digest}"
        known = f"and this machine has seen generation {seen.generation} with the digest {seen.digest}"
        return Corrupt(f"{self._backend.url}/{log_folder(self.channel)}", f"{fault}, {known}", self._way_out())

    def _way_out(self) -> str:
        restored = "; if the store was restored from an older copy on purpose, remove "
        return _PUT_BACK + (f"{restored}{self._marks.file(self.channel)}" if self._marks else "")

    def _prove(self, tip: Generation, seen: Mark | Generation | None) -> None:
        """Each generation by the digest that the one after it holds, in the order of time."""
        first = seen.generation + 1 if seen else 1
        before = seen
        numbers = range(first, tip.generation)
        for number, one in chain(zip(numbers, self._backend.each(self._read, numbers), strict=True), [(0, tip)]):
            if one is None:
                where = f"{self._backend.url}/{generation_path(self.channel, number)}"
                raise Corrupt(where, f"it is missing, and the log ends at generation {tip.generation}", _BROKEN)
            if before is not None and one.generation > before.generation:
                self._insist_on_link(before, one)
            before = one

    def _insist_on_link(self, earlier: Mark | Generation, later: Generation) -> None:
        where = f"{self._backend.url}/{generation_path(self.channel, earlier.generation)}"
        if earlier.digest != later.previous:
            follows = f"generation {later.generation} follows {later.previous}"
            raise Corrupt(where, f"it has the digest {earlier.digest}, and {follows}", _BROKEN)
        if seconds_since_1970(later.at) < seconds_since_1970(earlier.at) - CLOCKS_DIFFER:
            fault = f"it is of {earlier.at}, and generation {later.generation} after it is dated {later.at}"
            raise Corrupt(where, fault, _BROKEN)

    def _listed(self) -> Iterator[int]:
        folder = log_folder(self.channel)
        for path in self._backend.paths(folder):
            number = number_of(path.removeprefix(folder))
            if number is not None:
                yield number


def _goes_on_from(tip: Generation | None, seen: Mark | Generation) -> bool:
    return tip is not None and (tip.generation > seen.generation or tip.digest == seen.digest)


def channels(backend: Backend) -> list[str]:
    """The names of all channels, in order."""
    return channels_among(backend.walk(CHANNELS))


def channels_among(listed: Iterable[Found]) -> list[str]:
    """Those that have an object in a listing."""
    paths = [found.path for found in listed if found.path.startswith(CHANNELS)]
    return sorted({path.split("/")[1] for path in paths if path.count("/") >= 2})
