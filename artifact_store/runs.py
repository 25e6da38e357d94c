"""What became of the items of a run that machines elsewhere carry out: one sealed outcome an item, which the driver
reads. It is news and no more: what was made is said by parts and artifacts alone. Section 9 of docs/store-format.md.
"""

from collections.abc import Collection, Iterator
from typing import ClassVar, Final, Literal

from nxpipe.artifact_store.documents import Digest, JsonObject, Sealed, Size
from nxpipe.artifact_store.layout import outcome_path, run_folder
from nxpipe.artifact_store.store import Store

MAX_OUTCOME_BYTES: Final = 1024**2  # the log of a failure is in it


class Outcome(Sealed):
    """`items` is the digest of the run's list, `place` an item's place in it, the first one's 0."""

    max_bytes: ClassVar[int] = MAX_OUTCOME_BYTES

    format: Literal["nxpipe.outcome/1"] = "nxpipe.outcome/1"
    items: Digest
    place: Size
    ended: JsonObject

    @property
    def path(self) -> str:
        return outcome_path(self.items, self.place)


def keep_outcome(store: Store, items: str, place: int, ended: dict[str, object]) -> None:
    """An item that is carried out again, as a machine was lost, says so in the place of its first outcome."""
    store.records.replace(Outcome(items=items, place=place, ended=ended))


def outcomes_of(store: Store, items: str, places: Collection[int]) -> Iterator[Outcome]:
    """Those of these places that are there: one listing, and a read for each that is found."""
    wanted = {outcome_path(items, place) for place in places}
    found = [path for path in store.backend.paths(run_folder(items)) if path in wanted]
    for outcome in store.backend.each(lambda path: store.records.read(Outcome, path), found):
        if outcome is not None:
            yield outcome
