"""One release, and what the store says of it at any moment."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.errors import NotFound, Refused
from nxpipe.artifact_store.transfer.believed import Trust
from nxpipe.pipeline.artifacts.known import unknown_channel
from nxpipe.pipeline.artifacts.promotion import model_id
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.build.matrix import specs_of_config
from nxpipe.pipeline.build.run import Run
from nxpipe.pipeline.models.spec import configured_models
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.release.candidate import Candidate, planned
from nxpipe.pipeline.release.words import Expected, Words
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.state_folder import state_folder

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.build.planned import Plan
    from nxpipe.pipeline.config import Config


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
        asked = specs_of_config(self.config, self.words.names, self.folder)
        if not asked:
            raise click.UsageError("nxpipe.toml describes no model, so there is nothing to release")
        return self.building.plan(asked)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return self._served_elsewhere() if self.plan is None else planned(self.plan.artifacts)

    @cached_property
    def trust(self) -> Trust:
        return trust_in(self.config, self.folder, self.store, self.console.say)

    def found(self, one: Candidate) -> "Published | None":
        """Of what a channel serves, the very manifest: one that was published otherwise meanwhile is another."""
        if one not in self.known and (published := self.store.find(one.request_key)):
            if one.manifest not in (None, published.manifest_digest):
                raise self._gone(one)
            self.known[one] = published
        return self.known.get(one)

    def published(self, one: Candidate) -> "Published":
        found = self.found(one)
        if found is None:
            raise NotFound(f"{one.name} is not in {self.store.url}; build it, that is, leave out --skip build")
        return found

    def tip(self, channel: str | None = None) -> Generation | None:
        """Believed, of the channel that is released to, or of another."""
        return self.trust.tip(self.store, channel or self.words.channel)

    def served(self) -> dict[tuple[str, str], Served]:
        """What the channel serves now, by model and target."""
        tip = self.tip()
        return {each.slot: each for each in tip.artifacts} if tip else {}

    def is_served(self, one: Candidate) -> bool:
        served = self.served().get(one.slot)
        return served is not None and served.request_key == one.request_key

    def _served_elsewhere(self) -> tuple[Candidate, ...]:
        """The manifests that another channel serves: were one published anew otherwise, it would not be the same.

        The channel is read once: what it serves later is no matter to this release.
        """
        source = str(self.words.source)
        tip = self.tip(source)
        if tip is None:
            raise unknown_channel(self.store, source)
        self._require_the_expected(tip)
        names = {model_id(model, self.folder) for model in configured_models(self.config, self.words.names)}
        artifacts = [each for each in tip.artifacts if not self.words.names or each.model_id in names]
        if not artifacts:
            what = f" of {', '.join(self.words.names)}" if self.words.names else ""
            raise NotFound(f"channel {source} of {self.store.url} serves nothing{what}; release to it first")
        for served in artifacts:
            self.trust.insist_on_signatures(self.store, source, served)
        candidates = tuple(map(Candidate.of, artifacts))
        for one in candidates:
            if self.found(one) is None:
                raise self._gone(one)
        return candidates

    def _gone(self, one: Candidate) -> NotFound:
        return NotFound(
            f"channel {self.words.source} serves {one.name}, whose manifest {one.manifest} is no longer published in "
            f"{self.store.url}; release to {self.words.source} again"
        )

    def _require_the_expected(self, tip: Generation | None) -> None:
        expected, serves = self.words.expect, tip and Expected(tip.generation, tip.digest)
        if expected not in (None, serves):
            raise Refused(
                f"channel {self.words.source} of {self.store.url} serves {serves or 'nothing'}, and {expected} was "
                f"expected; look at what it serves now, and have that approved"
            )
