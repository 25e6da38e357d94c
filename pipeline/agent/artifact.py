"""What a fleet is to serve: its channel's artifact, of its model, believed by the rules of [signing], in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifact_store.errors import Refused

if TYPE_CHECKING:
    from artifact_store import Store
    from artifact_store.channel.generation import Generation
    from artifact_store.manifest import Manifest
    from artifact_store.trust.policy import Policy
    from pipeline.config import Config, Model, ServingFleet


@dataclass(frozen=True)
class Wish:
    channel: str
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet") -> "Wish":
        from emulator.hardware import INSTANCES

        model = next(each for each in config.models if each.name == fleet.model)
        return cls(fleet.channel, _published_as(model), INSTANCES[fleet.instance_types[0]].compiler_target)


def _published_as(model: "Model") -> str:
    """A folder's model is published under the folder's name."""
    return model.id or Path(str(model.path)).name


def bring(store: "Store", wish: Wish, policy: "Policy | None", folder: Path) -> "Manifest":
    """The folder holds the artifact in the end, each byte of it read against its digest."""
    from artifact_store.transfer.fetch import fetch
    from artifact_store.transfer.wanted import by_channel

    def believe(tip: "Generation") -> None:
        if policy and (fault := policy.fault(tip)):
            raise Refused(
                f"generation {tip.generation} of channel {tip.channel} {fault}, and is not served; find out who wrote "
                "it, and promote or roll back again with a trusted key"
            )

    wanted = by_channel(store, wish.channel, wish.model_id, wish.target, believe=believe)
    if policy:
        _require_signatures(policy, store, wish.channel, wanted.digest, wanted.manifest)
    fetch(store.blobs, wanted.manifest, folder)
    return wanted.manifest


def _require_signatures(policy: "Policy", store: "Store", channel: str, digest: str, manifest: "Manifest") -> None:
    """The promotion has asked for them too; here it is asked again, by whoever runs the bytes."""
    if channel not in policy.required:
        return
    names = policy.signers(store, digest, channel, store.backend.now())
    if len(names) < policy.threshold:
        raise Refused(
            f"{manifest.model.id}@{manifest.request_key[:12]} has {len(names)} of the {policy.threshold} signatures "
            f"that channel {channel} asks for, and is not served; sign it with: nxpipe store sign"
        )
