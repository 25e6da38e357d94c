"""The gates that make artifacts: `check` and `build`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.build.report.summary import headline, tally
from nxpipe.pipeline.build.report.words import counted
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.build.run import finish
from nxpipe.pipeline.release.gate import Figures, Outcome, Settled
from nxpipe.pipeline.util.escape import unstyled

if TYPE_CHECKING:
    from nxpipe.pipeline.build.planned import PlannedArtifact
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
        from nxpipe.pipeline.check.checker import check
        from nxpipe.pipeline.check.formats import as_text

        specs = dict.fromkeys(replace(artifact.asked, name=None) for artifact in _to_make(release))
        reports = [check(spec, release.console.step) for spec in specs]
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
        cells = [cell.state for _, cell in release.plan.cells()]
        artifacts = counted(len(_to_make(release)), "artifact")
        return f"make {cells.count('to do')} of {len(cells)} programs, and publish {artifacts}"

    def run(self, release: "Release") -> Outcome:
        assert release.plan is not None, "where nothing is built, the gate is skipped"
        results = release.building.carry_out(release.plan)
        if results.interrupted:
            raise KeyboardInterrupt
        code = finish(release.building, results)
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
    faults = list(dict.fromkeys(one.fault.message for one in results.missing() if one.fault and one.fate == "failed"))
    return faults[0] if len(faults) == 1 else unstyled(headline(results))


def _cells(results: Results) -> Figures:
    return [
        {"artifact": one.artifact.title, "program": one.cell.shape.name, "fate": one.fate, "seconds": one.seconds}
        for one in results.cells()
    ]
