"""The gates that make artifacts: `check` and `build`."""

from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.jobs import RESULT_WORDS, CellStatus
from nxpipe.pipeline.build.report.summary import counted, headline, tally
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.release.gate import Figures, Outcome, Settled
from nxpipe.pipeline.util.escape import unstyled

if TYPE_CHECKING:
    from nxpipe.pipeline.build.plan import PlannedArtifact
    from nxpipe.pipeline.check.report import Report
    from nxpipe.pipeline.release.state import Release


class Check:
    """Before anything is compiled: all that stands in a model's way, and not the first of it alone."""

    name: Final = "check"

    def settled(self, release: "Release") -> Settled | None:
        return _nothing_to_make(release, "what is published does compile")

    def intention(self, release: "Release") -> str:
        return f"check {counted(len(_to_make(release)), 'artifact')}, without weights"

    def run(self, release: "Release") -> Outcome:
        from nxpipe.pipeline.check import check
        from nxpipe.pipeline.check.text import as_text

        orders = dict.fromkeys(artifact.asked.order for artifact in _to_make(release))
        reports = [check(order, release.console.step) for order in orders]
        figures = [report.as_json() for report in reports]
        wrong = [report for report in reports if report.exit_code.number]
        if not wrong:
            return Outcome(f"compilable, and small enough: {counted(len(reports), 'artifact')}", figures=figures)
        for report in wrong:
            release.console.say(*as_text(report).split("\n"))
        return Outcome(_gravest(wrong[0]), wrong[0].exit_code.number, figures)


class Build:
    """What is missing, as `nxpipe build` makes it."""

    name: Final = "build"

    def settled(self, release: "Release") -> Settled | None:
        return _nothing_to_make(release, "found in the store")

    def intention(self, release: "Release") -> str:
        assert release.plan is not None, "where nothing is built, the gate is skipped"
        statuses = [cell.status for _, cell in release.plan.cells()]
        artifacts = counted(len(_to_make(release)), "artifact")
        return f"make {statuses.count(CellStatus.QUEUED)} of {len(statuses)} programs, and publish {artifacts}"

    def run(self, release: "Release") -> Outcome:
        assert release.plan is not None, "where nothing is built, the gate is skipped"
        results = release.building.execute(release.plan)
        if results.interrupted:
            raise KeyboardInterrupt
        code = release.building.finish(results)
        return Outcome(_failure(results) if code else tally(results), code, _cells(results))


def _nothing_to_make(release: "Release", found: str) -> Settled | None:
    if release.plan is None:
        return Settled("skipped", f"what channel {release.words.source} serves is released as it is")
    if _to_make(release):
        return None
    return Settled("done", f"{counted(len(release.plan.artifacts), 'artifact')}: {found}")


def _to_make(release: "Release") -> "list[PlannedArtifact]":
    return [artifact for artifact in release.plan.artifacts if not artifact.is_published] if release.plan else []


def _gravest(report: "Report") -> str:
    finding = next(one for one in report.findings if one.rule.exit_code is report.exit_code)
    advice = f"; {finding.advice}" if finding.advice else ""
    others = f" (the first of {len(report.findings)} findings)" if len(report.findings) > 1 else ""
    return f"{report.model}: {finding.message}{advice}{others}"


def _failure(results: Results) -> str:
    failed = (one.failure for one in results.missing() if one.failure and one.status is CellStatus.FAILED)
    failures = list(dict.fromkeys(failure.message for failure in failed))
    return failures[0] if len(failures) == 1 else unstyled(headline(results))


def _cells(results: Results) -> Figures:
    return [
        {
            "artifact": one.artifact.title,
            "program": one.cell.shape.name,
            "fate": RESULT_WORDS[one.status],
            "seconds": one.seconds,
        }
        for one in results.cells()
    ]
