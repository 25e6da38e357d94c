"""Which artifacts a fleet's channels serve, and how a rollout moves them.

A colour's channel is moved before the colour has an instance; the fleet's own only when the rollout has promoted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Final

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.channel import change
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.errors import NotFound, Refused
from nxpipe.artifact_store.transfer.believed import Trust
from nxpipe.pipeline.artifacts.channels import ServedModel, channel_of
from nxpipe.pipeline.artifacts.signing import author_signature, trust_in
from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.rollout.aws import StateMachine
from nxpipe.pipeline.rollout.input import RolloutCandidate
from nxpipe.pipeline.rollout.requirements import artifact_requirements, requirements
from nxpipe.pipeline.rollout.status import StatusReader
from nxpipe.pipeline.util.errors import RolloutRefused

Say = Callable[[str], None]

_PROMOTED: Final = "promoted by rollout {}"


@dataclass(frozen=True)
class FleetArtifacts:
    """Of one fleet. `actor` and `key` are who moves a channel, and what signs where that is asked for."""

    store: Store
    config: Config
    folder: Path  # of nxpipe.toml
    fleet: ServingFleet
    actor: str
    key: str | None = None

    def chosen(self, name: str) -> Published:
        """The artifact that a person named, if the fleet can run it."""
        found = self.store.resolve(name)
        wish = self._wish
        if (found.model_id, found.record.target) != (wish.model_id, wish.target):
            raise Refused(
                f"{name} is of {found.model_id} for {found.record.target}, and fleet {self.fleet.name} runs "
                f"{wish.model_id} on {wish.target}; name another artifact"
            )
        return found

    def served(self, channel: str) -> Served | None:
        """Of the fleet's model and target."""
        return self._of(self._tip(channel))

    def served_for_certain(self, channel: str) -> Published:
        """To be rolled out: with the signatures that this channel asks for, whatever the fleet's own does."""
        served = self._insist(channel)
        self._trust.insist_on_signatures(self.store, channel, served)
        return self._published(served)

    def run_by(self, colour: str) -> Served:
        """What a new instance of the colour would fetch now."""
        return self.served(channel_of(self.fleet.name, colour)) or self._insist(self.fleet.channel)

    def candidate(self, artifact: Published) -> RolloutCandidate:
        tip = self._tip(self.fleet.channel)
        generation = tip.generation if tip else 0
        record = artifact.record
        return RolloutCandidate(record.model_id, record.target, record.request_key, self.fleet.channel, generation)

    def keep(self, colour: str, why: str) -> None:
        """From now on the colour runs what it runs now, whatever becomes of the fleet's channel."""
        channel = channel_of(self.fleet.name, colour)
        if self.served(channel) is None:
            self._promote(channel, self._published(self.run_by(colour)), why)

    def point(self, colour: str, artifact: Published, why: str) -> None:
        """Before the colour has instances: they fetch this one."""
        self._promote(channel_of(self.fleet.name, colour), artifact, why)

    def settled(self, candidate: RolloutCandidate) -> bool:
        """Whether the fleet's channel serves what was promoted, or has been moved by somebody else since."""
        return self._settled(candidate, self._tip(candidate.channel))

    def settle(self, candidate: RolloutCandidate, rollout: str) -> None:
        """The rollout has promoted: the fleet's channel follows. Once more changes nothing."""
        found, channel = self.store.find(candidate.artifact), candidate.channel
        if found is None:
            raise NotFound(f"{candidate.name} is gone from {self.store.url}; publish it again")
        needs = requirements(self.store, self.config, self.folder, channel)
        author = self._author(channel, _PROMOTED.format(rollout))
        while not self._settled(candidate, tip := self._tip(channel)):
            seen = tip.generation if tip else 0
            try:
                change.promote(self.store, channel, [found], author, needs, expected=seen)
            except Refused:
                now = self._tip(channel)
                if (now.generation if now else 0) == seen:  # not because somebody was faster
                    raise

    def _settled(self, candidate: RolloutCandidate, tip: Generation | None) -> bool:
        """What the channel serves of other models, other fleets may have moved meanwhile: that is no matter here."""
        served = self._of(tip)
        if served is not None and served.request_key == candidate.artifact:
            return True
        history = self._trust.history(self.store, candidate.channel)
        since = [self._of(each) for each in takewhile(lambda each: each.generation >= candidate.generation, history)]
        # The generation that was held against comes last, unless that was none.
        before = since.pop() if candidate.generation else None
        return any(each != before for each in since)

    def _promote(self, channel: str, artifact: Published, why: str) -> None:
        needs = artifact_requirements(self.store, self.config, self.folder, channel)
        change.promote(self.store, channel, [artifact], self._author(channel, why), needs)

    def _author(self, channel: str, why: str) -> change.Author:
        return change.Author(self.actor, why, author_signature(self.key, self.config, self.folder, channel, self.store))

    def _insist(self, channel: str) -> Served:
        found = self.served(channel)
        if found is None:
            raise RolloutRefused(
                f"channel {channel} of {self.store.url} serves no {self._wish.model_id} for {self._wish.target}; "
                "promote one to it first"
            )
        return found

    def _published(self, served: Served) -> Published:
        found = self.store.find(served.request_key)
        if found is None:
            raise NotFound(f"{served.name} is served, and gone from {self.store.url}; publish it again")
        return found

    def _tip(self, channel: str) -> Generation | None:
        """Believed: what a rollout copies from one channel to another gets a signature on the way."""
        return self._trust.tip(self.store, channel)

    @cached_property
    def _trust(self) -> Trust:
        return trust_in(self.config, self.folder, self.store)

    def _of(self, tip: Generation | None) -> Served | None:
        slot = (self._wish.model_id, self._wish.target)
        return next((each for each in tip.artifacts if each.slot == slot), None) if tip else None

    @property
    def _wish(self) -> ServedModel:
        return ServedModel.of(self.config, self.fleet, None)


@dataclass(frozen=True)
class RolloutContext:
    """One fleet; `artifacts` is asked to move channels, and otherwise only read."""

    config: Config
    fleet: ServingFleet
    machine: StateMachine
    artifacts: FleetArtifacts

    @property
    def watcher(self) -> StatusReader:
        return StatusReader(self.machine, self.artifacts.store)
