"""The gates that hold artifacts to something: `verify` and `bench`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.build.report.words import counted
from nxpipe.pipeline.release.gate import Outcome, Settled
from nxpipe.pipeline.release.verified import Verified
from nxpipe.pipeline.util.exit_codes import REGRESSION, VERIFICATION

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.artifacts.bench import Line
    from nxpipe.pipeline.release.candidate import Candidate
    from nxpipe.pipeline.release.state import Release


class Verify:
    """By whoever releases: what the store holds now, and not what somebody's build has found."""

    name: Final = "verify"

    def settled(self, release: "Release") -> Settled | None:
        if _unverified(release):
            return None
        return Settled("done", f"{_named(release.candidates)}: verified on this machine before")

    def intention(self, release: "Release") -> str:
        return f"read {_named(_unverified(release))} byte by byte, and run every program again"

    def run(self, release: "Release") -> Outcome:
        figures: list[dict[str, Any]] = []
        faults: list[str] = []
        verified = Verified.of(release)
        for one in _unverified(release):
            published = release.published(one)
            wrong = _faults(release, one.name, published, figures)
            if not wrong:
                verified.note(published.manifest_digest)
            faults += (f"{one.name} {fault}" for fault in wrong)
        if not faults:
            return Outcome(f"{counted(len(figures), 'comparison')} within [verify]", figures=figures)
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        sentence = f"beyond [verify]: {faults[0]}{more}; see it with: nxpipe verify {faults[0].split()[0]}"
        return Outcome(sentence, VERIFICATION.number, figures)


class Bench:
    """The channel's own artifact is the yardstick: what nobody is served cannot become slower."""

    name: Final = "bench"

    def settled(self, release: "Release") -> Settled | None:
        if all(map(release.is_served, release.candidates)):
            return Settled("done", f"channel {release.words.channel} serves them already")
        return None

    def intention(self, release: "Release") -> str:
        count = sum(one.slot in release.served() for one in release.candidates)
        against = f"{count} of {len(release.candidates)} artifacts against channel {release.words.channel}"
        return f"hold {against}; slower by {release.words.threshold:.1%} is too slow"

    def run(self, release: "Release") -> Outcome:
        from nxpipe.pipeline.artifacts.bench import bench
        from nxpipe.pipeline.cli.named import named

        words, tip = release.words, release.tip()
        release.seen = tip.generation if tip else 0
        rival = named(words.channel, release.store, release.config_path) if tip else None
        manifests = [release.published(one).manifest for one in release.candidates]
        lines = [line for one in manifests for line in bench(one, rival.beside(one) if rival else None, release.store)]
        figures = [line.document(words.threshold) for line in lines]
        slower = [line for line in lines if line.is_regression(words.threshold)]
        if slower:
            return Outcome(_regression(slower, words.threshold), REGRESSION.number, figures)
        return Outcome(_well(lines, words.channel), figures=figures)


def _unverified(release: "Release") -> "list[Candidate]":
    """What is not built is not verified either."""
    verified = Verified.of(release)
    found = {one: release.found(one) for one in release.candidates}
    return [one for one, published in found.items() if not (published and published.manifest_digest in verified)]


def _faults(release: "Release", name: str, published: "Published", figures: list[dict[str, Any]]) -> list[str]:
    from nxpipe.pipeline.verify.execution import FAST
    from nxpipe.pipeline.verify.replay import compare_artifact

    faults: list[str] = []
    for done in compare_artifact(published, release.store, release.console.step, FAST):
        wrong = [fault for run in done.emulated for fault in run.faults(release.thresholds)]
        program, near = done.program, [found.as_json() for run in done.emulated for found in run.outputs]
        figures.append({"artifact": name, "program": program, "against": done.reference, "near": near})
        faults += (f"{program} against {done.reference} {fault}" for fault in wrong)
    return faults


def _named(candidates: "Sequence[Candidate]") -> str:
    return ", ".join(one.name for one in candidates)


def _well(lines: "Sequence[Line]", channel: str) -> str:
    compared = [line.change for line in lines if line.change is not None]
    if not compared:
        return f"{len(lines)} programs, of which channel {channel} serves none yet"
    return f"{len(compared)} of {len(lines)} programs compared, the slowest change {max(compared):+.1%}"


def _regression(slower: "Sequence[Line]", threshold: float) -> str:
    worst = max(slower, key=lambda line: line.change or 0.0)
    return (
        f"{worst.program.name} of {worst.artifact} is predicted to be slower by {worst.change:.1%}, the worst of "
        f"{len(slower)} beyond {threshold:.1%}; `nxpipe diff {worst.against} {worst.artifact}` shows what changed"
    )
