"""One release, and what the store says of it at any moment."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from artifact_store.channel.generation import Generation, Served
from artifact_store.channel.log import ChannelLog
from artifact_store.errors import NotFound
from pipeline.building.matrix import of_file
from pipeline.building.run import Run
from pipeline.channels.promotion import model_id
from pipeline.channels.signing import require_belief, signing_policy
from pipeline.command_line.order_options import chosen_models
from pipeline.command_line.output import Console
from pipeline.release.candidate import Candidate, planned
from pipeline.release.words import Words
from pipeline.state_folder import state_folder
from pipeline.verification.verify import Thresholds

if TYPE_CHECKING:
    from artifact_store import Published, Store
    from pipeline.building.planned import Plan
    from pipeline.config import Config


class Aside(Console):
    """How a build speaks that is no command of its own: stdout is the release's."""

    def result(self, *lines: str) -> None:
        self.say(*lines)

    def page(self, text: str) -> None:
        self.say(*text.split("\n"))

    def data(self, value: object) -> None:
        """The release's report has it."""

    def complain(self, first: str, *further: str) -> None:
        self.say(first, *further)


@dataclass
class Release:
    """`seen` is the generation of the channel that was held against, for a promotion to take its place alone. `known`
    is what was found in the store, where it stays what it is."""

    console: Console
    store: "Store"
    config: "Config"
    config_path: Path
    words: Words
    seen: int | None = None
    known: dict[Candidate, "Published"] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.config_path.parent

    @property
    def kept(self) -> Path:
        """Where reports and records of this machine are."""
        return state_folder(self.config_path) / "releases"

    @cached_property
    def thresholds(self) -> Thresholds:
        return Thresholds.of(self.config)

    @cached_property
    def building(self) -> Run:
        aside, how = Aside(**vars(self.console)), {**self.words.how, "force": False}
        return Run(aside, self.store, self.config, self.thresholds, state_folder(self.config_path), how)

    @cached_property
    def plan(self) -> "Plan | None":
        """As things stood when it was first asked for; None where nothing is built."""
        if self.words.source is not None:
            return None
        asked = of_file(self.config, self.words.names, self.folder)
        if not asked:
            raise click.UsageError("nxpipe.toml describes no model, so there is nothing to release")
        return self.building.plan(asked)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._served_elsewhere() if self.plan is None else planned(self.plan.artifacts)

    def found(self, one: Candidate) -> "Published | None":
        if one not in self.known and (published := self.store.find(one.request_key)):
            self.known[one] = published
        return self.known.get(one)

    def published(self, one: Candidate) -> "Published":
        found = self.found(one)
        if found is None:
            raise NotFound(f"{one.name} is not in {self.store.url}; build it, that is, leave out --skip build")
        return found

    def tip(self, channel: str | None = None) -> Generation | None:
        """Believed, of the channel that is released to, or of another."""
        tip = ChannelLog(self.store.backend, channel or self.words.channel).tip()
        policy = signing_policy(self.config, self.folder)
        if tip and policy:
            require_belief(tip, policy.fault(tip))
        return tip

    def served(self) -> dict[tuple[str, str], Served]:
        """What the channel serves now, by model and target."""
        tip = self.tip()
        return {each.slot: each for each in tip.artifacts} if tip else {}

    def is_served(self, one: Candidate) -> bool:
        served = self.served().get(one.slot)
        return served is not None and served.request_key == one.request_key

    def _served_elsewhere(self) -> tuple[Candidate, ...]:
        """The manifests that another channel serves: were one published anew otherwise, it would not be the same."""
        source = str(self.words.source)
        tip = self.tip(source)
        names = {model_id(model, self.folder) for model in chosen_models(self.config, self.words.names)}
        artifacts = [each for each in tip.artifacts if not self.words.names or each.model_id in names] if tip else []
        if not artifacts:
            what = f" of {', '.join(self.words.names)}" if self.words.names else ""
            raise NotFound(f"channel {source} of {self.store.url} serves nothing{what}; release to it first")
        for served in artifacts:
            found = self.store.find(served.request_key)
            if found is None or found.record.manifest != served.manifest:
                raise NotFound(
                    f"channel {source} serves {served.name}, whose manifest {served.manifest.sha256} is no longer "
                    f"published in {self.store.url}; release to {source} again"
                )
        return tuple(map(Candidate.of, artifacts))
