"""What a check found out: the programs that lower, what they take, where they fit, and every finding."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nxpipe.emulator.analysis.graph_memory import GraphMemory
from nxpipe.emulator.passes.shard import Padding
from nxpipe.pipeline.check.finding import RULES, Finding, Severity, worst_exit_code
from nxpipe.pipeline.util.exit_codes import ExitCode


@dataclass(frozen=True)
class Program:
    """One program that lowers: operators as stored, and as they run when repeats are written out."""

    name: str
    nodes: int
    steps: int
    graph_key: str  # that of a build on one core


@dataclass(frozen=True)
class Examination:
    """What follows from the model, its shapes and the options alone, on whatever machine and for whatever instance."""

    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    footprints: tuple[GraphMemory, ...]
    refused: Mapping[int, str]  # tensor-parallel degrees that the model cannot have, and why
    whole: bool  # whether the footprints cover all programs, and not the weights alone
    of_this_machine: bool = False  # whether a finding hangs on what is installed here; such an answer is never kept

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
    """One tensor-parallel degree on one instance; `reason` says why it is none, where it is none."""

    degree: int
    footprint: GraphMemory | None
    need: int
    fits: bool
    reason: str = ""


@dataclass(frozen=True)
class Fit:
    """One instance: what a core holds, what each degree needs, and the degree that the verdict is about."""

    target: str
    cores: int
    capacity: int
    code: int
    rows: tuple[Row, ...]
    chosen: int | None  # the degree asked for if it fits, else the smallest that does when none was asked for

    def row(self, degree: int | None) -> Row | None:
        return next((row for row in self.rows if row.degree == degree), None)


@dataclass(frozen=True)
class Report:
    """The verdict on one model."""

    model: str
    task: str
    programs: tuple[Program, ...]
    whole: bool
    fits: tuple[Fit, ...]
    findings: tuple[Finding, ...]
    file: str = ""  # where findings belong that have no line of code; of a model in a folder, its config.json

    @property
    def exit_code(self) -> ExitCode:
        return worst_exit_code(self.findings)

    def of(self, severity: Severity) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.severity is severity]

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
