"""Channels of a serving fleet, and the artifacts that its instances can run.

A fleet has a channel of its own, and one for each of its two environments, blue and green. During a rollout the
environments serve different artifacts, and a replaced instance must fetch that of its environment. So each environment
has a channel, which only rollouts change. Before its first rollout a fleet has no such channels, and its own channel
applies.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config, Model, ServingFleet
    from nxpipe.pipeline.config.endpoints import ModelEndpoint


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


def unknown_channel(store: "Store", name: str, config: "Config | None" = None) -> ChannelEmpty:
    """The error for reading a channel without generations: most likely its name is misspelt. A name may be meant that
    only nxpipe.toml has."""
    known = channels(store.backend)
    remedy = f"; it has {', '.join(known)}" if known else ", which has none yet; create one with nxpipe promote"
    declared = declared_channels(config) if config else set()
    hint = "" if name in declared else did_you_mean(name, sorted({*known, *declared}))
    return ChannelEmpty(f"there is no channel {name!r} in {store.url}{hint or remedy}")


def new_channel_warning(store: "Store", config: "Config", name: str) -> str | None:
    """The sentence about a channel that does not exist yet, and has nearly the name of one that does."""
    known = channels(store.backend)
    if name in known or name in declared_channels(config):
        return None
    hint = did_you_mean(name, known)
    return f"channel {name} is new{hint}" if hint else None


def declared_channels(config: "Config") -> set[str]:
    """Channels that nxpipe.toml names, with or without generations."""
    named = {channel for key in config.signing.trusted for channel in key.channels or ()}
    return named | {fleet.channel for fleet in config.fleets} | set(config.signing.require) | set(config.channels)


_ON_DEVICES: Final = "neuronx"  # the back end whose programs a Neuron device runs


@dataclass(frozen=True)
class ProgramHost:
    """A fleet or an endpoint that runs an artifact's programs. A rehearsal may run the emulator's as well."""

    name: str  # as in "fleet search"
    table: str  # of nxpipe.toml, as in "[[fleets]]"
    rehearsal: bool

    @classmethod
    def of_fleet(cls, fleet: "ServingFleet") -> "ProgramHost":
        return cls(f"fleet {fleet.name}", "[[fleets]]", fleet.rehearsal)

    @classmethod
    def of_endpoint(cls, endpoint: "ModelEndpoint") -> "ProgramHost":
        return cls(f"endpoint {endpoint.name}", "[[endpoints]]", endpoint.rehearsal)

    def fault(self, artifact: str, backend: str) -> str | None:
        """The reason why the programs of an artifact cannot run here; None if they can.

        The only place that decides it: the agent, promotions, rollouts, releases and fetches for endpoints call it.
        """
        if backend == _ON_DEVICES or self.rehearsal:
            return None
        return (
            f"{artifact} has programs of backend {backend}, which no Neuron device runs, and {self.name} needs those "
            f"of backend {_ON_DEVICES}; build with --backend {_ON_DEVICES}, or set rehearsal = true in its "
            f"{self.table} table"
        )

    def notice(self) -> str | None:
        """The sentence of a rehearsal, printed where its channels are shown or changed."""
        if not self.rehearsal:
            return None
        return f"{self.name} is a rehearsal: it may serve programs of the emulator; send it no production traffic"


def hosts_of_channel(config: "Config", folder: Path, channel: str) -> "dict[tuple[str, str], list[ProgramHost]]":
    """The serving fleets that fetch from the channel, by model id and target: their own channel, or an environment's.

    Training fleets fetch no programs.
    """
    from nxpipe.pipeline.config.root import serving_fleets

    ids = model_ids(config, folder)
    hosts: dict[tuple[str, str], list[ProgramHost]] = {}
    for fleet in serving_fleets(config).values():
        if fleet.channel == channel or fleet_of_channel(channel) == fleet.name:
            slot = ids[fleet.model], INSTANCES[fleet.instance_types[0]].compiler_target
            hosts.setdefault(slot, []).append(ProgramHost.of_fleet(fleet))
    return hosts


def rehearsals_of(config: "Config", folder: Path, channel: str) -> list[str]:
    """The notices of the rehearsals among the fleets of a channel."""
    hosts = [host for some in hosts_of_channel(config, folder, channel).values() for host in some]
    return [notice for host in hosts if (notice := host.notice())]


def program_check(config: "Config", folder: Path, channel: str) -> "Callable[[Manifest], str | None]":
    """A function that returns why a fleet of the channel cannot run an artifact's programs; None if all of them can."""
    hosts = hosts_of_channel(config, folder, channel)

    def check(manifest: "Manifest") -> str | None:
        slot = manifest.model.id, manifest.target
        return program_fault(hosts.get(slot, ()), manifest.name, manifest.backend)

    return check


def program_fault(hosts: "Iterable[ProgramHost]", artifact: str, backend: str) -> str | None:
    """The first reason why one of the hosts cannot run the programs."""
    return next((fault for host in hosts if (fault := host.fault(artifact, backend))), None)


def endpoint_fault(config: "Config", folder: Path, name: str, manifest: "Manifest") -> str | None:
    """The reason why a SageMaker endpoint cannot run an artifact; None if it can."""
    endpoints = {endpoint.name: endpoint for endpoint in config.endpoints}
    if name not in endpoints:
        hint = did_you_mean(name, endpoints) or f"; there are {', '.join(endpoints) or 'none'}"
        raise InputInvalid(f"--endpoint: nxpipe.toml has no endpoint {name!r}{hint}")
    endpoint = endpoints[name]
    model = next(model for model in config.models if model.name == endpoint.model)
    slot = model_id(model, folder), endpoint.hardware.compiler_target
    if (manifest.model.id, manifest.target) != slot:
        return (
            f"{manifest.name} is {manifest.model.id} for {manifest.target}, but endpoint {name} runs {slot[0]} on "
            f"{slot[1]}; name another artifact"
        )
    return ProgramHost.of_endpoint(endpoint).fault(manifest.name, manifest.backend)


@dataclass(frozen=True)
class ServedModel:
    """The artifact of a fleet: that of the first non-empty channel for this model and target."""

    channels: tuple[str, ...]
    model_id: str
    target: str
    host: "ProgramHost"

    @classmethod
    def of(cls, config: "Config", fleet: "ServingFleet", environment: str | None) -> "ServedModel":
        """A fleet that follows its channel in place has no rollouts, so that channels of environments do not apply."""
        if fleet.updates.are_followed:
            environment = None
        model = next(model for model in config.models if model.name == fleet.model)
        environment_channels = (environment_channel(fleet.name, environment),) if environment else ()
        target = INSTANCES[fleet.instance_types[0]].compiler_target
        return cls((*environment_channels, fleet.channel), _published_as(model), target, ProgramHost.of_fleet(fleet))


def _published_as(model: "Model") -> str:
    """The model id in the store: a local model has the name of its folder."""
    return model.id or Path(str(model.path)).name


def model_ids(config: "Config", folder: Path) -> dict[str, str]:
    """The model ids in the store, by the models' names in nxpipe.toml."""
    return {model.name: model_id(model, folder) for model in config.models}


def model_id(model: "Model", folder: Path) -> str:
    """The model id in the store: a local model has the name of its resolved folder."""
    return model.id or (folder / expanded(model.path or "")).resolve().name
