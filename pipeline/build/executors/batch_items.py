"""The list of items that an array job carries out: one blob of the store, in which every child has a place."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.util.errors import BuildRefused
from nxpipe.pipeline.util.files import json_of

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
