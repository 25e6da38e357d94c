"""Examination: every program of a model compiled and measured; one that fails is a finding, and the next is tried."""

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
    """All findings of the programs, and the memory that they take at each tensor-parallel degree."""
    findings: list[Finding] = []
    spec = _with_known_options(spec, findings)
    graphs: dict[str, Graph] = {}
    here = False
    for shape in sorted(spec.shapes):
        with step(f"check {shape.name}"):
            graph, error = _compile(spec, shape)
            problems = [] if error is None else findings_of(error)
            here = here or (error is not None and _of_this_machine(error))
            if graph is not None:
                graphs[shape.name] = graph
                target = spec.target.compiler_target
                problems += [*limits(graph, target), *lookups_outside(graph), *risks(graph, spec.autocast)]
        findings += [replace(finding, programs=(shape.name,)) for finding in problems]
    weights = _weights(spec, graphs)
    if checkpoint and weights:
        findings += compare_checkpoint(checkpoint, weights)
    published = dict(authors_plan(spec, spec.shapes[0])) if graphs and max(degrees) > 1 else {}
    findings += _not_followed(graphs.values(), published)
    taken, refused = _footprints(list(graphs.values()), weights, degrees, published)
    programs = tuple(_program(name, graph) for name, graph in graphs.items())
    return Examination(programs, merge(findings), taken, refused, len(graphs) == len(spec.shapes), here)


def _with_known_options(spec: BuildSpec, findings: list[Finding]) -> BuildSpec:
    """Options that the compiler does not have are a finding; everything else is checked without them."""
    try:
        pass_options(spec)
    except OptionsInvalid as error:
        findings.append(Finding(UNKNOWN_OPTION, str(error), "everything else was checked with --autocast none"))
        return replace(spec, autocast="none", autocast_type="bf16")
    return spec


def _compile(spec: BuildSpec, shape: Shape) -> tuple[Graph | None, Exception | None]:
    """One program's graph, or the error that prevents it."""
    try:
        return compile_shape(spec, shape).graph, None
    except (MemoryError, LimitExceeded):  # limits of this run, not of the model
        raise
    except Exception as error:  # the model's own code runs here; an unforeseen error is a finding too, with its log
        return None, error


def findings_of(error: Exception) -> list[Finding]:
    """An error of the compiler's front end as findings."""
    if isinstance(error, UnsupportedOperators):
        return group_layers(
            Finding(OPERATOR, one.operator, one.advice, one.module, *source_place(one.source), count=one.count)
            for one in error.findings
        )
    message, _, advice = str(error).partition("; ")
    if isinstance(error, CaptureError):
        rule = GRAPH_BREAK if isinstance(error, GraphBreak) else NOT_CAPTURED
        return [Finding(rule, message, advice, "", *source_place(error.source))]
    if isinstance(error, CompileError):
        return [Finding(INT64 if isinstance(error, ConstantTooLarge) else NOT_CAPTURED, message, advice)]
    return [Finding(FAULT, report_crash(error), "report that log")]


def _weights(spec: BuildSpec, graphs: Mapping[str, Graph]) -> Mapping[str, "TensorType"]:
    """The weights that the model needs: of its programs, or of the model class where no program compiles."""
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


def _not_followed(graphs: Iterable[Graph], published: Mapping[str, str]) -> Iterator[Finding]:
    for graph in graphs if published else ():
        for sentence in divide(graph, published).unmet:
            yield Finding(PUBLISHED_PLAN, sentence, "the division that the graph allows is taken instead")


def _footprints(
    graphs: list[Graph],
    weights: Mapping[str, "TensorType"],
    degrees: tuple[int, ...],
    published: Mapping[str, str],
) -> tuple[tuple[GraphMemory, ...], dict[int, str]]:
    """The footprint of each degree; without a compiled program, at least its share of the weights."""
    if graphs:
        found, refused = footprints(graphs, degrees, published)
        return tuple(found), refused
    total = sum(kind.nbytes for kind in weights.values())
    return tuple(GraphMemory(degree, -(-total // degree), 0, 0, 0, 0) for degree in degrees if total), {}


def _program(name: str, graph: Graph) -> Program:
    counts = [times for _, times in nodes_with_counts(graph)]
    return Program(name, len(counts), sum(counts), graph.key)


def lasting(examination: Examination) -> bool:
    """Whether the examination holds later and on another machine, and may be cached.

    A defect of nxpipe may be fixed, weights are files of this machine, and a missing library may be installed.
    """
    return not examination.of_this_machine and all(
        finding.rule not in (FAULT, WEIGHTS) for finding in examination.findings
    )


def _of_this_machine(error: BaseException) -> bool:
    """Whether an error depends on this machine's packages, files or memory, and not on the model alone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError | OSError | MemoryError | MissingSoftware):
            return True
        if isinstance(cause, RuntimeError) and "allocate memory" in str(cause):  # PyTorch's allocator
            return True
        cause = cause.__cause__ or cause.__context__
    return False
