"""Front end and back end as one call each: from a capture request to the compiled graph, and on to the executable."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nxpipe.emulator.analysis.graph_memory import states
from nxpipe.emulator.analysis.program_memory import require_room
from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.capture.dispatch import call_for_model
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.lower.parameters import sliced_parameters
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import RankSlice
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.passes.shard import NO_PADDING, Padding, Sharding, apply, padding, plan
from nxpipe.emulator.run.inputs import NOT_DIVIDED, require_inputs


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled model: the graph that each rank runs, and the whole graph that all ranks together compute.

    Weights and states that are not listed are whole on every rank.
    """

    whole: Graph
    graph: Graph
    degree: int
    parameters: Mapping[str, Sharding]
    states: Mapping[str, Sharding]
    padding: Padding = NO_PADDING

    def require_inputs(self, given: Mapping[str, Array]) -> None:
        """Raise for inputs that would be misread. A stored program knows the whole by its division alone."""
        require_inputs(self.whole, given, self.states if self.whole is self.graph else NOT_DIVIDED)


def compile_program(request: CaptureRequest, options: PassOptions) -> CompiledGraph:
    """Run all passes, and shard the result as the options ask; a published tensor-parallel plan of the model takes
    precedence."""
    whole = compile_graph(request, replace(options, tensor_parallel=1))
    if options.tensor_parallel > 1 and not options.published_plan:
        from nxpipe.emulator.capture.model import published_plan

        options = replace(options, published_plan=published_plan(request))
    return shard_graph(whole, options)


def shard_graph(whole: Graph, options: PassOptions) -> CompiledGraph:
    """A compiled graph as a program for the options' tensor-parallel degree."""
    if options.tensor_parallel == 1:
        return CompiledGraph(whole, whole, 1, {}, {})
    layers = unroll(whole)
    found = plan(layers, options.tensor_parallel, dict(options.published_plan))
    graph = run_passes(apply(layers, found), options, (roll,))
    return CompiledGraph(whole, graph, found.degree, found.parameters, found.states, padding(layers, found))


def compile_graph(request: CaptureRequest, options: PassOptions) -> Graph:
    """The graph after all passes. Its cost does not grow with a model's depth where layers provably repeat."""
    return call_for_model(Graph, "compile_graph", request, options)


def compile_graph_in_process(request: CaptureRequest, options: PassOptions) -> Graph:
    """The same, in this process."""
    from nxpipe.emulator.capture.repeated_layers import compile_by_depth

    def finish(graph: Graph) -> Graph:
        return run_passes(graph, options)

    return compile_by_depth(request, finish) or finish(capture(request))


def emit(
    program: CompiledGraph, core: str, sizes: Mapping[str, tuple[str, ...]] | None = None, room: int | None = None
) -> Executable:
    """Lower a program. `sizes` names, for inputs and outputs, axes along which a request may be shorter than the
    program; name an axis only where zeros behind a request do not change its result. `room`: bytes of HBM behind each
    core; OutOfMemory if the program takes more."""
    lowered = lower(program.graph, core, program.degree)
    if room is not None:
        require_room(lowered, room)
    # A weight that is only combined with a rank's rows is sliced as they are, although the plan keeps it whole.
    sliced = {name: _piece(op) for name, op in sliced_parameters(program.graph).items()}
    pieces = {**sliced, **program.parameters, **program.states}
    divisions = {
        number: pieces[buffer.names[0]] for number, buffer in enumerate(lowered.buffers) if buffer.names[0] in pieces
    }
    return Executable(lowered, ports_of(program, sizes), divisions)


def _piece(op: RankSlice) -> Sharding:
    return Sharding(op.axis, *(each * op.outer for each in (op.sizes, op.parts, op.slots, op.lengths)))


def ports_of(program: CompiledGraph, sizes: Mapping[str, tuple[str, ...]] | None = None) -> tuple[Port, ...]:
    """The interface of a compiled program: whole tensors in the caller's types. `sizes` as in `emit`."""
    graph, named = program.whole, sizes or {}
    held = states(graph)
    ends = [
        *((Role.STATE if name in held else Role.INPUT, name, value) for name, value in graph.inputs.items()),
        *((Role.OUTPUT, name, value) for name, value in graph.outputs.items() if name not in held),
    ]
    return tuple(Port(name, role, value.type, named.get(name, ())) for role, name, value in ends)
