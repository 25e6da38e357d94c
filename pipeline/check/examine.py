"""Capture, compile and measure every program of a model, and go on to the next when one fails."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from nxpipe.emulator.analysis.graph_memory import GraphMemory, footprints
from nxpipe.emulator.compile import compile_graph
from nxpipe.emulator.errors import (
    CaptureError,
    CompileError,
    GraphBreak,
    LimitExceeded,
    OptionsInvalid,
    UnsupportedOperators,
)
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.precision import ConstantTooLarge
from nxpipe.emulator.passes.shard import divide
from nxpipe.pipeline.check.bounds import lookups_outside
from nxpipe.pipeline.check.finding import (
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
from nxpipe.pipeline.check.limits import limits
from nxpipe.pipeline.check.lowered import each_node, grouped
from nxpipe.pipeline.check.precision import risks
from nxpipe.pipeline.check.report import Examination, Program
from nxpipe.pipeline.check.weights import Checkpoint, compare
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.request import Shape, capture_request
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.process import report_crash
from nxpipe.pipeline.verify.evidence import Step

if TYPE_CHECKING:
    from nxpipe.emulator.ir.types import TensorType

Lowering: TypeAlias = Callable[[PassOptions], Graph]


@dataclass(frozen=True)
class Subject:
    """What is examined: programs by name, each as the way to its graph, and the types of the weights without any."""

    programs: Mapping[str, Lowering]
    weights: Callable[[], Mapping[str, "TensorType"]]
    autocast: str
    autocast_type: str
    target: str
    degrees: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    published: Callable[[], Iterable[tuple[str, str]]] = tuple  # the authors' own plan of tensor parallelism


def programs_of(source: ModelSource, shapes: tuple[Shape, ...]) -> dict[str, Lowering]:
    """The programs of a Hugging Face model, captured exactly as a build of these shapes captures them."""

    def lowering(shape: Shape) -> Lowering:
        return lambda options: compile_graph(capture_request(source, shape, shapes), options)

    return {shape.name: lowering(shape) for shape in sorted(shapes)}


def published_of(source: ModelSource, shapes: tuple[Shape, ...]) -> Iterable[tuple[str, str]]:
    """The authors' own plan of tensor parallelism; called only where a program was captured, so there is a model."""
    from nxpipe.emulator.capture.model import published_plan

    return published_plan(capture_request(source, shapes[0]))


def weights_of(source: ModelSource, shapes: tuple[Shape, ...]) -> Mapping[str, "TensorType"]:
    """What a model asks of a checkpoint, read off the model built without a trace."""
    from nxpipe.emulator.capture import parameter_specs

    for shape in shapes:
        try:
            return parameter_specs(capture_request(source, shape))
        except (MemoryError, LimitExceeded):
            raise
        except Exception:  # noqa: S112  the same failure was reported when this program was captured
            continue
    return {}


def examine(subject: Subject, step: Step) -> Examination:
    """All findings, and what the programs take."""
    findings: list[Finding] = []
    options = _options(subject, findings)
    graphs: dict[str, Graph] = {}
    here = False
    for name, lowering in subject.programs.items():
        with step(f"check {name}"):
            graph, error = _lowered(lowering, options)
            problems = [] if error is None else findings_of(error)
            here = here or (error is not None and _of_this_machine(error))
            if graph is not None:
                graphs[name] = graph
                problems += [*limits(graph, options), *lookups_outside(graph), *risks(graph, options)]
        findings += [replace(finding, programs=(name,)) for finding in problems]
    weights = _weights(subject, graphs)
    if subject.checkpoint and weights:
        findings += compare(subject.checkpoint, weights)
    published = dict(subject.published()) if graphs and max(subject.degrees) > 1 else {}
    findings += _not_followed(graphs.values(), published)
    taken, refused = _footprints(list(graphs.values()), weights, subject.degrees, published)
    programs = tuple(_program(name, graph) for name, graph in graphs.items())
    return Examination(programs, merge(findings), taken, refused, len(graphs) == len(subject.programs), here)


def _options(subject: Subject, findings: list[Finding]) -> PassOptions:
    """Options that do not exist are said, and everything else is checked without them."""
    try:
        return PassOptions(subject.autocast, subject.autocast_type, subject.target)
    except OptionsInvalid as error:
        findings.append(Finding(UNKNOWN_OPTION, str(error), "everything else was checked with --autocast none"))
        return PassOptions("none", target=subject.target)


def _lowered(lowering: Lowering, options: PassOptions) -> tuple[Graph | None, Exception | None]:
    """One program's graph, or what stands in its way."""
    try:
        return lowering(options), None
    except (MemoryError, LimitExceeded):  # which say nothing of the model that would be true tomorrow
        raise
    except Exception as error:  # the model's own code runs here; what nobody foresaw is a finding too, with its log
        return None, error


def findings_of(error: Exception) -> list[Finding]:
    """An error of the compiler's front end in the words of a check."""
    if isinstance(error, UnsupportedOperators):
        return grouped(
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


def _weights(subject: Subject, graphs: Mapping[str, Graph]) -> Mapping[str, "TensorType"]:
    """What the model asks of a checkpoint: read off its programs if there are any."""
    if graphs:
        return {name: value.type for graph in graphs.values() for name, value in graph.parameters.items()}
    return subject.weights()


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
    """What each degree takes; without a program, at least what its share of the weights does."""
    if graphs:
        found, refused = footprints(graphs, degrees, published)
        return tuple(found), refused
    total = sum(kind.nbytes for kind in weights.values())
    return tuple(GraphMemory(degree, -(-total // degree), 0, 0, 0, 0) for degree in degrees if total), {}


def _program(name: str, graph: Graph) -> Program:
    counts = [times for _, times in each_node(graph)]
    return Program(name, len(counts), sum(counts), graph.key)


def lasting(examination: Examination) -> bool:
    """Whether the same question has the same answer tomorrow, and on another machine: only then it is kept.

    A defect of ours may be mended, weights are files of this machine, and what a library could not find or have is
    there once it is installed.
    """
    return not examination.of_this_machine and all(
        finding.rule not in (FAULT, WEIGHTS) for finding in examination.findings
    )


def _of_this_machine(error: BaseException) -> bool:
    """Whether an error comes from what is installed, at hand or free here, and not from the model alone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError | OSError | MemoryError | MissingSoftware):
            return True
        if isinstance(cause, RuntimeError) and "allocate memory" in str(cause):  # PyTorch's allocator
            return True
        cause = cause.__cause__ or cause.__context__
    return False
