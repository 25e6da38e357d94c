"""Compiler entry points: from a capture request to the compiled graph (front end), and to the executable (back end)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nxpipe.emulator.analysis.graph_memory import states
from nxpipe.emulator.analysis.program_memory import require_capacity
from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.capture.dispatch import call_for_model
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower.backend import lower
from nxpipe.emulator.lower.parameters import sliced_parameters
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import RankSlice
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.passes.shard import NO_PADDING, Padding, Sharding, apply, padding, plan
from nxpipe.emulator.run.inputs import NOT_DIVIDED, require_inputs


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled model: the graph of one rank, and the unsharded graph that all ranks together compute.

    Weights and states without an entry are replicated on every rank.
    """

    whole: Graph
    graph: Graph
    degree: int
    parameters: Mapping[str, Sharding]
    states: Mapping[str, Sharding]
    padding: Padding = NO_PADDING

    def require_inputs(self, given: Mapping[str, Array]) -> None:
        """Raise for inputs that the program would misread. A stored program has only the sharded graph and its
        shardings."""
        require_inputs(self.whole, given, self.states if self.whole is self.graph else NOT_DIVIDED)


def compile_program(request: CaptureRequest, options: PassOptions) -> CompiledGraph:
    """Run all passes and shard the result by the options; a published tensor-parallel plan of the model takes
    precedence."""
    whole = compile_graph(request, replace(options, tensor_parallel=1))
    if options.tensor_parallel > 1 and not options.published_plan:
        from nxpipe.emulator.capture.model import published_plan

        options = replace(options, published_plan=published_plan(request))
    return shard_graph(whole, options)


def shard_graph(whole: Graph, options: PassOptions) -> CompiledGraph:
    """The compiled graph, sharded for the options' tensor-parallel degree."""
    if options.tensor_parallel == 1:
        return CompiledGraph(whole, whole, 1, {}, {})
    layers = unroll(whole)
    shards = plan(layers, options.tensor_parallel, dict(options.published_plan))
    graph = run_passes(apply(layers, shards), options, (roll,))
    return CompiledGraph(whole, graph, shards.degree, shards.parameters, shards.states, padding(layers, shards))


def compile_graph(request: CaptureRequest, options: PassOptions) -> Graph:
    """The graph after all passes. Where layers provably repeat, the time does not grow with the model's depth."""
    return call_for_model(Graph, "compile_graph", request, options)


def compile_graph_in_process(request: CaptureRequest, options: PassOptions) -> Graph:
    """`compile_graph` in this process, without confinement."""
    from nxpipe.emulator.capture.repeated_layers import compile_by_depth

    def finish(graph: Graph) -> Graph:
        return run_passes(graph, options)

    return compile_by_depth(request, finish) or finish(capture(request))


def emit(
    program: CompiledGraph, core: str, sizes: Mapping[str, tuple[str, ...]] | None = None, hbm_bytes: int | None = None
) -> Executable:
    """Lower a program. `sizes` names the axes of inputs and outputs along which a request may be shorter than the
    program; such an axis must give the same result when the request is padded with zeros. `hbm_bytes` is the HBM of
    each core; OutOfMemory if the program needs more."""
    lowered = lower(program.graph, core, program.degree)
    if hbm_bytes is not None:
        require_capacity(lowered, hbm_bytes)
    # A weight that is combined only with a rank's rows is sliced like those rows, although the plan replicates it.
    sliced = {name: _sharding_of(op) for name, op in sliced_parameters(program.graph).items()}
    pieces = {**sliced, **program.parameters, **program.states}
    divisions = {
        number: pieces[buffer.names[0]] for number, buffer in enumerate(lowered.buffers) if buffer.names[0] in pieces
    }
    return Executable(lowered, ports_of(program, sizes), divisions)


def _sharding_of(op: RankSlice) -> Sharding:
    return Sharding(op.axis, *(field * op.outer for field in (op.sizes, op.parts, op.slots, op.lengths)))


def ports_of(program: CompiledGraph, sizes: Mapping[str, tuple[str, ...]] | None = None) -> tuple[Port, ...]:
    """The interface of a compiled program: unsharded tensors in the caller's types. `sizes` as in `emit`."""
    graph, axes = program.whole, sizes or {}
    state_names = states(graph)
    ports = [
        *((Role.STATE if name in state_names else Role.INPUT, name, value) for name, value in graph.inputs.items()),
        *((Role.OUTPUT, name, value) for name, value in graph.outputs.items() if name not in state_names),
    ]
    return tuple(Port(name, role, value.type, axes.get(name, ())) for role, name, value in ports)
