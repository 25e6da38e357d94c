"""Gates of a release up to the benchmark: check, build, verify, bench.

A gate finds out from the store and its channels whether there is anything to do, and does it. So a release that failed
or was killed continues with the same command.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from nxpipe.artifact_store.errors import Refused
from nxpipe.pipeline.artifacts.channels import hosts_of_channel, program_fault
from nxpipe.pipeline.build.jobs import RESULT_WORDS, CellStatus
from nxpipe.pipeline.build.report.summary import counted, headline, tally
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.release.state import VerifiedManifests
from nxpipe.pipeline.util.exit_codes import REGRESSION, VERIFICATION
from nxpipe.pipeline.util.text import unstyled

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.artifacts.bench import BenchLine
    from nxpipe.pipeline.build.plan import PlannedArtifact
    from nxpipe.pipeline.check.report import Report
    from nxpipe.pipeline.release.state import ReleaseCandidate, ReleaseContext


# `done`: by an earlier run; `not run`: an earlier gate has failed; `to do`: in a dry run.
GateState: TypeAlias = Literal["passed", "done", "skipped", "failed", "interrupted", "not run", "to do"]
Figures: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AlreadyDone:
    """A gate with nothing to do, and the reason."""

    state: Literal["done", "skipped"]
    sentence: str


@dataclass(frozen=True)
class GateOutcome:
    """Result of running a gate. `code` is an exit code; a nonzero one ends the release."""

    sentence: str
    code: int = 0
    figures: Figures = ()


@dataclass(frozen=True)
class GateResult:
    """State of a gate in one run."""

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
        """Reads the store, its channels, and records that only this machine writes."""
        ...

    def intention(self, release: "ReleaseContext") -> str:
        """The planned action as text; called only if there is something to do."""
        ...

    def run(self, release: "ReleaseContext") -> GateOutcome:
        """Runs the gate; repeatable after a kill at any moment. A failure is an exception or an outcome with a code."""
        ...


class CheckGate:
    """Reports all findings about a model before anything is compiled."""

    name: Final = "check"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        _require_runnable(release)
        return _nothing_to_build(release, "published artifacts do compile")

    def intention(self, release: "ReleaseContext") -> str:
        return f"check {counted(len(_to_build(release)), 'artifact')}, without weights"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        from nxpipe.pipeline.check.checker import check
        from nxpipe.pipeline.check.formats import as_text

        specs = dict.fromkeys(replace(artifact.spec, name=None) for artifact in _to_build(release))
        reports = [check(spec, release.console.step) for spec in specs]
        figures = [report.as_json() for report in reports]
        wrong = [report for report in reports if report.exit_code.number]
        if not wrong:
            return GateOutcome(f"compilable and within memory: {counted(len(reports), 'artifact')}", figures=figures)
        for report in wrong:
            release.console.say(*as_text(report).split("\n"))
        return GateOutcome(_worst_finding(wrong[0]), wrong[0].exit_code.number, figures)


def _require_runnable(release: "ReleaseContext") -> None:
    """Refuse programs that a fleet of the channel cannot run before any is compiled; a promotion refuses them too."""
    if "promote" in release.options.skipped:
        return
    hosts = hosts_of_channel(release.config, release.folder, release.options.channel)
    planned = {artifact.key: artifact.spec.backend for artifact in release.plan.artifacts} if release.plan else {}
    for candidate in release.candidates:
        backend = planned.get(candidate.request_key) or release.published(candidate).manifest.backend
        if fault := program_fault(hosts.get(candidate.slot, ()), candidate.name, backend):
            raise Refused(fault)


class BuildGate:
    """Builds missing artifacts, as `nxpipe build` does."""

    name: Final = "build"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        return _nothing_to_build(release, "found in the store")

    def intention(self, release: "ReleaseContext") -> str:
        assert release.plan is not None, "the gate is skipped if nothing is built"
        statuses = [cell.status for _, cell in release.plan.cells()]
        artifacts = counted(len(_to_build(release)), "artifact")
        return f"build {statuses.count(CellStatus.QUEUED)} of {len(statuses)} programs, and publish {artifacts}"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        assert release.plan is not None, "the gate is skipped if nothing is built"
        results = release.building.execute(release.plan)
        if results.interrupted:
            raise KeyboardInterrupt
        code = release.building.finish(results)
        return GateOutcome(_failure(results) if code else tally(results), code, _cells(results))


def _nothing_to_build(release: "ReleaseContext", state: str) -> AlreadyDone | None:
    if release.plan is None:
        return AlreadyDone("skipped", f"artifacts of channel {release.options.source} are released unchanged")
    if _to_build(release):
        return None
    return AlreadyDone("done", f"{counted(len(release.plan.artifacts), 'artifact')}: {state}")


def _to_build(release: "ReleaseContext") -> "list[PlannedArtifact]":
    return [artifact for artifact in release.plan.artifacts if not artifact.is_published] if release.plan else []


def _worst_finding(report: "Report") -> str:
    finding = next(finding for finding in report.findings if finding.rule.exit_code is report.exit_code)
    advice = f"; {finding.advice}" if finding.advice else ""
    others = f" (the first of {len(report.findings)} findings)" if len(report.findings) > 1 else ""
    return f"{report.model}: {finding.message}{advice}{others}"


def _failure(results: Results) -> str:
    failed = (cell.failure for cell in results.missing() if cell.failure and cell.status is CellStatus.FAILED)
    failures = list(dict.fromkeys(failure.message for failure in failed))
    return failures[0] if len(failures) == 1 else unstyled(headline(results))


def _cells(results: Results) -> Figures:
    return [
        {
            "artifact": result.artifact.title,
            "program": result.cell.shape.name,
            "fate": RESULT_WORDS[result.status],
            "seconds": result.seconds,
        }
        for result in results.cells()
    ]


class VerifyGate:
    """Verifies the stored artifacts on this machine, independently of the evidence of their builds."""

    name: Final = "verify"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        if _unverified(release):
            return None
        return AlreadyDone("done", f"{_named(release.candidates)}: already verified on this machine")

    def intention(self, release: "ReleaseContext") -> str:
        return f"verify {_named(_unverified(release))}: check every digest and rerun every program"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        figures: list[dict[str, Any]] = []
        faults: list[str] = []
        verified = VerifiedManifests.of(release)
        for candidate in _unverified(release):
            published = release.published(candidate)
            wrong = _faults(release, candidate.name, published, figures)
            if not wrong:
                verified.note(published.manifest_digest)
            faults += (f"{candidate.name} {fault}" for fault in wrong)
        if not faults:
            return GateOutcome(f"{counted(len(figures), 'comparison')} within thresholds", figures=figures)
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        sentence = f"verification failed: {faults[0]}{more}; details: nxpipe verify {faults[0].split()[0]}"
        return GateOutcome(sentence, VERIFICATION.number, figures)


class BenchGate:
    """Compares predicted times with the artifacts that the channel serves now: they are the baseline."""

    name: Final = "bench"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        if all(map(release.is_served, release.candidates)):
            return AlreadyDone("done", f"channel {release.options.channel} already serves them")
        return None

    def intention(self, release: "ReleaseContext") -> str:
        count = sum(candidate.slot in release.served() for candidate in release.candidates)
        against = f"{count} of {len(release.candidates)} artifacts against channel {release.options.channel}"
        return f"compare {against}; fail if slower by more than {release.options.threshold:.1%}"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        from nxpipe.pipeline.artifacts.bench import bench
        from nxpipe.pipeline.artifacts.lookup import find_match

        options, tip = release.options, release.tip()
        release.seen = tip.generation if tip else 0
        baseline = find_match(options.channel, release.store, release.config_path) if tip else None
        manifests = [release.published(candidate).manifest for candidate in release.candidates]
        lines = [
            line
            for manifest in manifests
            for line in bench(manifest, baseline.beside(manifest) if baseline else None, release.store)
        ]
        figures = [line.document(options.threshold) for line in lines]
        slower = [line for line in lines if line.is_regression(options.threshold)]
        if slower:
            return GateOutcome(_regression(slower, options.threshold), REGRESSION.number, figures)
        return GateOutcome(_within(lines, options.channel), figures=figures)


def _unverified(release: "ReleaseContext") -> "list[ReleaseCandidate]":
    """Candidates without a verification record; one that is not built has none."""
    verified = VerifiedManifests.of(release)
    artifacts = {candidate: release.find(candidate) for candidate in release.candidates}
    return [
        candidate
        for candidate, artifact in artifacts.items()
        if not (artifact and artifact.manifest_digest in verified)
    ]


def _faults(release: "ReleaseContext", name: str, published: "Published", figures: list[dict[str, Any]]) -> list[str]:
    from nxpipe.pipeline.verify.execution import FAST
    from nxpipe.pipeline.verify.replay import compare_artifact

    faults: list[str] = []
    for comparison in compare_artifact(published, release.store, release.console.step, FAST):
        wrong = [fault for run in comparison.emulated for fault in run.faults(release.thresholds)]
        program, reference = comparison.program, comparison.reference
        near = [output.as_json() for run in comparison.emulated for output in run.outputs]
        figures.append({"artifact": name, "program": program, "against": reference, "near": near})
        faults += (f"{program} against {reference}, {fault}" for fault in wrong)
    return faults


def _named(candidates: "Sequence[ReleaseCandidate]") -> str:
    return ", ".join(candidate.name for candidate in candidates)


def _within(lines: "Sequence[BenchLine]", channel: str) -> str:
    compared = [line.change for line in lines if line.change is not None]
    if not compared:
        return f"{len(lines)} programs; channel {channel} serves none of them yet"
    return f"{len(compared)} of {len(lines)} programs compared; largest change {max(compared):+.1%}"


def _regression(slower: "Sequence[BenchLine]", threshold: float) -> str:
    worst = max(slower, key=lambda line: line.change or 0.0)
    return (
        f"{worst.program.name} of {worst.artifact} has a predicted slowdown of {worst.change:.1%}, the largest of "
        f"{len(slower)} beyond {threshold:.1%}; compare with: nxpipe diff {worst.against} {worst.artifact}"
    )
