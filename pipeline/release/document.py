"""The report of a release as data: what was released where, what each gate has found, and the way back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.models.versions import compiler_digest
from nxpipe.pipeline.release.gate import Passage
from nxpipe.pipeline.release.way_back import way_back

if TYPE_CHECKING:
    from nxpipe.pipeline.release.course import Course
    from nxpipe.pipeline.release.state import Release

FORMAT: Final = "nxpipe.release-report/1"


def document(release: "Release", course: "Course") -> dict[str, Any]:
    passages = course.all()
    # Until the store was asked, nothing is known of it; and of a release that failed so early nothing was changed.
    undone = way_back(release, passages) if course.is_over and _has_served(passages) else []
    return {
        "format": FORMAT,
        "verdict": _verdict(course),
        "exit_code": course.code,
        "began_at": course.began_at,
        "seconds": round(course.seconds, 3),
        **about(release),
        "artifacts": _artifacts(release) if course.passages and course.passages[0].code == 0 else [],
        "gates": [asdict(each) for each in passages],
        "way_back": undone,
        "versions": {"nxpipe": VERSION, "compiler": compiler_digest()},
    }


def about(release: "Release") -> dict[str, Any]:
    words = release.words
    return {
        "channel": words.channel,
        "from": words.source,
        "store": release.store.url,
        "reason": words.reason,
        "threshold": words.threshold,
    }


def _verdict(course: "Course") -> str:
    if not course.is_over:
        return "under way"
    if course.code == 0:
        return "released"
    return "interrupted" if course.passages[-1].state == "interrupted" else "not released"


def _has_served(passages: Sequence[Passage]) -> bool:
    return any(one.gate in ("promote", "rollout") and one.state in ("passed", "done") for one in passages)


def _artifacts(release: "Release") -> list[dict[str, Any]]:
    """As far as they are known: a store that cannot be reached is no reason to tell nothing."""
    found = []
    for one in release.candidates:
        published = release.known.get(one)
        manifest = published.manifest_digest if published else None
        found.append({"name": one.name, "model_id": one.model_id, "target": one.target, "manifest": manifest})
    return found
