"""Emission of executables: a compiled program lowered for a NeuronCore generation, with the interface and the weight
slices that its host needs."""

from collections.abc import Mapping

from nxpipe.emulator.analysis.graph_memory import states
from nxpipe.emulator.analysis.program_memory import require_room
from nxpipe.emulator.compile import CompiledGraph
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.lower.parameters import sliced_parameters
from nxpipe.emulator.ops import RankSlice
from nxpipe.emulator.passes.shard import Sharding


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
