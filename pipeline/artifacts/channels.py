"""Channels of a serving fleet: its own, and one for each of its two environments, blue and green.

During a rollout the environments serve different artifacts, and a replaced instance must fetch that of its environment.
So each environment has a channel, which only rollouts change. Before its first rollout a fleet has no such channels,
and its own channel applies.
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
    """The channel of an environment. It cannot be in nxpipe.toml, where two hyphens in a row are invalid."""
    return f"{fleet}--{environment}"


def fleet_of_channel(channel: str) -> str | None:
    """The fleet whose rollouts change the channel; None for a channel that people change."""
    fleet, separator, environment = channel.rpartition("--")
    return fleet if separator and environment in ENVIRONMENTS else None


def environment_of(group: str | None, project: str, fleet: str) -> str | None:
    """The environment of an instance, by its Auto Scaling group; None if it is in neither."""
    return next((environment for environment in ENVIRONMENTS if group == f"{project}-{fleet}-{environment}"), None)


def unknown_channel(store: "Store", name: str) -> ChannelEmpty:
    """The error for reading a channel without generations: most likely its name is misspelt."""

    known = channels(store.backend)
    remedy = f"; it has {', '.join(known)}" if known else ", which has none yet; create one with nxpipe promote"
    return ChannelEmpty(f"there is no channel {name!r} in {store.url}{did_you_mean(name, known) or remedy}")


def declared_channels(config: "Config") -> set[str]:
    """Channels that nxpipe.toml names, with or without generations."""
    named = {channel for key in config.signing.trusted for channel in key.channels or ()}
    return named | {fleet.channel for fleet in config.fleets} | set(config.signing.require)


@dataclass(frozen=True)
class ServedModel:
    """The artifact of a fleet: that of the first non-empty channel for this model and target."""

    channels: tuple[str, ...]
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", environment: str | None) -> "ServedModel":

        model = next(model for model in config.models if model.name == fleet.model)
        environment_channels = (environment_channel(fleet.name, environment),) if environment else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*environment_channels, fleet.channel), _published_as(model), target)


def _published_as(model: "Model") -> str:
    """The model id in the store: a local model has the name of its folder."""
    return model.id or Path(str(model.path)).name


def model_id(model: "Model", folder: Path) -> str:
    """The model id in the store: a local model has the name of its resolved folder."""
    return model.id or (folder / expanded(model.path or "")).resolve().name
