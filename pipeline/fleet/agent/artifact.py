"""What a fleet is to serve: its channel's artifact, of its model, believed by the rules of [signing], in a folder."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.pipeline.artifacts.channels import ServedModel

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.transfer.believed import Trust
    from nxpipe.artifact_store.transfer.wanted import Wanted


def fetch_artifact(store: "Store", wish: ServedModel, trust: "Trust", folder: Path) -> "Manifest":
    """The folder holds the artifact in the end, each byte of it read against its digest."""
    from nxpipe.artifact_store.transfer.fetch import fetch

    wanted = _resolve(store, wish, trust)
    fetch(store.blobs, wanted.manifest, folder)
    return wanted.manifest


def _resolve(store: "Store", wish: ServedModel, trust: "Trust") -> "Wanted":
    """By the first channel that is not empty. One that cannot be read or believed is not passed over."""
    from nxpipe.artifact_store.transfer.wanted import by_channel

    *preferred, last = wish.channels
    for channel in preferred:
        with suppress(ChannelEmpty):
            return by_channel(store, channel, wish.model_id, wish.target, trust)
    return by_channel(store, last, wish.model_id, wish.target, trust)
