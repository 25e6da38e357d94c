"""What every gate of a release is: it finds out whether it has anything to do, and does it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from nxpipe.pipeline.build.report.summary import headline, tally
from nxpipe.pipeline.build.report.words import counted
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.build.run import finish
from nxpipe.pipeline.release.state import VerifiedManifests
from nxpipe.pipeline.util.escape import unstyled
from nxpipe.pipeline.util.exit_codes import REGRESSION, VERIFICATION

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.artifacts.bench import BenchLine
    from nxpipe.pipeline.build.planned import PlannedArtifact
    from nxpipe.pipeline.check.report import Report
    from nxpipe.pipeline.release.state import ReleaseCandidate, ReleaseContext


# `done`: before this run; `not run`: an earlier gate has failed; `to do`: of a dry run.
GateState: TypeAlias = Literal["passed", "done", "skipped", "failed", "interrupted", "not run", "to do"]
Figures: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AlreadyDone:
    """There is nothing to do, and why."""

    state: Literal["done", "skipped"]
    sentence: str


@dataclass(frozen=True)
class GateOutcome:
    """`code` is that of the table of exit codes; all but 0 end the release."""

    sentence: str
    code: int = 0
    figures: Figures = ()


@dataclass(frozen=True)
class GateResult:
    """What became of a gate in one run."""

    gate: str
    state: GateState
    sentence: str
    code: int = 0
    seconds: float = 0.0
    figures: Figures = ()


class Gate(Protocol):
    @property
    def name(self) -> str: ...

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        """Decided from the store and its channels, or from a record that only this machine writes."""
        ...

    def intention(self, release: "ReleaseContext") -> str:
        """What it is going to do, in words; asked only where something is to be done."""
        ...

    def run(self, release: "ReleaseContext") -> GateOutcome:
        """May be repeated after a kill at any moment. A failure is an error, or an outcome with its code."""
        ...


class CheckGate:
    """Before anything is compiled: all that stands in a model's way, and not the first of it alone."""

    name: Final = "check"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        return _nothing_to_make(release, "what is published does compile")

    def intention(self, release: "ReleaseContext") -> str:
        return f"check {counted(len(_to_make(release)), 'artifact')}, without weights"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        from nxpipe.pipeline.check import check
        from nxpipe.pipeline.check.text import as_text

        orders = dict.fromkeys(artifact.asked.order for artifact in _to_make(release))
        reports = [check(order, release.console.step) for order in orders]
        figures = [report.as_json() for report in reports]
        wrong = [report for report in reports if report.exit_code.number]
        if not wrong:
            return GateOutcome(f"compilable, and small enough: {counted(len(reports), 'artifact')}", figures=figures)
        for report in wrong:
            release.console.say(*as_text(report).split("\n"))
        return GateOutcome(_gravest(wrong[0]), wrong[0].exit_code.number, figures)


class BuildGate:
    """What is missing, as `nxpipe build` makes it."""

    name: Final = "build"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        return _nothing_to_make(release, "found in the store")

    def intention(self, release: "ReleaseContext") -> str:
        assert release.plan is not None, "where nothing is built, the gate is skipped"
        cells = [cell.state for _, cell in release.plan.cells()]
        artifacts = counted(len(_to_make(release)), "artifact")
        return f"make {cells.count('to do')} of {len(cells)} programs, and publish {artifacts}"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        assert release.plan is not None, "where nothing is built, the gate is skipped"
        results = release.building.carry_out(release.plan)
        if results.interrupted:
            raise KeyboardInterrupt
        code = finish(release.building, results)
        return GateOutcome(_failure(results) if code else tally(results), code, _cells(results))


def _nothing_to_make(release: "ReleaseContext", found: str) -> AlreadyDone | None:
    if release.plan is None:
        return AlreadyDone("skipped", f"what channel {release.words.source} serves is released as it is")
    if _to_make(release):
        return None
    return AlreadyDone("done", f"{counted(len(release.plan.artifacts), 'artifact')}: {found}")


def _to_make(release: "ReleaseContext") -> "list[PlannedArtifact]":
    return [artifact for artifact in release.plan.artifacts if not artifact.is_published] if release.plan else []


def _gravest(report: "Report") -> str:
    finding = next(one for one in report.findings if one.rule.exit_code is report.exit_code)
    advice = f"; {finding.advice}" if finding.advice else ""
    others = f" (the first of {len(report.findings)} findings)" if len(report.findings) > 1 else ""
    return f"{report.model}: {finding.message}{advice}{others}"


def _failure(results: Results) -> str:
    faults = list(dict.fromkeys(one.fault.message for one in results.missing() if one.fault and one.fate == "failed"))
    return faults[0] if len(faults) == 1 else unstyled(headline(results))


def _cells(results: Results) -> Figures:
    return [
        {"artifact": one.artifact.title, "program": one.cell.shape.name, "fate": one.fate, "seconds": one.seconds}
        for one in results.cells()
    ]


class VerifyGate:
    """By whoever releases: what the store holds now, and not what somebody's build has found."""

    name: Final = "verify"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        if _unverified(release):
            return None
        return AlreadyDone("done", f"{_named(release.candidates)}: verified on this machine before")

    def intention(self, release: "ReleaseContext") -> str:
        return f"read {_named(_unverified(release))} byte by byte, and run every program again"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        figures: list[dict[str, Any]] = []
        faults: list[str] = []
        verified = VerifiedManifests.of(release)
        for one in _unverified(release):
            published = release.published(one)
            wrong = _faults(release, one.name, published, figures)
            if not wrong:
                verified.note(published.manifest_digest)
            faults += (f"{one.name} {fault}" for fault in wrong)
        if not faults:
            return GateOutcome(f"{counted(len(figures), 'comparison')} within [verify]", figures=figures)
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        sentence = f"beyond [verify]: {faults[0]}{more}; see it with: nxpipe verify {faults[0].split()[0]}"
        return GateOutcome(sentence, VERIFICATION.number, figures)


class BenchGate:
    """The channel's own artifact is the yardstick: what nobody is served cannot become slower."""

    name: Final = "bench"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        if all(map(release.is_served, release.candidates)):
            return AlreadyDone("done", f"channel {release.words.channel} serves them already")
        return None

    def intention(self, release: "ReleaseContext") -> str:
        count = sum(one.slot in release.served() for one in release.candidates)
        against = f"{count} of {len(release.candidates)} artifacts against channel {release.words.channel}"
        return f"hold {against}; slower by {release.words.threshold:.1%} is too slow"

    def run(self, release: "ReleaseContext") -> GateOutcome:
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
            return GateOutcome(_regression(slower, words.threshold), REGRESSION.number, figures)
        return GateOutcome(_well(lines, words.channel), figures=figures)


def _unverified(release: "ReleaseContext") -> "list[ReleaseCandidate]":
    """What is not built is not verified either."""
    verified = VerifiedManifests.of(release)
    found = {one: release.found(one) for one in release.candidates}
    return [one for one, published in found.items() if not (published and published.manifest_digest in verified)]


def _faults(release: "ReleaseContext", name: str, published: "Published", figures: list[dict[str, Any]]) -> list[str]:
    from nxpipe.pipeline.verify.replay import compare_artifact
    from nxpipe.pipeline.verify.runner import FAST

    faults: list[str] = []
    for done in compare_artifact(published, release.store, release.console.step, FAST):
        wrong = [fault for run in done.emulated for fault in run.faults(release.thresholds)]
        program, near = done.program, [found.as_json() for run in done.emulated for found in run.outputs]
        figures.append({"artifact": name, "program": program, "against": done.yardstick, "near": near})
        faults += (f"{program} against {done.yardstick}, {fault}" for fault in wrong)
    return faults


def _named(candidates: "Sequence[ReleaseCandidate]") -> str:
    return ", ".join(one.name for one in candidates)


def _well(lines: "Sequence[BenchLine]", channel: str) -> str:
    compared = [line.change for line in lines if line.change is not None]
    if not compared:
        return f"{len(lines)} programs, of which channel {channel} serves none yet"
    return f"{len(compared)} of {len(lines)} programs compared, the slowest change {max(compared):+.1%}"


def _regression(slower: "Sequence[BenchLine]", threshold: float) -> str:
    worst = max(slower, key=lambda line: line.change or 0.0)
    return (
        f"{worst.program.name} of {worst.artifact} is predicted to be slower by {worst.change:.1%}, the worst of "
        f"{len(slower)} beyond {threshold:.1%}; `nxpipe diff {worst.against} {worst.artifact}` shows what changed"
    )
