"""Channels of serving fleets: that of the fleet, and one for each of its two environments, blue and green.

During a rollout the environments run different artifacts, and an instance that is replaced must fetch that of its
environment. So each environment has a channel, which only rollouts move. Until its first rollout a fleet has none, and
the fleet's channel applies.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.config import Config, Model, ServingFleet


ENVIRONMENTS: Final = ("blue", "green")


def other_environment(environment: str) -> str:
    return ENVIRONMENTS[1 - ENVIRONMENTS.index(environment)]


def environment_channel(fleet: str, environment: str) -> str:
    """No channel of nxpipe.toml has this name: two hyphens in a row are invalid there."""
    return f"{fleet}--{environment}"


def fleet_of_channel(channel: str) -> str | None:
    """The fleet whose rollouts move the channel; None if people move it."""
    fleet, separator, environment = channel.rpartition("--")
    return fleet if separator and environment in ENVIRONMENTS else None


def environment_of(group: str | None, project: str, fleet: str) -> str | None:
    """The environment of an instance, by its Auto Scaling group; None outside of both."""
    return next((environment for environment in ENVIRONMENTS if group == f"{project}-{fleet}-{environment}"), None)


def unknown_channel(store: "Store", name: str) -> ChannelEmpty:
    """The error for a channel without generations that is to be read: its name is most likely misspelt."""

    known = channels(store.backend)
    others = f"; it has {', '.join(known)}" if known else ", which has none yet; create one with nxpipe promote"
    return ChannelEmpty(f"there is no channel {name!r} in {store.url}{did_you_mean(name, known) or others}")


def declared_channels(config: "Config") -> set[str]:
    """Channels that nxpipe.toml names, whether or not they serve anything yet."""
    named = {channel for key in config.signing.trusted for channel in key.channels or ()}
    return named | {fleet.channel for fleet in config.fleets} | set(config.signing.require)


@dataclass(frozen=True)
class ServedModel:
    """What a fleet serves: the first non-empty channel's artifact for this model and target."""

    channels: tuple[str, ...]
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", environment: str | None) -> "ServedModel":

        model = next(each for each in config.models if each.name == fleet.model)
        own = (environment_channel(fleet.name, environment),) if environment else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*own, fleet.channel), _published_as(model), target)


def _published_as(model: "Model") -> str:
    """A local model is published under the name of its folder."""
    return model.id or Path(str(model.path)).name


def model_id(model: "Model", folder: Path) -> str:
    """The model id of the store: a local model has the name of its folder."""
    return model.id or (folder / expanded(model.path or "")).resolve().name
