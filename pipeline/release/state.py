"""State of a release: its candidates, and what the store and its channels hold for them.

There is one candidate per model and target: an artifact with its request key, whether it is built or not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.documents import written_now
from nxpipe.artifact_store.errors import NotFound, Refused
from nxpipe.artifact_store.names import short_name
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.artifacts.channels import (
    ENVIRONMENTS,
    environment_channel,
    model_ids,
    unknown_channel,
)
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.build.run import BuildRun
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config.root import serving_fleets
from nxpipe.pipeline.models.spec import specs_of_config
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.versions import compiler_digest
from nxpipe.pipeline.release.options import ExpectedGeneration, ReleaseOptions
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import ExitCode
from nxpipe.pipeline.util.files import state_folder, write_whole

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.build.plan import BuildPlan, PlannedArtifact
    from nxpipe.pipeline.config import Config, ServingFleet
    from nxpipe.pipeline.util.exit_codes import ExitCode


@dataclass(frozen=True)
class ReleaseCandidate:
    """An artifact to release. `owner` is its model in nxpipe.toml; `target` is the compiler target. For a release from
    a channel, `manifest` is the digest that the source channel serves.
    """

    model_id: str
    target: str
    request_key: str
    owner: str | None = None
    manifest: str | None = None

    @property
    def slot(self) -> tuple[str, str]:
        """The slot of a channel: model and target."""
        return self.model_id, self.target

    @property
    def name(self) -> str:
        return short_name(self.model_id, self.request_key)

    @classmethod
    def of(cls, served: "Served") -> "ReleaseCandidate":
        return cls(served.model_id, served.target, served.request_key, manifest=served.manifest.sha256)


def planned_candidates(artifacts: "Sequence[PlannedArtifact]") -> tuple[ReleaseCandidate, ...]:
    """The first artifact of each model and target. The check and build gates report invalid requests."""
    slots: dict[tuple[str, str], ReleaseCandidate] = {}
    for candidate in _described(artifacts):
        first = slots.setdefault(candidate.slot, candidate)
        if first.owner != candidate.owner:
            raise Refused(
                f"models {first.owner} and {candidate.owner} of nxpipe.toml are both {candidate.model_id} for "
                f"{candidate.target}, but a channel serves one; select it with --only"
            )
    return tuple(slots.values())


def _described(artifacts: "Sequence[PlannedArtifact]") -> Iterable[ReleaseCandidate]:
    for artifact in artifacts:
        if artifact.key:
            request = BuildSpec.of(artifact.spec)
            yield ReleaseCandidate(request.source.id, request.target.compiler_target, artifact.key, artifact.spec.name)


_FORMAT: Final = "nxpipe.verified/1"


@dataclass(frozen=True)
class VerifiedManifests:
    """Manifests that this machine has verified: one file per manifest and conditions.

    They are not kept in the store: a writer of the store could otherwise forge a verification by this machine.
    """

    folder: Path
    conditions: dict[str, object]

    @classmethod
    def of(cls, release: "ReleaseContext") -> Self:
        conditions = {"nxpipe": VERSION, "compiler": compiler_digest(), "thresholds": asdict(release.thresholds)}
        return cls(release.kept / "verified", {"format": _FORMAT, "store": release.store.url, **conditions})

    def __contains__(self, manifest_digest: str) -> bool:
        return self._path(manifest_digest).exists()

    def note(self, manifest_digest: str) -> None:
        write_whole(
            self._path(manifest_digest), canonical_json({**self._document(manifest_digest), "at": written_now()})
        )

    def _path(self, manifest_digest: str) -> Path:
        return self.folder / f"{sha256_hex(canonical_json(self._document(manifest_digest)))}.json"

    def _document(self, manifest_digest: str) -> dict[str, object]:
        return {**self.conditions, "manifest": manifest_digest}


class NestedConsole(Console):
    """The console of a build within a release: stdout belongs to the release."""

    def result(self, *lines: str) -> None:
        self.say(*lines)

    def page(self, text: str) -> None:
        self.say(*text.split("\n"))

    def data(self, value: object) -> None:
        """Discarded: the release's report has its own document."""

    def complain(self, first: str, *further: str, code: ExitCode | None = None, see: str | None = None) -> None:
        self.say(first, *further)


@dataclass
class ReleaseContext:
    """One run of `nxpipe release`. `seen` is the generation that the bench gate compared with; a promotion must append
    the next one. `known` caches artifacts of the store, which are immutable.
    """

    console: Console
    store: "Store"
    config: "Config"
    config_path: Path
    options: ReleaseOptions
    seen: int | None = None
    known: dict[ReleaseCandidate, "Published"] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.config_path.parent

    @property
    def kept(self) -> Path:
        """Folder of this machine's reports and verification records."""
        return state_folder(self.config_path) / "releases"

    @cached_property
    def thresholds(self) -> Thresholds:
        return Thresholds.of(self.config)

    @cached_property
    def building(self) -> BuildRun:
        console, folder = NestedConsole(**vars(self.console)), state_folder(self.config_path)
        return BuildRun(console, self.store, self.config, self.thresholds, folder, self.options.how)

    @cached_property
    def plan(self) -> "BuildPlan | None":
        """The build plan at the start; None for a release from a channel."""
        if self.options.source is not None:
            return None
        return self.building.plan(specs_of_config(self.config, self.options.names, self.folder))

    @cached_property
    def candidates(self) -> tuple[ReleaseCandidate, ...]:
        return self._source_candidates() if self.plan is None else planned_candidates(self.plan.artifacts)

    @cached_property
    def trust(self) -> ChannelVerifier:
        return trust_in(self.config, self.folder, self.store, self.console.say)

    def find(self, candidate: ReleaseCandidate) -> "Published | None":
        """The published artifact. For a release from a channel it must be the served manifest, not a later one."""
        if candidate not in self.known and (published := self.store.find(candidate.request_key)):
            if candidate.manifest not in (None, published.manifest_digest):
                raise self._unpublished(candidate)
            self.known[candidate] = published
        return self.known.get(candidate)

    def published(self, candidate: ReleaseCandidate) -> "Published":
        published = self.find(candidate)
        if published is None:
            raise NotFound(f"{candidate.name} is not in {self.store.url}; omit --skip build")
        return published

    def tip(self, channel: str | None = None) -> Generation | None:
        """The verified tip of a channel, by default of the destination."""
        return self.trust.tip(self.store, channel or self.options.channel)

    def served(self) -> dict[tuple[str, str], Served]:
        """Artifacts that the destination channel serves now, by model and target."""
        tip = self.tip()
        return {served.slot: served for served in tip.artifacts} if tip else {}

    def is_served(self, candidate: ReleaseCandidate) -> bool:
        served = self.served().get(candidate.slot)
        return served is not None and served.request_key == candidate.request_key

    def _source_candidates(self) -> tuple[ReleaseCandidate, ...]:
        """Candidates that the source channel serves, by manifest. The channel is read once, at the start."""
        source = str(self.options.source)
        tip = self.tip(source)
        if tip is None:
            raise unknown_channel(self.store, source)
        self._require_expected(tip)
        only = self.options.names
        ids = {id_ for name, id_ in model_ids(self.config, self.folder).items() if name in only}
        artifacts = [served for served in tip.artifacts if not only or served.model_id in ids]
        if not artifacts:
            what = f" of {', '.join(only)}" if only else ""
            raise NotFound(f"channel {source} of {self.store.url} serves nothing{what}; release to it first")
        for served in artifacts:
            self.trust.require_signatures(self.store, source, served)
        candidates = tuple(map(ReleaseCandidate.of, artifacts))
        for candidate in candidates:
            if self.find(candidate) is None:
                raise self._unpublished(candidate)
        return candidates

    def _unpublished(self, candidate: ReleaseCandidate) -> NotFound:
        return NotFound(
            f"channel {self.options.source} serves {candidate.name}, whose manifest {candidate.manifest} is missing in "
            f"{self.store.url}; release to {self.options.source} again"
        )

    def _require_expected(self, tip: Generation | None) -> None:
        expected, serves = self.options.expect, tip and ExpectedGeneration(tip.generation, tip.digest)
        if expected not in (None, serves):
            raise Refused(
                f"channel {self.options.source} of {self.store.url} serves {serves or 'nothing'}, not the expected "
                f"{expected}; review what it serves now and approve that"
            )


def fleets_with_rollouts(release: "ReleaseContext") -> "list[tuple[ServingFleet, ReleaseCandidate]]":
    """Fleets of the channel whose traffic a rollout must shift, each with its candidate, in the order of nxpipe.toml.

    A fleet whose channel has never served its model has no traffic to shift, and one that follows its channel in place
    shifts none.
    """
    if "rollout" in release.options.skipped:
        return []
    served, slots = release.served(), {candidate.slot: candidate for candidate in release.candidates}
    ids = model_ids(release.config, release.folder)
    pairs = []
    for fleet in serving_fleets(release.config).values():
        candidate = slots.get((ids[fleet.model], INSTANCES[fleet.instance_types[0]].compiler_target))
        if fleet.channel != release.options.channel or candidate is None or fleet.updates.are_followed:
            continue
        old = served.get(candidate.slot)
        if _has_environments(release, fleet) or (old is not None and old.request_key != candidate.request_key):
            pairs.append((fleet, candidate))
    return pairs


def rollout_slots(release: "ReleaseContext") -> set[tuple[str, str]]:
    """Slots that rollouts promote, not the promote gate."""
    return {candidate.slot for _, candidate in fleets_with_rollouts(release)}


def _has_environments(release: "ReleaseContext", fleet: "ServingFleet") -> bool:
    """True if the fleet has had a rollout: its environments follow channels of their own."""
    return any(release.tip(environment_channel(fleet.name, colour)) for colour in ENVIRONMENTS)
