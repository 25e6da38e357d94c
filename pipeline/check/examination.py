"""Examination: compiles and measures every program of a model. A program that does not compile is a finding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nxpipe.emulator.analysis.graph_memory import GraphMemory, footprints
from nxpipe.emulator.errors import (
    CaptureError,
    CompileError,
    GraphBreak,
    LimitExceeded,
    OptionsInvalid,
    UnsupportedOperators,
)
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes.precision import ConstantTooLarge
from nxpipe.emulator.passes.shard import divide
from nxpipe.pipeline.check.graph_rules import group_layers, limits, lookups_outside, nodes_with_counts, risks
from nxpipe.pipeline.check.model_files import (
    Checkpoint,
    compare_checkpoint,
)
from nxpipe.pipeline.check.report import Examination, Program
from nxpipe.pipeline.compile.findings import (
    FAULT,
    GRAPH_BREAK,
    INT64,
    NOT_CAPTURED,
    OPERATOR,
    PUBLISHED_PLAN,
    UNKNOWN_OPTION,
    WEIGHTS,
    Finding,
    merge,
    source_place,
)
from nxpipe.pipeline.compile.frontend import authors_plan, compile_shape, pass_options
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.process import report_crash
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.emulator.ir.types import TensorType


def examine(spec: BuildSpec, degrees: tuple[int, ...], checkpoint: Checkpoint | None, step: Step) -> Examination:
    """All findings of the programs, and their memory at each tensor-parallel degree."""
    findings: list[Finding] = []
    spec = _with_known_options(spec, findings)
    graphs: dict[str, Graph] = {}
    is_local = False
    for shape in sorted(spec.shapes):
        with step(f"check {shape.name}"):
            graph, error = _compile(spec, shape)
            problems = [] if error is None else findings_of(error)
            is_local = is_local or (error is not None and _is_local(error))
            if graph is not None:
                graphs[shape.name] = graph
                target = spec.target.compiler_target
                problems += [*limits(graph, target), *lookups_outside(graph), *risks(graph, spec.autocast)]
        findings += [replace(finding, programs=(shape.name,)) for finding in problems]
    weights = _weights(spec, graphs)
    if checkpoint and weights:
        findings += compare_checkpoint(checkpoint, weights)
    published = dict(authors_plan(spec, spec.shapes[0])) if graphs and max(degrees) > 1 else {}
    findings += _unmet_plan(graphs.values(), published)
    graph_footprints, refused = _footprints(list(graphs.values()), weights, degrees, published)
    programs = tuple(_program(name, graph) for name, graph in graphs.items())
    return Examination(programs, merge(findings), graph_footprints, refused, len(graphs) == len(spec.shapes), is_local)


def _with_known_options(spec: BuildSpec, findings: list[Finding]) -> BuildSpec:
    """The specification without options that the compiler lacks; these become a finding."""
    try:
        pass_options(spec)
    except OptionsInvalid as error:
        findings.append(Finding(UNKNOWN_OPTION, str(error), "all other checks used --autocast none"))
        return replace(spec, autocast="none", autocast_type="bf16")
    return spec


def _compile(spec: BuildSpec, shape: Shape) -> tuple[Graph | None, Exception | None]:
    """One program's graph, or the error that prevents it."""
    try:
        return compile_shape(spec, shape).graph, None
    except (MemoryError, LimitExceeded):  # limits of this run, not of the model
        raise
    except Exception as error:  # the model's own code can raise any error; it becomes a finding with a log
        return None, error


def findings_of(error: Exception) -> list[Finding]:
    """An error of the compiler's front end as findings."""
    if isinstance(error, UnsupportedOperators):
        return group_layers(
            Finding(OPERATOR, gap.operator, gap.advice, gap.module, *source_place(gap.source), count=gap.count)
            for gap in error.findings
        )
    message, _, advice = str(error).partition("; ")
    if isinstance(error, CaptureError):
        rule = GRAPH_BREAK if isinstance(error, GraphBreak) else NOT_CAPTURED
        return [Finding(rule, message, advice, "", *source_place(error.source))]
    if isinstance(error, CompileError):
        return [Finding(INT64 if isinstance(error, ConstantTooLarge) else NOT_CAPTURED, message, advice)]
    return [Finding(FAULT, report_crash(error), "report the log file")]


def _weights(spec: BuildSpec, graphs: Mapping[str, Graph]) -> Mapping[str, "TensorType"]:
    """The weights that the model needs: those of its programs, or of the model class if no program compiles."""
    if graphs:
        return {name: value.type for graph in graphs.values() for name, value in graph.parameters.items()}
    for shape in spec.shapes:
        try:
            return spec.parameters(shape)
        except (MemoryError, LimitExceeded):
            raise
        except Exception:  # noqa: S112  the same failure was reported when this program was captured
            continue
    return {}


def _unmet_plan(graphs: Iterable[Graph], published: Mapping[str, str]) -> Iterator[Finding]:
    for graph in graphs if published else ():
        for sentence in divide(graph, published).unmet:
            yield Finding(PUBLISHED_PLAN, sentence, "the compiler uses a split that the graph allows instead")


def _footprints(
    graphs: list[Graph],
    weights: Mapping[str, "TensorType"],
    degrees: tuple[int, ...],
    published: Mapping[str, str],
) -> tuple[tuple[GraphMemory, ...], dict[int, str]]:
    """The footprint of each degree; without a compiled program, only the share of the weights."""
    if graphs:
        by_degree, refused = footprints(graphs, degrees, published)
        return tuple(by_degree), refused
    total = sum(kind.nbytes for kind in weights.values())
    return tuple(GraphMemory(degree, -(-total // degree), 0, 0, 0, 0) for degree in degrees if total), {}


def _program(name: str, graph: Graph) -> Program:
    counts = [times for _, times in nodes_with_counts(graph)]
    return Program(name, len(counts), sum(counts), graph.key)


def is_cacheable(examination: Examination) -> bool:
    """True if the examination is valid later and on another machine.

    It is not if it depends on a defect of nxpipe, on weight files, or on software of this machine.
    """
    return not examination.of_this_machine and all(
        finding.rule not in (FAULT, WEIGHTS) for finding in examination.findings
    )


def _is_local(error: BaseException) -> bool:
    """True if an error depends on packages, files or memory of this machine, and not on the model alone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError | OSError | MemoryError | MissingSoftware):
            return True
        if isinstance(cause, RuntimeError) and "allocate memory" in str(cause):  # PyTorch's allocator
            return True
        cause = cause.__cause__ or cause.__context__
    return False
