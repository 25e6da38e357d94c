"""Report of a check: compiled programs, footprints, the targets and degrees at which they fit, and all findings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nxpipe.emulator.analysis.graph_memory import GraphMemory, capacity, code_bytes
from nxpipe.emulator.hardware import Instance
from nxpipe.emulator.passes.shard import Padding
from nxpipe.pipeline.compile.findings import (
    DEGREE,
    DOES_NOT_FIT,
    PADDED,
    RULES,
    TIGHT,
    Finding,
    Severity,
    worst_exit_code,
)
from nxpipe.pipeline.util.display import BarsPart, Displayed, Part, TablePart
from nxpipe.pipeline.util.exit_codes import ExitCode


@dataclass(frozen=True)
class Program:
    """One program that lowers: its number of operators as stored, and with repeats expanded."""

    name: str
    nodes: int
    steps: int
    graph_key: str  # of a build on one core


@dataclass(frozen=True)
class Examination:
    """Results that depend only on the model, its shapes and the options, and not on the machine or instance."""

    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    footprints: tuple[GraphMemory, ...]
    refused: Mapping[int, str]  # reasons by impossible tensor-parallel degree
    whole: bool  # the footprints cover all programs; else the weights only
    of_this_machine: bool = False  # a finding depends on this machine; such an examination is not cached

    def as_json(self) -> dict[str, Any]:
        return {
            "programs": [asdict(program) for program in self.programs],
            "findings": [finding.as_json() for finding in self.findings],
            "footprints": [asdict(footprint) for footprint in self.footprints],
            "refused": {str(degree): reason for degree, reason in self.refused.items()},
            "whole": self.whole,
        }

    @staticmethod
    def from_json(data: Any) -> "Examination":
        return Examination(
            tuple(Program(**program) for program in data["programs"]),
            tuple(finding_from_json(finding) for finding in data["findings"]),
            tuple(_footprint_from_json(footprint) for footprint in data["footprints"]),
            {int(degree): reason for degree, reason in data["refused"].items()},
            bool(data["whole"]),
        )


def _footprint_from_json(data: Mapping[str, Any]) -> GraphMemory:
    return GraphMemory(**{**data, "padding": Padding(**data["padding"])})


def finding_from_json(data: Mapping[str, Any]) -> Finding:
    fields = {key: data[key] for key in ("message", "advice", "module", "file", "line", "count")}
    return Finding(RULES[data["rule"]], programs=tuple(data["programs"]), **fields)


@dataclass(frozen=True)
class Row:
    """One tensor-parallel degree on one instance; `reason` is set if the degree is not possible."""

    degree: int
    footprint: GraphMemory | None
    need: int
    fits: bool
    reason: str = ""


@dataclass(frozen=True)
class TargetFit:
    """The fit on one instance: memory of a core, need of each degree, and the chosen degree."""

    target: str
    cores: int
    capacity: int
    code: int
    rows: tuple[Row, ...]
    chosen: int | None  # the requested degree if it fits; without a request, the smallest that fits

    def row(self, degree: int | None) -> Row | None:
        return next((row for row in self.rows if row.degree == degree), None)


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """The verdict on one model."""

    model: str
    task: str
    programs: tuple[Program, ...]
    whole: bool
    fits: tuple[TargetFit, ...]
    findings: tuple[Finding, ...]
    file: str = ""  # the file of findings without a source line: config.json of a model in a folder

    @property
    def exit_code(self) -> ExitCode:
        return worst_exit_code(self.findings)

    def of(self, severity: Severity) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

    def display(self) -> Iterator[Part]:
        yield f"{self.model}, {self.task}: {self.exit_code.name}"
        if self.findings:
            found = [(each.rule.severity.value, each.rule.id, each.message, each.advice) for each in self.findings]
            yield TablePart("Findings", ("severity", "rule", "finding", "advice"), found)
        if self.programs:
            rows = [(each.name, f"{each.nodes:,}") for each in self.programs]
            yield TablePart("Programs", ("program", "operators"), rows)
        for fit in self.fits:
            bars = [
                (f"tp {row.degree}", row.need / _GIB, f"{row.need / _GIB:.2f} GiB") for row in fit.rows if row.footprint
            ]
            chosen = f"tp {fit.chosen} fits" if fit.chosen else "no degree fits"
            title = f"{fit.target}: {chosen}; memory of a core, of {fit.capacity / _GIB:.1f} GiB"
            yield BarsPart(title, bars, fit.capacity / _GIB) if bars else title

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "task": self.task,
            "verdict": self.exit_code.name,
            "exit_code": self.exit_code.number,
            "programs": [asdict(program) for program in self.programs],
            "memory_covers": "all programs" if self.whole else "weights only",
            "targets": [asdict(fit) for fit in self.fits],
            "findings": [finding.as_json() for finding in self.findings],
        }


_GIB = 1 << 30


def fit_target(examination: Examination, target: Instance, requested: int | None) -> TargetFit:
    """The fit on one instance. A requested degree has a row even if the instance does not offer it."""
    memory, code = capacity(target), code_bytes(target)
    offered = target.degrees
    listed = sorted({*offered, requested} if requested else offered)
    rows = (
        tuple(_row(examination, target, degree, offered, memory) for degree in listed) if examination.footprints else ()
    )
    fitting = [row.degree for row in rows if row.fits]
    chosen = (requested if requested in fitting else None) if requested else min(fitting, default=None)
    return TargetFit(target.name, target.logical_cores, memory, code, rows, chosen)


def _row(examination: Examination, target: Instance, degree: int, offered: tuple[int, ...], memory: int) -> Row:
    footprint = next((candidate for candidate in examination.footprints if candidate.degree == degree), None)
    if degree not in offered:
        reason = f"{target.name} offers degrees {', '.join(map(str, offered))}"
        return Row(degree, None, 0, fits=False, reason=reason)
    if footprint is None:
        return Row(degree, None, 0, fits=False, reason=examination.refused.get(degree, "not examined"))
    need = footprint.on(target)
    return Row(degree, footprint, need, fits=need <= memory)


def verdicts(fits: tuple[TargetFit, ...], requested: int | None) -> Iterator[Finding]:
    """Findings about the fit: the model must fit one of the instances."""
    if not any(fit.rows for fit in fits):
        return
    fitting = [fit for fit in fits if fit.chosen is not None]
    if not fitting:
        yield _refusal(fits, requested)
    if len(fits) == 1 and fitting:
        row = fits[0].row(fits[0].chosen)
        if row and row.need > 0.9 * fits[0].capacity:
            yield Finding(
                TIGHT,
                f"tp {row.degree} takes {row.need / _GIB:.1f} of the {fits[0].capacity / _GIB:.1f} GiB of each core",
                "leave memory for the runtime's buffers: use a higher --tp, a smaller bucket or batch",
            )
        if row and row.footprint and row.footprint.padding:
            yield _padded(row.footprint, fits[0])


def _padded(footprint: GraphMemory, fit: TargetFit) -> Finding:
    rows = (row for row in fit.rows if row.fits and row.footprint and not row.footprint.padding)
    without = ", ".join(str(row.degree) for row in rows)
    advice = f"degrees that fit without padding: {without}" if without else "every degree that fits needs padding"
    return Finding(PADDED, f"tp {footprint.degree} pads with zeros: {footprint.padding}", advice)


def _refusal(fits: tuple[TargetFit, ...], requested: int | None) -> Finding:
    if len(fits) > 1:
        return Finding(DOES_NOT_FIT, "the model fits no instance of the catalogue", "use a smaller bucket or batch")
    fit = fits[0]
    row = fit.row(requested)
    possible = [row.degree for row in fit.rows if row.fits]
    advice = (
        f"the smallest degree that fits is --tp {possible[0]}" if possible else "see other instances with --target all"
    )
    if row is not None and row.reason:
        return Finding(DEGREE, f"tp {requested} is not possible: {row.reason}", advice)
    counted = [row for row in fit.rows if row.footprint]
    if not counted:
        return Finding(DEGREE, f"the model supports no degree of {fit.target}: {fit.rows[0].reason}", advice)
    least = row or min(counted, key=lambda row: row.need)
    return Finding(
        DOES_NOT_FIT,
        f"at tp {least.degree} each core of {fit.target} needs {least.need / _GIB:.1f} GiB and has "
        f"{fit.capacity / _GIB:.1f} GiB",
        advice,
    )
