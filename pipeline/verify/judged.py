"""What evidence in a store is worth: its figures held to [verify] of whoever asks now, and not of whoever built."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nxpipe.artifact_store.evidence import Compared, Evidence, Figures, gap, is_covered
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.verify.verify import USUAL_YARDSTICK, Deviation, Report, Thresholds, is_scores

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest


def shortfall(manifest: "Manifest", evidence: Sequence[Evidence], allowed: Thresholds) -> str | None:
    """Why no document shows that the artifact is near enough, by the first that speaks of all of it; else None."""
    if (sentence := is_covered(manifest, evidence)) is not None:
        return sentence
    whole = [each for each in evidence if gap(manifest, each) is None]
    faults = [next(faults_of(each.programs, allowed), None) for each in whole]
    return None if None in faults else faults[0]


def faults_of(programs: Sequence[Compared], allowed: Thresholds) -> Iterator[str]:
    """A sentence for each output that is beyond the thresholds."""
    for program in programs:
        for figures in program.outputs:
            if wrong := _faults(figures, allowed):
                yield f"{program.program}, output {figures.output} is beyond [verify]: {'; '.join(wrong)}"


def insist(name: str, programs: Sequence[Compared], allowed: Thresholds) -> None:
    for sentence in faults_of(programs, allowed):
        raise VerificationFailed(f"{name} {sentence}; try --autocast none, or change [verify]")


def chosen(manifest: "Manifest", evidence: Sequence[Evidence]) -> Evidence | None:
    """The one that is shown, and whose answers a program is held against: the first that speaks of all of it."""
    return next((each for each in evidence if gap(manifest, each) is None), None)


def report_of(manifest: "Manifest", store: "Store") -> Report:
    """The figures of an artifact by program, with as many digits as say something; none of one that is not verified."""
    found = chosen(manifest, store.evidence(manifest.digest))
    programs = found.programs if found else ()
    return {each.program: [_shown(one, each.yardstick) for one in each.outputs] for each in programs}


def _shown(figures: Figures, yardstick: str) -> dict[str, str]:
    """Whom the answers were held against is said unless it was the usual one."""
    by = {} if yardstick == USUAL_YARDSTICK else {"yardstick": yardstick}
    return _deviation(figures).as_json() | by


def _faults(figures: Figures, allowed: Thresholds) -> list[str]:
    untold = [
        f"no {name} is told, asked for {limit}"
        for name, found, limit in (
            ("KL divergence", figures.kl, allowed.max_kl),
            ("top-1", figures.top1, allowed.min_top1),
        )
        if found is None and limit is not None and is_scores(figures.output)
    ]
    return _deviation(figures).faults(allowed) + untold


def _deviation(figures: Figures) -> Deviation:
    said: dict[str, Any] = figures.model_dump()
    return Deviation(**said)
