"""Compilation of programs for build, check, verify, run and `explain --after`: `compile_shape`, and the emulator
backend.

Only this module chooses passes and their options.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.compile.artifact_files import document as utilisation_document
from nxpipe.pipeline.compile.backend import PROGRAM, BackendOutput
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.versions import compiler_digest, digest_of
from nxpipe.pipeline.util.errors import DoesNotFit
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.passes import Pass, PassOptions


Tap: TypeAlias = "Callable[[Graph], Graph]"
CAPTURE: Final = "capture"  # the name of the graph before the first pass


@dataclass(frozen=True)
class CapturedShape:
    """A captured program before any pass. It may be compiled with several options."""

    spec: BuildSpec
    shape: Shape
    graph: "Graph"

    @cached_property
    def authors_plan(self) -> tuple[tuple[str, str], ...]:
        return authors_plan(self.spec, self.shape)


def capture_shape(spec: BuildSpec, shape: Shape) -> CapturedShape:
    return CapturedShape(spec, shape, spec.capture(shape))


def compile_shape(
    spec: BuildSpec,
    shape: Shape,
    *,
    captured: CapturedShape | None = None,
    tap: "Tap | None" = None,
    until: str | None = None,
) -> "CompiledGraph":
    """Compile one program of a specification for all its ranks.

    `captured` is a graph of this shape to start from. Without it, a model class whose layers repeat is traced at two
    small depths, and the cost does not grow with the model's depth. `tap` transforms the graph after the passes and
    before it is sharded, to add outputs. `until` stops after the pass of that name (`pass_names`).
    """
    from nxpipe.emulator.compile import shard_graph
    from nxpipe.emulator.passes.shard import DegreeImpossible

    options = pass_options(spec)
    try:
        if until is not None:
            return _compile_until(captured or capture_shape(spec, shape), options, until)
        whole = _compile_whole(spec, shape, captured, replace(options, tensor_parallel=1))
        options = _with_plan(spec, shape, captured, options)
        return shard_graph(tap(whole) if tap else whole, options)
    except DegreeImpossible as error:
        raise spec.degree_refused(error.reason, error.degrees) from error


def pass_options(spec: BuildSpec) -> "PassOptions":
    """Options of the passes; OptionsInvalid for an autocast type that the target does not have."""
    from nxpipe.emulator.passes import PassOptions

    return PassOptions(spec.autocast, spec.autocast_type, spec.target.compiler_target, spec.tensor_parallel)


def authors_plan(spec: BuildSpec, shape: Shape) -> tuple[tuple[str, str], ...]:
    """The tensor-parallel plan that the model's authors published: patterns of modules, and how each is divided."""
    from nxpipe.emulator.capture.model import published_plan

    request = spec.capture_request(shape)
    return () if request is None else published_plan(request)


def pass_names() -> list[str]:
    """Capture and every pass; a pass that runs twice is `NAME` and `NAME:2`."""
    from nxpipe.emulator.passes import PASSES

    count: Counter[str] = Counter()
    names = [CAPTURE]
    for step in PASSES:
        count[step.__name__] += 1
        number = count[step.__name__]
        names.append(step.__name__ if number == 1 else f"{step.__name__}:{number}")
    return names


def backend_steps() -> list[str]:
    """The names of the back end's steps, which follow the passes."""
    from nxpipe.emulator.lower.backend import BACKEND

    return [step.__name__ for step in BACKEND]


def lowered_text(spec: BuildSpec, graph: "Graph", step: str) -> str:
    """Text of the back end's record after one of its steps, for a graph after all passes."""
    from nxpipe.emulator.lower.backend import record_text

    return record_text(graph, spec.target.core, spec.tensor_parallel, step)


def _compile_whole(spec: BuildSpec, shape: Shape, captured: CapturedShape | None, options: "PassOptions") -> "Graph":
    """The graph after all passes, for one rank."""
    from nxpipe.emulator.compile import compile_graph
    from nxpipe.emulator.passes import run_passes

    request = spec.capture_request(shape) if captured is None else None
    if request is not None:
        return compile_graph(request, options)
    return run_passes(captured.graph if captured else spec.capture(shape), options)


def _with_plan(spec: BuildSpec, shape: Shape, captured: CapturedShape | None, options: "PassOptions") -> "PassOptions":
    if options.tensor_parallel == 1:
        return options
    return replace(options, published_plan=captured.authors_plan if captured else authors_plan(spec, shape))


def _compile_until(captured: CapturedShape, options: "PassOptions", until: str) -> "CompiledGraph":
    """The program after one pass. Before the pass that shards it, all ranks share one graph."""
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.ir.repeat import unroll
    from nxpipe.emulator.passes import PASSES, run_passes
    from nxpipe.emulator.passes.shard import padding, plan, shard

    passes: tuple[Pass, ...] = PASSES[: pass_names().index(until)]
    unsharded = passes.index(shard) if shard in passes else len(passes)
    options = _with_plan(captured.spec, captured.shape, captured, options)
    whole = run_passes(captured.graph, options, passes[:unsharded])
    graph = run_passes(whole, options, passes[unsharded:])
    if unsharded == len(passes) or options.tensor_parallel == 1:
        return CompiledGraph(graph, graph, 1, {}, {})
    layers = unroll(whole)
    division = plan(layers, options.tensor_parallel, dict(options.published_plan))
    sharding = (division.parameters, division.states, padding(layers, division))
    return CompiledGraph(whole, graph, division.degree, *sharding)


class EmulatorBackend:
    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> "CompiledGraph":
        with step(f"compile {shape.name}"):
            return compile_shape(spec, shape)

    def program(
        self,
        spec: "BuildSpec",
        shape: Shape,
        frontend_output: "CompiledGraph",
        store: "Store",
        step: Step,
        *,
        force: bool,
    ) -> BackendOutput:
        """Compile the program. Equal graphs are lowered once, also for different models."""
        graph = frontend_output.graph.to_bytes()
        key = digest_of(_emission_key_inputs(spec, frontend_output, sha256_hex(graph)))
        emission = None if force else step_result(store, key)
        if emission is None:
            files, metadata = _emit(spec, shape, frontend_output, store, step)
            emission = keep_step_result(store, key, files, metadata)
        facts = {
            "degree": frontend_output.degree,
            "graph_key": frontend_output.graph.key,
            "outputs": sorted(frontend_output.whole.outputs),
        }
        return BackendOutput(
            {artifact_files.graph(shape.name): store.put_blob(graph), **{f.path: f.blob for f in emission.files}},
            {**facts, **emission.facts},
        )


def _emission_key_inputs(spec: "BuildSpec", program: "CompiledGraph", graph: str) -> dict[str, object]:
    """Key inputs of everything that the back end reads, with the module paths that its figures name."""
    from nxpipe.emulator.analysis.graph_memory import data_capacity

    return {
        "format": "nxpipe.emission/1",
        "graph": graph,
        "whole": graph if program.whole is program.graph else sha256_hex(program.whole.to_bytes()),
        "degree": program.degree,
        "parameters": {name: asdict(piece) for name, piece in program.parameters.items()},
        "states": {name: asdict(piece) for name, piece in program.states.items()},
        "padding": asdict(program.padding),
        "core": spec.target.core,
        "room": data_capacity(spec.target),
        "compiler": compiler_digest(),
    }


def _emit(
    spec: "BuildSpec", shape: Shape, program: "CompiledGraph", store: "Store", step: Step
) -> tuple[Mapping[str, "Blob"], dict[str, object]]:
    """Run the back end. A program that violates a rule of its core is not stored."""
    from nxpipe.emulator.analysis.graph_memory import data_capacity
    from nxpipe.emulator.analysis.utilization import utilisation
    from nxpipe.emulator.compile import emit
    from nxpipe.emulator.errors import OutOfMemory
    from nxpipe.emulator.executable.executable import to_bytes
    from nxpipe.emulator.isa.legality import check

    with step(f"emit {shape.name}"):
        try:
            executable = emit(program, spec.target.core, hbm_bytes=data_capacity(spec.target))
        except OutOfMemory as error:
            raise DoesNotFit(f"{spec.source.id} {shape.name}: {error}") from error
        check(executable.program)
        stored, tables = executable.without_large_constants()
        files = {artifact_files.constant(digest): data for digest, data in tables.items()} | {PROGRAM: to_bytes(stored)}
        used = utilisation(executable.program)
        return (
            {path: store.put_blob(data) for path, data in files.items()},
            {"utilisation": utilisation_document(used, program.padding)},
        )
