"""The list of items that an array job carries out: one blob of the store, in which every child has a place."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.jobs import Begun, Ended, Event, Item, Said, to_document
from nxpipe.pipeline.build.status import fault_of
from nxpipe.pipeline.request import digest_of
from nxpipe.pipeline.util.documents import json_of
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob


_FORMAT: Final = "nxpipe.items/1"
_INSTEAD: Final = "publish it to the hub and name it by its id there, or take another executor"


def put_items(store: "Store", items: Sequence[Item]) -> "Blob":
    """No two lists are alike, so that nobody takes the outcome of an earlier attempt for that of this one."""
    from nxpipe.artifact_store.canonical import canonical_json

    document = {"format": _FORMAT, "run": secrets.token_hex(16), "items": [item.document() for item in items]}
    return store.put_blob(canonical_json(document))


def item_at(store: "Store", digest: str, place: int) -> Item:
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.errors import InvalidDocument, NotFound
    from nxpipe.artifact_store.layout import digest_path

    where = f"{store.url}/{digest_path(digest)}"
    stat = store.backend.stat(digest_path(digest))
    if stat is None:
        raise NotFound(f"{where}: no such list of items; it is collected a day after its build, which makes a new one")
    document = json_of(store.read_blob(Blob(sha256=digest, size=stat.size)))
    if document.get("format") != _FORMAT or not 0 <= place < len(document["items"]):
        raise InvalidDocument(f"{where}: it is no list of items with a place {place}; only a build writes such lists")
    return Item.from_document(document["items"][place])


def require_nothing_of_this_machine(asked: Asked) -> None:
    """A worker elsewhere has the hub, the store and what it is told; no file that lies here."""
    from nxpipe.pipeline.models.source import looks_like_folder
    from nxpipe.pipeline.saved import is_saved

    model, weights = asked.order.model_id, asked.order.weights
    if is_saved(model):
        raise BuildRefused(
            f"{model}: a program in a file of this machine, which no worker of the build farm has; "
            f"build it by another executor"
        )
    if looks_like_folder(model):
        raise BuildRefused(f"{model}: a folder of this machine, which no worker of the build farm has; {_INSTEAD}")
    if weights is not None and weights != "hub" and not weights.startswith("random:"):
        raise BuildRefused(
            f"{model}: its weights are in {Path(weights)} of this machine, which no worker of the build farm has; "
            f"{_INSTEAD}"
        )


_LOG: Final = 64 * 1024  # characters of a log that go into the outcome: its end; all of it is in the job's output
_MESSAGE: Final = 4096


def work(url: str, items: str, place: int, say: Callable[[str], None]) -> Ended:
    """`url` is the store as this machine sees it; that of the driver stands in the item."""
    from nxpipe.artifact_store.runs import keep_outcome
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.build.worker import carry_out

    item = replace(item_at(open_store(url), items, place), store=url)
    say(f"{item.title}: item {place} of {items[:12]}")

    def tell(event: Event) -> None:
        if isinstance(event, Said):
            say(event.text)
        elif isinstance(event, Begun):
            say(f"begun by {event.worker}")

    try:
        _require_the_same_question(item)
    except Exception as error:
        ended = Ended(item.key, 0.0, fault=fault_of(error))
    else:
        ended = carry_out(item, tell)
    say(_last_words(ended))
    keep_outcome(open_store(url, kms_key=item.kms_key), items, place, to_document(_brief(ended)))
    return ended


def _require_the_same_question(item: Item) -> None:
    """An image of another version would answer another question than was asked, and commit it under another key."""
    request = item.asked.request()
    if item.shape is None:
        own = digest_of(request.key_inputs())
    else:
        own = request.evidence_key(item.shape) if request.verified else request.program_key(item.shape)
    if own != item.key:
        raise MissingSoftware(
            "what it was planned with (the version of nxpipe, its libraries, or the revision that the hub has)",
            f"{item.title} of the build farm",
            "deploy an image of [farm] that is made of what the build runs with, and name the revision of a model",
        )


def _last_words(ended: Ended) -> str:
    if ended.fault is None:
        return f"{'found' if ended.cached else 'done'} after {ended.seconds:.1f} s"
    return f"{ended.fault.log}\n{ended.fault.kind}: {ended.fault.message}".lstrip()


def _brief(ended: Ended) -> Ended:
    """So that it fits into a record, and can be spelled in it: a file's name may hold what UTF-8 cannot."""
    fault = ended.fault
    if fault is None:
        return ended
    message, log = (text.encode(errors="replace").decode() for text in (fault.message, fault.log))
    return replace(ended, fault=replace(fault, message=message[:_MESSAGE], log=log[-_LOG:]))
