"""Capture, compile and measure every program of a model, and go on to the next when one fails."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from emulator.compile import compile_graph
from emulator.errors import CaptureError, CompileError, GraphBreak, OptionsInvalid, UnsupportedOperators
from emulator.graph import Graph
from emulator.memory import Footprint, footprints
from emulator.passes import PassOptions
from pipeline.check.finding import (
    FAULT,
    GRAPH_BREAK,
    NOT_CAPTURED,
    OPERATOR,
    UNKNOWN_OPTION,
    WEIGHTS,
    Finding,
    merge,
    source_place,
)
from pipeline.check.limits import limits
from pipeline.check.lowered import each_node, grouped
from pipeline.check.precision import risks
from pipeline.check.report import Examination, Program
from pipeline.check.weights import Checkpoint, compare
from pipeline.crash import report_crash
from pipeline.evidence import Step
from pipeline.models.source import ModelSource
from pipeline.request import Shape, capture_request

if TYPE_CHECKING:
    from emulator.types import TensorType


@dataclass(frozen=True)
class Subject:
    """What is examined."""

    source: ModelSource
    shapes: tuple[Shape, ...]
    autocast: str
    autocast_type: str
    degrees: tuple[int, ...]
    checkpoint: Checkpoint | None


def examine(subject: Subject, step: Step) -> Examination:
    findings: list[Finding] = []
    options = _options(subject, findings)
    graphs: dict[Shape, Graph] = {}
    for shape in sorted(subject.shapes):
        with step(f"check {shape.name}"):
            problems, graph = _lower(subject.source, shape, options)
            if graph is not None:
                graphs[shape] = graph
                problems += [*limits(graph), *risks(graph, options)]
        findings += [replace(finding, programs=(shape.name,)) for finding in problems]
    weights = _weights(subject, graphs)
    if subject.checkpoint and weights:
        findings += compare(subject.checkpoint, weights)
    footprints, refused = _footprints(list(graphs.values()), weights, subject.degrees)
    programs = tuple(_program(shape, graph) for shape, graph in graphs.items())
    return Examination(programs, merge(findings), footprints, refused, len(graphs) == len(subject.shapes))


def _options(subject: Subject, findings: list[Finding]) -> PassOptions:
    """Options that do not exist are said, and everything else is checked without them."""
    try:
        return PassOptions(subject.autocast, subject.autocast_type)
    except OptionsInvalid as error:
        findings.append(Finding(UNKNOWN_OPTION, str(error), "everything else was checked with --autocast none"))
        return PassOptions("none")


def _lower(source: ModelSource, shape: Shape, options: PassOptions) -> tuple[list[Finding], Graph | None]:
    """One program's graph, or all that stands in its way."""
    try:
        return [], compile_graph(capture_request(source, shape), options)
    except MemoryError:
        raise
    except Exception as error:  # the model's own code runs here; what nobody foresaw is a finding too, with its log
        return findings_of(error), None


def findings_of(error: Exception) -> list[Finding]:
    """An error of the compiler's front end in the words of a check."""
    if isinstance(error, UnsupportedOperators):
        return grouped(
            Finding(OPERATOR, one.operator, one.advice, one.module, *source_place(one.source), count=one.count)
            for one in error.findings
        )
    if isinstance(error, CaptureError):
        rule = GRAPH_BREAK if isinstance(error, GraphBreak) else NOT_CAPTURED
        message, _, advice = str(error).partition("; ")
        return [Finding(rule, message, advice, "", *source_place(error.source))]
    if isinstance(error, CompileError):
        return [Finding(NOT_CAPTURED, str(error))]
    return [Finding(FAULT, report_crash(error, verbose=False), "report that log")]


def _weights(subject: Subject, graphs: Mapping[Shape, Graph]) -> dict[str, "TensorType"]:
    """What the model asks of a checkpoint: read off its programs, else off the model built without a trace."""
    if graphs:
        return {name: value.type for graph in graphs.values() for name, value in graph.parameters.items()}
    from emulator.capture import parameter_specs

    for shape in subject.shapes:
        try:
            return parameter_specs(capture_request(subject.source, shape))
        except MemoryError:
            raise
        except Exception:  # noqa: S112  the same failure was reported when this program was captured
            continue
    return {}


def _footprints(
    graphs: list[Graph], weights: Mapping[str, "TensorType"], degrees: tuple[int, ...]
) -> tuple[tuple[Footprint, ...], dict[int, str]]:
    """What each degree takes; without a program, at least what its share of the weights does."""
    if graphs:
        found, refused = footprints(graphs, degrees)
        return tuple(found), refused
    total = sum(kind.nbytes for kind in weights.values())
    return tuple(Footprint(degree, -(-total // degree), 0, 0, 0, 0) for degree in degrees if total), {}


def _program(shape: Shape, graph: Graph) -> Program:
    counts = [times for _, times in each_node(graph)]
    return Program(shape.name, len(counts), sum(counts))


def volatile(examination: Examination) -> Iterator[Finding]:
    """Findings that name files of this machine, or may be gone tomorrow: with one of them, nothing is kept."""
    return (finding for finding in examination.findings if finding.rule in (FAULT, WEIGHTS))
