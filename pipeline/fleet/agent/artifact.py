"""What a fleet is to serve: its channel's artifact, of its model, believed by the rules of [signing], in a folder."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.pipeline.artifacts.colours import channel_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.fetch.selection import Wanted
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.pipeline.config import Config, Model, ServingFleet


@dataclass(frozen=True)
class Wish:
    channels: tuple[str, ...]  # the first that was ever promoted to counts
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", colour: str | None) -> "Wish":
        from nxpipe.emulator.hardware import INSTANCES

        model = next(each for each in config.models if each.name == fleet.model)
        own = (channel_of(fleet.name, colour),) if colour else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*own, fleet.channel), _published_as(model), target)


def _published_as(model: "Model") -> str:
    """A folder's model is published under the folder's name."""
    return model.id or Path(str(model.path)).name


def bring(store: "Store", wish: Wish, trust: "ChannelVerifier", folder: Path) -> "Manifest":
    """The folder holds the artifact in the end, each byte of it read against its digest."""
    from nxpipe.artifact_store.fetch.folder import fetch

    wanted = _resolve(store, wish, trust)
    fetch(store.blobs, wanted.manifest, folder)
    return wanted.manifest


def _resolve(store: "Store", wish: Wish, trust: "ChannelVerifier") -> "Wanted":
    """By the first channel that is not empty. One that cannot be read or believed is not passed over."""
    from nxpipe.artifact_store.fetch.selection import by_channel

    *preferred, last = wish.channels
    for channel in preferred:
        with suppress(ChannelEmpty):
            return by_channel(store, channel, wish.model_id, wish.target, trust)
    return by_channel(store, last, wish.model_id, wish.target, trust)
