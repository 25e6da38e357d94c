"""Findings about a model: each has a rule, with an id, a severity and an exit code. Ids NXC-nnn never change."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.util import exit_codes

if TYPE_CHECKING:
    from nxpipe.emulator.ir.nodes import Origin


class Severity(StrEnum):
    """Severity of a finding. An error stops a build; a warning can affect its outputs or its run; a note informs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Rule:
    """One kind of finding. Ids never change: users suppress findings by them."""

    id: str
    name: str
    severity: Severity
    meaning: str
    exit_code: exit_codes.ExitCode = exit_codes.OK


def _error(number: int, name: str, meaning: str, code: exit_codes.ExitCode = exit_codes.COMPILE) -> Rule:
    return Rule(f"NXC-{number}", name, Severity.ERROR, meaning, code)


def _warning(number: int, name: str, meaning: str) -> Rule:
    return Rule(f"NXC-{number}", name, Severity.WARNING, meaning)


def _note(number: int, name: str, meaning: str) -> Rule:
    return Rule(f"NXC-{number}", name, Severity.NOTE, meaning)


SOURCE: Final = _error(101, "model-source", "The model is not available, or cannot be read.", exit_codes.MODEL)
CONFIGURATION: Final = _error(102, "configuration", "A value of config.json cannot describe a model.", exit_codes.MODEL)
WEIGHTS: Final = _error(103, "weights", "The weight files are damaged or belong to another model.", exit_codes.MODEL)
CUSTOM_CODE: Final = _warning(
    104, "custom-code", "The model has modelling code of its own, which is never run; transformers' class is used."
)
QUANTISED: Final = _error(105, "quantised", "The configuration is that of a quantised checkpoint.", exit_codes.MODEL)
PICKLED: Final = _warning(106, "pickled-weights", "Weights that only Python's pickle can read; nxpipe never uses it.")

NOT_CAPTURED: Final = _error(201, "not-captured", "The model's own class cannot be built or traced.")
GRAPH_BREAK: Final = _error(
    202, "graph-break", "Python control flow depends on a tensor's value; a compiled program has none."
)
OPERATOR: Final = _error(203, "unsupported-operator", "An operator that the compiler does not support.")
POSITIONS: Final = _error(
    204, "positions", "A lookup beyond its table: the bucket is longer than the model's positions."
)
UNKNOWN_OPTION: Final = _error(205, "option", "An option that the target or the compiler does not have.")
FAULT: Final = _error(299, "compiler-fault", "A defect of nxpipe itself: report it.", exit_codes.INTERNAL)

DEGREE: Final = _error(
    301,
    "tensor-parallel-degree",
    "The model or the target does not have this tensor-parallel degree.",
    exit_codes.DOES_NOT_FIT,
)
INT64: Final = _error(302, "int64-narrowed", "An integer does not fit the 32 bits that the compiler keeps.")
LARGE_TENSOR: Final = _warning(303, "tensor-above-4-gb", "Older runtimes refuse tensors above 4 GB.")
OPERAND_TYPE: Final = _error(304, "operand-type", "neuronx-cc refuses this operator on integers and booleans.")
EMPTY_TENSOR: Final = _warning(305, "empty-tensor", "A tensor has no elements, so a part of the model does nothing.")
FP8_KIND: Final = _error(307, "fp8-format", "The target has the other of the two E4M3 formats.")
WINDOW: Final = _error(308, "dilated-window", "neuronx-cc refuses reductions over dilated windows.")
PUBLISHED_PLAN: Final = _note(309, "published-plan", "An entry of the authors' tensor-parallel plan is not followed.")
PADDED: Final = _note(
    310, "padding", "The tensor-parallel degree does not divide the model: its tensors are padded with zeros."
)

DOES_NOT_FIT: Final = _error(
    401, "does-not-fit", "A core's memory is smaller than its share of the model.", exit_codes.DOES_NOT_FIT
)
TIGHT: Final = _warning(402, "tight-memory", "More than nine tenths of a core's memory are used.")

NARROW_SENSITIVE: Final = _note(
    501, "narrowed-reduction", "Autocast narrows work that models usually keep in fp32: norms, softmax, exponents."
)
FP16_OVERFLOW: Final = _warning(502, "fp16-overflow", "fp16 ends at 65504; a larger value becomes infinite.")
FP8_RANGE: Final = _warning(503, "fp8-range", "fp8 E4M3 ends at 240 (448 on Trn3); a larger value becomes NaN.")
NARROW_COUNT: Final = _warning(504, "inexact-integers", "Integers converted to a narrow float lose their last digits.")

RULES: Final = {
    rule.id: rule
    for rule in (
        *(SOURCE, CONFIGURATION, WEIGHTS, CUSTOM_CODE, QUANTISED, PICKLED),
        *(NOT_CAPTURED, GRAPH_BREAK, OPERATOR, POSITIONS, UNKNOWN_OPTION, FAULT),
        *(
            DEGREE,
            INT64,
            LARGE_TENSOR,
            OPERAND_TYPE,
            EMPTY_TENSOR,
            FP8_KIND,
            WINDOW,
            PUBLISHED_PLAN,
            PADDED,
        ),
        *(DOES_NOT_FIT, TIGHT),
        *(NARROW_SENSITIVE, FP16_OVERFLOW, FP8_RANGE, NARROW_COUNT),
    )
}


@dataclass(frozen=True)
class Finding:
    """One finding: its rule, message and remedy, and its place in the model's source or files."""

    rule: Rule
    message: str
    advice: str = ""
    module: str = ""
    file: str = ""
    line: int | None = None
    count: int = 1
    programs: tuple[str, ...] = ()

    @classmethod
    def at(cls, rule: Rule, message: str, advice: str, origin: "Origin", count: int = 1) -> "Finding":
        """A finding at the source line of a graph node."""
        file, line = source_place(origin.source)
        return cls(rule, message, advice, origin.module, file, line, count)

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def as_json(self) -> dict[str, object]:
        return {
            "rule": self.rule.id,
            "kind": self.rule.name,
            "severity": str(self.severity),
            "message": self.message,
            "advice": self.advice,
            "module": self.module,
            "file": self.file,
            "line": self.line,
            "count": self.count,
            "programs": list(self.programs),
        }


def merge(findings: list[Finding]) -> tuple[Finding, ...]:
    """Merge findings that several programs share, the most severe first."""
    merged: dict[Finding, list[Finding]] = {}
    for finding in findings:
        merged.setdefault(replace(finding, count=1, programs=()), []).append(finding)
    unordered = [
        replace(
            group[0],
            count=max(finding.count for finding in group),
            programs=tuple(dict.fromkeys(program for finding in group for program in finding.programs)),
        )
        for group in merged.values()
    ]
    order = list(Severity)
    return tuple(sorted(unordered, key=lambda finding: (order.index(finding.severity), finding.rule.id)))


def source_place(source: str) -> tuple[str, int | None]:
    """`models/bert.py:12` as a file and a line."""
    file, _, line = source.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (source, None)


def worst_exit_code(findings: tuple[Finding, ...]) -> exit_codes.ExitCode:
    """Exit code of the error of the earliest stage, by rule id: an error of the source hides those of the compiler."""
    errors = [finding.rule for finding in findings if finding.severity is Severity.ERROR]
    return min(errors, key=lambda rule: rule.id).exit_code if errors else exit_codes.OK
