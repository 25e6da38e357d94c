"""One fleet of a rollout: configuration, state machine and channels.

Each environment (blue, green) has a channel of its own, and the fleet has one. A rollout moves the candidate's channel
before the environment has an instance, and the fleet's channel after the promotion. So an instance that is replaced in
the middle of a rollout fetches the artifact of its environment.
"""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Final

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.channel import change
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.errors import NotFound, Refused
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
from nxpipe.pipeline.artifacts.channels import ServedModel, environment_channel
from nxpipe.pipeline.artifacts.requirements import artifact_requirements, requirements
from nxpipe.pipeline.artifacts.signing import author_signature, trust_in
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.config import Config, ServingFleet, load_config
from nxpipe.pipeline.config.root import serving_fleet, serving_fleets
from nxpipe.pipeline.rollout.aws import StateMachine
from nxpipe.pipeline.rollout.input import RolloutCandidate
from nxpipe.pipeline.rollout.status import StatusReader
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid, RolloutRefused

_PROMOTED: Final = "promoted by rollout {}"


@dataclass(frozen=True)
class FleetArtifacts:
    """Channels of one fleet. `actor` is the identity in their logs; `key` signs where a channel requires it."""

    store: Store
    config: Config
    folder: Path  # of nxpipe.toml
    fleet: ServingFleet
    actor: str
    key: str | None = None

    def resolve(self, name: str) -> Published:
        """The named artifact, if the fleet can run it."""
        artifact = self.store.resolve(name)
        model = self._model
        if (artifact.model_id, artifact.record.target) != (model.model_id, model.target):
            raise Refused(
                f"{name} is {artifact.model_id} for {artifact.record.target}, but fleet {self.fleet.name} runs "
                f"{model.model_id} on {model.target}; name another artifact"
            )
        return artifact

    def served(self, channel: str) -> Served | None:
        """The artifact that the channel serves for the fleet's model and target."""
        return self._of(self._tip(channel))

    def served_and_signed(self, channel: str) -> Published:
        """The artifact that a channel serves, if it has the signatures that the channel requires."""
        served = self._require_served(channel)
        self._trust.require_signatures(self.store, channel, served)
        return self._published(served)

    def running_artifact(self, colour: str) -> Served:
        """The artifact that a new instance of the environment would fetch now."""
        return self.served(environment_channel(self.fleet.name, colour)) or self._require_served(self.fleet.channel)

    def candidate(self, artifact: Published) -> RolloutCandidate:
        """The candidate of a rollout, if the fleet can run its programs.

        What the fleet runs already is not examined: a rollout must be able to leave it.
        """
        if fault := self._model.host.fault(artifact.name, artifact.manifest.backend):
            raise Refused(fault)
        tip = self._tip(self.fleet.channel)
        generation = tip.generation if tip else 0
        record = artifact.record
        return RolloutCandidate(record.model_id, record.target, record.request_key, self.fleet.channel, generation)

    def pin(self, colour: str, why: str) -> None:
        """Pins the environment to the artifact that it runs now, independently of the fleet's channel.

        Its evidence was examined when it was promoted to that channel: it does without what that channel does without.
        """
        channel = environment_channel(self.fleet.name, colour)
        if self.served(channel) is None:
            running = self.running_artifact(colour)
            lacks = dict.fromkeys(running.without, f"channel {self.fleet.channel} serves it without")
            needs = replace(self._needs(channel), check_evidence=lambda *_: lacks)
            author, waiver = self._author(channel, why), change.EvidenceWaiver.of(lacks, why)
            change.promote(self.store, channel, [self._published(running)], author, needs, waiver=waiver)

    def promote(self, colour: str, artifact: Published, why: str, waiver: change.EvidenceWaiver | None = None) -> None:
        """Promotes the artifact to the environment's channel, before the environment has instances."""
        channel = environment_channel(self.fleet.name, colour)
        author, needs = self._author(channel, why), self._needs(channel)
        change.promote(self.store, channel, [artifact], author, needs, waiver=waiver)

    def is_promoted(self, candidate: RolloutCandidate) -> bool:
        """True if the fleet's channel serves the promoted artifact, or was moved by another change since."""
        return self._is_settled(candidate, self._tip(candidate.channel))

    def promote_candidate(
        self, candidate: RolloutCandidate, rollout: str, waiver: change.EvidenceWaiver | None = None
    ) -> None:
        """Promotes the candidate of a promoted rollout to the fleet's channel. A repetition changes nothing."""
        published, channel = self.store.find(candidate.artifact), candidate.channel
        if published is None:
            raise NotFound(f"{candidate.name} is not in {self.store.url}; publish it again")
        needs = requirements(self.store, self.config, self.folder, channel)
        author = self._author(channel, _PROMOTED.format(rollout))
        while not self._is_settled(candidate, tip := self._tip(channel)):
            seen = tip.generation if tip else 0
            try:
                change.promote(self.store, channel, [published], author, needs, expected=seen, waiver=waiver)
            except Refused:
                now = self._tip(channel)
                if (now.generation if now else 0) == seen:  # the refusal was not caused by a concurrent change
                    raise

    def _is_settled(self, candidate: RolloutCandidate, tip: Generation | None) -> bool:
        """Compares the fleet's model and target only: other fleets may move other models of the channel meanwhile."""
        served = self._of(tip)
        if served is not None and served.request_key == candidate.artifact:
            return True
        history = self._trust.history(self.store, candidate.channel)
        since = [
            self._of(generation)
            for generation in takewhile(lambda generation: generation.generation >= candidate.generation, history)
        ]
        # The last one is the generation that the rollout started from, unless the channel was empty.
        before = since.pop() if candidate.generation else None
        return any(generation != before for generation in since)

    def _needs(self, channel: str) -> change.Requirements:
        return artifact_requirements(self.store, self.config, self.folder, channel)

    def _author(self, channel: str, why: str) -> change.Author:
        return change.Author(self.actor, why, author_signature(self.key, self.config, self.folder, channel, self.store))

    def _require_served(self, channel: str) -> Served:
        served = self.served(channel)
        if served is None:
            raise RolloutRefused(
                f"channel {channel} of {self.store.url} serves no {self._model.model_id} for {self._model.target}; "
                "promote one to it first"
            )
        return served

    def _published(self, served: Served) -> Published:
        published = self.store.find(served.request_key)
        if published is None:
            raise NotFound(f"{served.name} is served but not in {self.store.url}; publish it again")
        return published

    def _tip(self, channel: str) -> Generation | None:
        """The verified tip: an artifact that a rollout copies to another channel is signed there."""
        return self._trust.tip(self.store, channel)

    @cached_property
    def _trust(self) -> ChannelVerifier:
        return trust_in(self.config, self.folder, self.store)

    def _of(self, tip: Generation | None) -> Served | None:
        slot = (self._model.model_id, self._model.target)
        return next((served for served in tip.artifacts if served.slot == slot), None) if tip else None

    @property
    def _model(self) -> ServedModel:
        return ServedModel.of(self.config, self.fleet, None)


@dataclass(frozen=True)
class RolloutContext:
    """One fleet with its state machine in AWS and its channels in the store."""

    config: Config
    fleet: ServingFleet
    machine: StateMachine
    artifacts: FleetArtifacts

    @property
    def watcher(self) -> StatusReader:
        return StatusReader(self.machine, self.artifacts.store)


def open_context(
    console: Console, fleet: str, store: str | None, config_path: Path, *, actor: str = "", key: str | None = None
) -> RolloutContext:
    """The fleet that a command names, with its state machine and its channels."""
    config = load_config(config_path, os.environ)
    served = fleet_with_rollouts(config, fleet)
    # Channels are read without this machine's cache: a rollout changes them.
    opened = open_uncached_store(store, config_path, console)
    artifacts = FleetArtifacts(opened, config, config_path.parent, served, actor, key)
    return RolloutContext(config, served, StateMachine(config, served), artifacts)


def fleet_with_rollouts(config: Config, name: str) -> ServingFleet:
    """The fleet that a command names, unless it follows its channel in place."""
    found = serving_fleet(config, name, "FLEET")
    if found.updates.are_followed:
        raise InputInvalid(
            f'fleet {name} has no rollouts: with updates.policy = "{found.updates.policy}" its instances follow '
            f"channel {found.channel}; run: nxpipe promote ARTIFACT --channel {found.channel}"
        )
    return found


def serving_fleet_names(config_path: Path) -> list[str]:
    """The fleets that have rollouts."""
    fleets = serving_fleets(load_config(config_path, os.environ))
    return [name for name, fleet in fleets.items() if not fleet.updates.are_followed]
