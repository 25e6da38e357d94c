"""The two colours of a serving fleet, and the channels that they have of their own.

While a rollout is under way the two run different artifacts, and an instance that is replaced must get that of its
colour, whatever becomes of the fleet's channel meanwhile. So each colour has a channel, which rollouts move and nobody
else; until its first rollout a fleet has none, and its channel counts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.util.folders import expanded
from nxpipe.pipeline.util.suggest import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.pipeline.config import Config, Model, ServingFleet


ENVIRONMENTS: Final = ("blue", "green")


def other_environment(colour: str) -> str:
    return ENVIRONMENTS[1 - ENVIRONMENTS.index(colour)]


def environment_channel(fleet: str, colour: str) -> str:
    """No channel of nxpipe.toml is called so: a name there has no two hyphens in a row."""
    return f"{fleet}--{colour}"


def fleet_of_channel(channel: str) -> str | None:
    """The fleet whose rollouts move the channel; None: people do."""
    fleet, apart, colour = channel.rpartition("--")
    return fleet if apart and colour in ENVIRONMENTS else None


def environment_of(group: str | None, project: str, fleet: str) -> str | None:
    """That of an instance, by its Auto Scaling group; None outside of the two."""
    return next((colour for colour in ENVIRONMENTS if group == f"{project}-{fleet}-{colour}"), None)


def unknown_channel(store: "Store", name: str) -> ChannelEmpty:
    """What to raise where a channel is only read: of nothing there can be nothing to compare, fetch or release."""
    from nxpipe.artifact_store.channel.log import channels

    known = channels(store.backend)
    others = f"; it has {', '.join(known)}" if known else ", which has none yet; nxpipe promote makes one"
    return ChannelEmpty(f"there is no channel {name!r} in {store.url}{did_you_mean(name, known) or others}")


def declared_channels(config: "Config") -> set[str]:
    """Channels that nxpipe.toml speaks of, be it that nothing was promoted to them yet."""
    named = {channel for key in config.signing.trusted for channel in key.channels or ()}
    return named | {fleet.channel for fleet in config.fleets} | set(config.signing.require)


@dataclass(frozen=True)
class ServedModel:
    channels: tuple[str, ...]  # the first that was ever promoted to counts
    model_id: str
    target: str

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", colour: str | None) -> "ServedModel":

        model = next(each for each in config.models if each.name == fleet.model)
        own = (environment_channel(fleet.name, colour),) if colour else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*own, fleet.channel), _published_as(model), target)


def _published_as(model: "Model") -> str:
    """A folder's model is published under the folder's name."""
    return model.id or Path(str(model.path)).name


def serving_fleets(config: "Config") -> "dict[str, ServingFleet]":
    from nxpipe.pipeline.config import ServingFleet

    return {each.name: each for each in config.fleets if isinstance(each, ServingFleet)}


def model_id(model: "Model", folder: Path) -> str:
    """What artifacts of the model are published under: a folder goes by its last name."""
    return model.id or (folder / expanded(model.path or "")).resolve().name
