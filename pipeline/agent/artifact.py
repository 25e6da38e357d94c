"""What a fleet is to serve: its channel's artifact, of its model, believed by the rules of [signing], in a folder."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifact_store.errors import ChannelEmpty, Refused
from pipeline.channels.colours import channel_of

if TYPE_CHECKING:
    from artifact_store import Store
    from artifact_store.channel.generation import Generation
    from artifact_store.manifest import Manifest
    from artifact_store.transfer.wanted import Wanted
    from artifact_store.trust.policy import Policy
    from pipeline.config import Config, Model, ServingFleet


@dataclass(frozen=True)
class Wish:
    channels: tuple[str, ...]  # the first that was ever promoted to counts
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", colour: str | None) -> "Wish":
        from emulator.hardware import INSTANCES

        model = next(each for each in config.models if each.name == fleet.model)
        own = (channel_of(fleet.name, colour),) if colour else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*own, fleet.channel), _published_as(model), target)


def _published_as(model: "Model") -> str:
    """A folder's model is published under the folder's name."""
    return model.id or Path(str(model.path)).name


def bring(store: "Store", wish: Wish, policy: "Policy | None", folder: Path) -> "Manifest":
    """The folder holds the artifact in the end, each byte of it read against its digest."""
    from artifact_store.transfer.fetch import fetch

    channel, wanted = _resolve(store, wish, policy)
    if policy:
        _require_signatures(policy, store, channel, wanted.digest, wanted.manifest)
    fetch(store.blobs, wanted.manifest, folder)
    return wanted.manifest


def _resolve(store: "Store", wish: Wish, policy: "Policy | None") -> tuple[str, "Wanted"]:
    """By the first channel that is not empty. One that cannot be read or believed is not passed over."""
    from artifact_store.transfer.wanted import by_channel

    def believe(tip: "Generation") -> None:
        if policy and (fault := policy.fault(tip)):
            raise Refused(
                f"generation {tip.generation} of channel {tip.channel} {fault}, and is not served; find out who wrote "
                "it, and promote or roll back again with a trusted key"
            )

    *preferred, last = wish.channels
    for channel in preferred:
        with suppress(ChannelEmpty):
            return channel, by_channel(store, channel, wish.model_id, wish.target, believe=believe)
    return last, by_channel(store, last, wish.model_id, wish.target, believe=believe)


def _require_signatures(policy: "Policy", store: "Store", channel: str, digest: str, manifest: "Manifest") -> None:
    """The promotion has asked for them too; here it is asked again, by whoever runs the bytes."""
    if channel not in policy.required:
        return
    names = policy.signers(store, digest, channel, store.backend.now())
    if len(names) < policy.threshold:
        raise Refused(
            f"{manifest.name} has {len(names)} of the {policy.threshold} signatures "
            f"that channel {channel} asks for, and is not served; sign it with: nxpipe store sign"
        )
