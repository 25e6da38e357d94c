"""The back end as a list of steps, and the checker that tests the invariants of each record after every step.

A failure is a defect of the compiler, not of the model; the error names the step that broke the invariant.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Step
from nxpipe.emulator.lower.copy_elimination import forward_copies
from nxpipe.emulator.lower.emission import emit_kernels
from nxpipe.emulator.lower.hbm_buffers import allocate_hbm, place_interface
from nxpipe.emulator.lower.records import (
    EmittedProgram,
    PlacedGraph,
    Record,
    ResidentBuffer,
    ResidentProgram,
    TargetGraph,
    text,
    unaddressed,
)
from nxpipe.emulator.lower.sbuf_accesses import tiles_of
from nxpipe.emulator.lower.sbuf_residency import promote_to_sbuf, reserve_sbuf
from nxpipe.emulator.lower.tile_placement import overlapping, schedule_kernels
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.schedule.waits import eliminate_redundant_waits, insert_waits


class LoweringInvalid(CompileError):
    """A back-end step returned a record that breaks an invariant."""

    def __init__(self, after: str, reason: object) -> None:
        super().__init__(f"after {after}, {reason}")
        self.after = after


def check(before: Record, record: Record, after: str) -> None:
    """Raise LoweringInvalid if the record, or its difference from the previous record, breaks an invariant."""
    if record is before:
        return
    for reason in _violations(before, record):
        raise LoweringInvalid(after, reason)


def _violations(before: Record, record: Record) -> Iterator[object]:
    match before, record:
        case _, PlacedGraph():
            yield from _placed(record)
        case _, EmittedProgram():
            yield from _covers_graph(record)
            yield from _unallocated(record)
            yield from _legal(record, record.buffers, record.body)
        case _, ResidentProgram():
            yield from _disjoint(record.residents)
            yield from overlapping(record)
            yield from _legal(record.emitted, record.buffers, record.body)
        case ResidentProgram(), Program():
            if record.body != before.body:
                yield "the instructions changed with the addresses"
            yield from faults(Program(record.core, record.ranks, record.buffers, ()))
        case Program(), Program():
            yield from _only_waits_changed(before, record)


def _placed(placed: PlacedGraph) -> Iterator[str]:
    """Every value that exists before the first instruction has a location, and every location is inside its buffer."""
    graph = placed.target.graph
    for value in (*graph.inputs.values(), *graph.parameters.values(), *graph.constants):
        if value not in placed.views:
            yield f"value {value.id} of type {value.type} has no location"
    for value, view in (*placed.views.items(), *placed.homes.items()):
        if value not in placed.stored and view.shape != value.type.shape:
            yield f"value {value.id} of type {value.type} is located in a view of shape {list(view.shape)}"
        if not _inside(view, placed.buffers):
            yield f"the location of value {value.id} is outside of its buffer"


def _inside(view: View, buffers: Sequence[Buffer]) -> bool:
    if not 0 <= view.buffer < len(buffers):
        return False
    buffer = buffers[view.buffer]
    last = view.offset.base + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    return not view.elements or 0 <= view.offset.base <= last < len(buffer.names) * buffer.elements


def _covers_graph(emitted: EmittedProgram) -> Iterator[str]:
    """Every node is computed once: by the host when parameters are loaded, or by one kernel."""
    results = [node.result for kernel in emitted.kernels for node in kernel.nodes]
    computed_once = set(results)
    if len(computed_once) < len(results):
        yield "a node is computed by two kernels"
    for node in emitted.placed.target.graph.nodes:
        if node.result not in computed_once and node.result not in emitted.placed.stored:
            yield f"no kernel computes {node.op.label} at {str(node.origin) or 'an unknown place'}"


def _unallocated(emitted: EmittedProgram) -> Iterator[str]:
    """Tiles outside of the kernels' allocations, which no later step could place."""
    for instruction in _instructions(emitted.body):
        for name, tile, _ in tiles_of(instruction):
            if tile.allocation not in emitted.allocations:
                yield f"{name} of {instruction.name} is in no allocation of its kernel"


def _legal(emitted: EmittedProgram, buffers: Sequence[Buffer], body: Sequence[Step]) -> Iterable[object]:
    """Violations of the instruction set's rules, for all iterations of all loops. Buffers have no addresses yet; their
    table is checked after the step that assigns them."""
    program = unaddressed(emitted.placed.target, buffers, body, emitted.notes)
    return [fault for fault in faults(program) if fault.number is not None]


def _disjoint(residents: Sequence[ResidentBuffer]) -> Iterator[str]:
    """No two buffers occupy the same bytes of SBUF while both are live."""
    ordered = sorted(residents, key=lambda resident: resident.address)
    for number, one in enumerate(ordered, start=1):
        for other in islice(ordered, number, None):
            if other.address >= one.address + one.nbytes:
                break
            if one.overlaps(other):
                yield f"{one} and {other} share bytes of SBUF while both are live"


def _only_waits_changed(before: Program, program: Program) -> Iterator[object]:
    """Instructions keep their order and operands. Once waits exist, a step may only remove some."""
    old, new = list(_instructions(before.body)), list(_instructions(program.body))
    if len(old) != len(new) or not all(map(_same_but_waits, old, new)):
        yield "instructions changed with the waits"
    elif not any(instruction.waits for instruction in old):
        yield from faults(program)
    elif not all(
        set(after_step.waits) <= set(before_step.waits) for before_step, after_step in zip(old, new, strict=True)
    ):
        yield "an instruction has a wait that it did not have before"


def _same_but_waits(before: Instruction, after: Instruction) -> bool:
    # Most operands are the same objects in both programs, so that identity decides nearly all comparisons quickly.
    fields, after_fields = vars(before), vars(after)
    same = (
        value is after_fields[name] or value == after_fields[name] for name, value in fields.items() if name != "waits"
    )
    return type(before) is type(after) and all(same)


def _instructions(body: Sequence[Step]) -> Iterator[Instruction]:
    for step in body:
        if isinstance(step, Loop):
            yield from _instructions(step.body)
        else:
            yield step


BackendStep = Callable[[Any], Record]

BACKEND: tuple[BackendStep, ...] = (
    place_interface,  # buffers in HBM for inputs, parameters, constants and outputs
    emit_kernels,  # nodes grouped into kernels, tilings selected by cost, instructions in program order
    promote_to_sbuf,  # buffers between kernels moved from HBM to SBUF where kernels leave space
    reserve_sbuf,  # the same with kernels emitted again in less SBUF, if that is faster
    forward_copies,  # copies inside SBUF removed: engines access promoted buffers in place
    schedule_kernels,  # loops pipelined, engines balanced; tiles in bytes unused for longest, so that loads run ahead
    allocate_hbm,  # addresses; scratch buffers with disjoint live ranges share them
    insert_waits,  # semaphore waits that keep the program order of dependent accesses
    eliminate_redundant_waits,  # waits that other waits imply are removed
)


def lower(graph: Graph, core: str, ranks: int = 1) -> Program:
    """Lower a graph to a program for one NeuronCore of a generation; all ranks of a sharded model run this program."""
    *_, (_, program) = run_backend(TargetGraph(graph, core, ranks))
    assert isinstance(program, Program)  # the last step's record
    return program


def run_backend(target: TargetGraph) -> Iterator[tuple[str, Record]]:
    """Run the steps; yields each step's name with its checked record."""
    record: Record = target
    for step in BACKEND:
        before, record = record, step(record)
        check(before, record, after=step.__name__)
        yield step.__name__, record


def record_text(graph: Graph, core: str, ranks: int, after: str) -> str:
    """The record after a step as text."""
    records = (record for name, record in run_backend(TargetGraph(graph, core, ranks)) if name == after)
    return text(next(records))
