"""Records of the back end: the frozen inputs and outputs of its steps, printed by `nxpipe explain --after STEP`.

The steps are listed in `lower/backend.py`. The last three steps return an `isa.program.Program`, which is a record too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Step
from nxpipe.emulator.isa.text import affine_text, labelled, lines
from nxpipe.emulator.lower.dataflow import Liveness
from nxpipe.emulator.lower.kernel import Allocation
from nxpipe.emulator.lower.parameters import StoredForms, StoredParameter
from nxpipe.emulator.lower.view import View

TableKey: TypeAlias = tuple[str, DType, tuple[int, ...]]  # digest of the bytes, type and shape


@dataclass(frozen=True)
class TargetGraph:
    """A graph with the NeuronCore generation and the number of ranks that it is lowered for."""

    graph: Graph
    core: str
    ranks: int

    def lines(self) -> Iterator[str]:
        yield f"core {self.core}, ranks {self.ranks}"
        yield from str(self.graph).split("\n")


@dataclass(frozen=True)
class PlacedGraph:
    """A graph whose interface has buffers in HBM.

    `views` are the locations of inputs, parameters, values that the host computes from parameters, and constants.
    `homes` are the locations to which values must be written: outputs, and states that are updated in place.
    """

    target: TargetGraph
    liveness: Liveness
    stored: Mapping[Value, StoredForms]
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, bytes]
    views: Mapping[Value, View]
    weights: Mapping[Value, View]  # of tiled forms
    homes: Mapping[Value, View]
    parameters: Mapping[StoredParameter, View]  # in their buffers' order of axes
    outputs: Mapping[str, View]
    tables: Mapping[TableKey, View]

    def lines(self) -> Iterator[str]:
        graph, labels = self.target.graph, labelled(self.buffers)
        yield from _table(self.target, self.buffers)
        for name, value in (*graph.inputs.items(), *graph.parameters.items()):
            yield f"{name} {value.type} is {_located(self.views[value], labels)}"
        for name, value in graph.outputs.items():
            view = self.homes.get(value)
            yield f"{name} {value.type} {f'is written to {_located(view, labels)}' if view else 'is copied at the end'}"


@dataclass(frozen=True)
class KernelGroup:
    """The nodes that one kernel computes: the node whose lowering wrote the kernel, and those fused with it.

    Fused nodes are epilogues (elementwise nodes applied while a result is in SBUF), matmuls that read the same rows,
    collectives, and transposes that the store performs. `deferred` are fused nodes that precede `node` in the graph.
    """

    node: Node
    fused: tuple[Node, ...]
    deferred: tuple[Node, ...]
    tilings: tuple[object, ...]  # in the order of emission

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.deferred, self.node, *self.fused)

    def lines(self) -> Iterator[str]:
        yield _shown(self.node)
        yield from (f"  deferred to here: {_shown(node)}" for node in self.deferred)
        yield from (f"  fused: {_shown(node)}" for node in self.fused)
        yield from (f"  tiling: {tiling}" for tiling in self.tilings)


@dataclass(frozen=True)
class EmittedProgram:
    """Instructions of all kernels in program order, without waits, and the kernels.

    `emitters` maps the identity of each step to the result of the node whose lowering emitted it. `reserved` are the
    bytes per SBUF partition that a node's kernel had to leave free. `allocations` are the kernels' tiles by number.
    """

    placed: PlacedGraph
    reserved: Mapping[object, int]
    buffers: tuple[Buffer, ...]
    body: tuple[Step, ...]
    notes: tuple[str, ...]
    constants: Mapping[str, bytes]
    kernels: tuple[KernelGroup, ...]
    emitters: Mapping[int, object]
    allocations: Mapping[int, Allocation]

    def lines(self) -> Iterator[str]:
        counts = Counter[object]()
        for emitter, instructions in _by_emitter(self.body, self.emitters):
            counts[emitter] += instructions
        for number, kernel in enumerate(self.kernels):
            first, *others = kernel.lines()
            count = counts[kernel.node.result]
            yield f"kernel {number}, {f'{count} instructions' if count else 'a view'}: {first}"
            yield from others
        yield ""
        yield from lines(unaddressed(self.placed.target, self.buffers, self.body, self.notes), tables=False)


@dataclass(frozen=True)
class ResidentBuffer:
    """A buffer promoted to SBUF, with its size and address in each partition, the first and last stage of its live
    range, and the number of its tiles."""

    buffer: Buffer
    nbytes: int
    address: int
    live_range: tuple[int, int]
    allocation: int = 0

    def overlaps(self, other: "ResidentBuffer") -> bool:
        """True if both occupy a byte during a stage."""
        (first, last), (other_first, other_last) = self.live_range, other.live_range
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
            and first <= other_last
            and other_first <= last
        )


@dataclass(frozen=True)
class ResidentProgram:
    """A program with some buffers promoted to SBUF.

    `kept` counts, for each node, the bytes per partition that resident buffers occupy while the node's kernel runs.
    `refused` has such a count for each buffer without space, in decreasing order of the traffic that it would save.
    """

    emitted: EmittedProgram
    buffers: tuple[Buffer, ...]
    body: tuple[Step, ...]
    residents: tuple[ResidentBuffer, ...]
    kept: Counter[object]
    refused: tuple[Counter[object], ...]

    def lines(self) -> Iterator[str]:
        for resident in self.residents:
            span = f"bytes {resident.address} to {resident.address + resident.nbytes} of each partition"
            yield f"resident {resident.buffer.role} {resident.buffer.dtype}{list(resident.buffer.shape)}: {span}"
        yield f"refused {len(self.refused)} buffers for lack of space in SBUF"
        yield ""
        emitted = self.emitted
        yield from lines(unaddressed(emitted.placed.target, self.buffers, self.body, emitted.notes), tables=False)


Record: TypeAlias = TargetGraph | PlacedGraph | EmittedProgram | ResidentProgram | Program


def text(record: Record) -> str:
    listed = lines(record, tables=False) if isinstance(record, Program) else record.lines()
    return "\n".join(listed) + "\n"


def unaddressed(
    target: TargetGraph, buffers: Sequence[Buffer], body: Sequence[Step], notes: Sequence[str] = ("",)
) -> Program:
    """A program whose buffers have no addresses yet, without constants."""
    return Program(target.core, target.ranks, tuple(buffers), tuple(body), tuple(notes))


def _table(target: TargetGraph, buffers: Sequence[Buffer]) -> Iterator[str]:
    return (line for line in lines(unaddressed(target, buffers, ()), tables=False) if line)


def _located(view: View, labels: Sequence[str]) -> str:
    return f"{labels[view.buffer]}[{affine_text(view.offset)}], strides {list(view.strides)}"


def _shown(node: Node) -> str:
    return f"{node.op.label} {node.result.type}{f' at {node.origin}' if str(node.origin) else ''}"


def _by_emitter(body: Sequence[Step], emitters: Mapping[int, object]) -> Iterator[tuple[object, int]]:
    """The emitter and the number of instructions of each step. A repeat's loop has no emitter; its steps have."""
    for step in body:
        if id(step) in emitters:
            yield emitters[id(step)], _instructions(step)
        elif isinstance(step, Loop):
            yield from _by_emitter(step.body, emitters)


def _instructions(step: Step) -> int:
    return sum(map(_instructions, step.body)) if isinstance(step, Loop) else 1
