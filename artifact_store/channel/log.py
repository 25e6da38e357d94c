"""Log of one channel: finding its head, reading it back, appending by conditional create."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from nxpipe.artifact_store.backends.protocol import Backend, ListedObject
from nxpipe.artifact_store.channel.generation import Generation, Head
from nxpipe.artifact_store.channel.watermarks import Mark, Marks
from nxpipe.artifact_store.documents import (
    parse_document,
    seconds_since_1970,
)
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, StoreUnavailable
from nxpipe.artifact_store.layout import CHANNELS, generation_path, head_path, log_folder, number_of
from nxpipe.artifact_store.records import Records

_ATTEMPTS: Final = 1000  # each failed attempt means that another process appended a generation
_BROKEN: Final = "compare the log with a replica or a backup; the generations after it cannot be trusted"
_PUT_BACK: Final = "put the log back from a replica or a backup"
_REMOVED: Final = "put it back from a replica or a backup; if only the head is wrong, remove that object"
CLOCKS_DIFFER: Final = 900.0  # seconds; permitted difference between the clocks of two writers


@dataclass(frozen=True)
class Appended:
    """The last generation of the log, and whether and after which one this call appended it."""

    generation: Generation
    changed: bool
    before: Generation | None = None  # the one that it follows, if this call appended it


class ChannelLog:
    """The append-only log of one channel."""

    def __init__(self, backend: Backend, channel: str, marks: Marks | None = None, *, binding: bool = True) -> None:
        """`binding`: refuse a log that does not continue from the watermark; else verify such a log from its start."""
        # The name becomes part of a path, so it is validated like a document's field.
        self.channel = parse_document(Head, {"format": "nxpipe.head/1", "channel": channel, "generation": 1}).channel
        self._backend = backend
        self._marks = marks
        self._binding = binding
        self._records = Records(backend)
        self._proved: Generation | None = None  # the newest generation up to which the chain is verified

    def tip(self) -> Generation | None:
        """The newest generation, which the channel serves now.

        The chain of digests is verified from it back to this machine's watermark, or without one to the first
        generation.
        """
        tip, seen = self.newest(), self._proved or (self._marks.read(self.channel) if self._marks else None)
        if seen is not None and not _continues(tip, seen):
            if self._binding:
                raise self._rolled_back(tip, seen)
            seen = None
        if tip is not None:
            self._prove(tip, seen)
            self._proved = tip
        return tip

    def newest(self, *, past_head: bool = True) -> Generation | None:
        """The newest generation, with only its seal verified. `past_head`: look for generations after the head's."""
        try:
            head = self._records.read(Head, head_path(self.channel))
        except Corrupt:
            head = None  # the head is a hint, and the next promotion replaces it
        generation = self._read(head.generation if head else max(self._listed(), default=0))
        if generation is None and head is not None:
            # A generation is written before the head that names it, so no crash causes this.
            where = f"{self._backend.url}/{head_path(self.channel)}"
            raise Corrupt(where, f"it names generation {head.generation}, which is missing from the log", _REMOVED)
        while past_head and generation is not None and (later := self._read(generation.generation + 1)) is not None:
            generation = later
        return generation

    def read(self, generation: int) -> Generation | None:
        return self._read(generation)

    def check_no_gap(self) -> None:
        """Raise Corrupt if generations exist beyond the tip, since one in between was removed. Costs a listing."""
        tip, last = self.tip(), max(self._listed(), default=0)
        end = tip.generation if tip else 0
        if last > end:
            where = f"{self._backend.url}/{generation_path(self.channel, end + 1)}"
            raise Corrupt(where, f"it is missing, and the log holds generation {last}", _BROKEN)

    def back_from(self, newest: Generation | None) -> Iterator[Generation]:
        """Every generation, newest first, each verified against the digest that its successor holds."""
        later = newest
        while later is not None:
            yield later
            if later.previous is None:
                return
            earlier = self._read(later.generation - 1)
            if earlier is None:
                where = f"{self._backend.url}/{generation_path(self.channel, later.generation - 1)}"
                fault = f"it is missing, and generation {later.generation} follows {later.previous}"
                raise Corrupt(where, fault, _BROKEN)
            self._verify_link(earlier, later)
            later = earlier

    def append(self, make: Callable[[Generation | None], Generation | None]) -> Appended:
        """Append the generation that `make` returns for the tip; None appends nothing."""
        for _ in range(_ATTEMPTS):
            tip = self.tip()
            generation = make(tip)
            if generation is None:
                if tip is None:
                    raise InvalidDocument(f"channel {self.channel} is empty, and there is no generation to append")
                return Appended(tip, changed=False)
            if self._records.create_or_read(generation).write_id == generation.write_id:
                self._records.replace(Head(channel=self.channel, generation=generation.generation))
                return Appended(generation, changed=True, before=tip)
        raise StoreUnavailable(
            f"{_ATTEMPTS} other writes to channel {self.channel} of {self._backend.url} came first; a retry is safe"
        )

    def _read(self, generation: int) -> Generation | None:
        return self._records.read(Generation, generation_path(self.channel, generation)) if generation else None

    def _rolled_back(self, tip: Generation | None, seen: Mark | Generation) -> Corrupt:
        """The error for a log that lacks a generation which this machine has already seen."""
        if tip is None or tip.generation < seen.generation:
            fault = f"it ends at generation {tip.generation if tip else 0}"
        else:
            fault = f"its generation {tip.generation} has the digest {tip.digest}"
        known = f"and this machine has seen generation {seen.generation} with the digest {seen.digest}"
        return Corrupt(f"{self._backend.url}/{log_folder(self.channel)}", f"{fault}, {known}", self._remedy())

    def _remedy(self) -> str:
        restored = "; if the store was restored from an older copy on purpose, remove "
        return _PUT_BACK + (f"{restored}{self._marks.file(self.channel)}" if self._marks else "")

    def _prove(self, tip: Generation, seen: Mark | Generation | None) -> None:
        """Verify each generation after `seen` against the digest that its successor holds, oldest first."""
        first = seen.generation + 1 if seen else 1
        before = seen
        numbers = range(first, tip.generation)
        earlier = zip(numbers, self._backend.each(self._read, numbers), strict=True)
        for number, generation in chain(earlier, [(0, tip)]):
            if generation is None:
                where = f"{self._backend.url}/{generation_path(self.channel, number)}"
                raise Corrupt(where, f"it is missing, and the log ends at generation {tip.generation}", _BROKEN)
            if before is not None and generation.generation > before.generation:
                self._verify_link(before, generation)
            before = generation

    def _verify_link(self, earlier: Mark | Generation, later: Generation) -> None:
        where = f"{self._backend.url}/{generation_path(self.channel, earlier.generation)}"
        if earlier.digest != later.previous:
            follows = f"generation {later.generation} follows {later.previous}"
            raise Corrupt(where, f"it has the digest {earlier.digest}, and {follows}", _BROKEN)
        if seconds_since_1970(later.at) < seconds_since_1970(earlier.at) - CLOCKS_DIFFER:
            fault = f"it is dated {earlier.at}, and generation {later.generation} after it is dated {later.at}"
            raise Corrupt(where, fault, _BROKEN)

    def _listed(self) -> Iterator[int]:
        folder = log_folder(self.channel)
        for path in self._backend.paths(folder):
            number = number_of(path.removeprefix(folder))
            if number is not None:
                yield number


def _continues(tip: Generation | None, seen: Mark | Generation) -> bool:
    return tip is not None and (tip.generation > seen.generation or tip.digest == seen.digest)


def channels(backend: Backend) -> list[str]:
    """The names of all channels, in order."""
    return channels_among(backend.walk(CHANNELS))


def channels_among(listed: Iterable[ListedObject]) -> list[str]:
    """The names of the channels that have an object in a listing."""
    paths = [item.path for item in listed if item.path.startswith(CHANNELS)]
    return sorted({path.split("/")[1] for path in paths if path.count("/") >= 2})
