"""What a release is about: of each model and target one artifact, by its key, be it built or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.compile.spec import BuildSpec

if TYPE_CHECKING:
    from nxpipe.artifact_store.channel.generation import Served
    from nxpipe.pipeline.build.planned import PlannedArtifact


@dataclass(frozen=True)
class Candidate:
    """`owner` is the model of nxpipe.toml that it was described by; `target` is the compiler's. `manifest` is the
    digest of what a channel serves, where that is what is released.
    """

    model_id: str
    target: str
    request_key: str
    owner: str | None = None
    manifest: str | None = None

    @property
    def slot(self) -> tuple[str, str]:
        """Where a channel would serve it."""
        return self.model_id, self.target

    @property
    def name(self) -> str:
        return short_name(self.model_id, self.request_key)

    @classmethod
    def of(cls, served: "Served") -> "Candidate":
        return cls(served.model_id, served.target, served.request_key, manifest=served.manifest.sha256)


def planned(artifacts: "Sequence[PlannedArtifact]") -> tuple[Candidate, ...]:
    """What each model's own line describes, and of its variants those for another target. What cannot be asked for is
    none: the gates of check and build say why."""
    slots: dict[tuple[str, str], Candidate] = {}
    for one in _described(artifacts):
        first = slots.setdefault(one.slot, one)
        if first.owner != one.owner:
            raise Refused(
                f"models {first.owner} and {one.owner} of nxpipe.toml are both {one.model_id} for {one.target}, of "
                "which a channel serves one; say which with --only"
            )
    return tuple(slots.values())


def _described(artifacts: "Sequence[PlannedArtifact]") -> Iterable[Candidate]:
    for artifact in artifacts:
        if artifact.key:
            request = BuildSpec.of(artifact.asked)
            yield Candidate(request.source.id, request.target.compiler_target, artifact.key, artifact.asked.name)
