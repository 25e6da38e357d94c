"""Whether an artifact that is in the store is all that a build would leave there: published, and verified if asked."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxpipe.artifact_store.evidence import is_covered
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.thresholds import Thresholds, evidence_shortfall
from nxpipe.pipeline.util.errors import VerificationFailed

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store


@dataclass(frozen=True)
class Doubt:
    """Nothing shows that the artifact is near enough: `beyond` says by how much it is not, None that nobody looked."""

    beyond: VerificationFailed | None = None


def doubt_of(published: "Published", store: "Store", request: BuildSpec, allowed: Thresholds) -> Doubt | None:
    if not request.verified:
        return None
    manifest, evidence = published.manifest, store.evidence(published.manifest_digest)
    if is_covered(manifest, evidence) is not None:
        return Doubt()
    sentence = evidence_shortfall(manifest, evidence, allowed)
    return Doubt(VerificationFailed(_beyond(published, sentence))) if sentence else None


def _beyond(published: "Published", sentence: str) -> str:
    return (
        f"{published.name} is published, and was within other thresholds: {sentence}; try --autocast none, or change "
        "[verify]"
    )
