"""Kernel emission: from a placed graph to instructions, kernel by kernel, layers that repeat inside one loop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from nxpipe.emulator.errors import OutOfMemory, TensorAllocation
from nxpipe.emulator.ir.nodes import Node, Repeat, Value
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.lower.hbm_buffers import BufferSeries, half_at
from nxpipe.emulator.lower.lowering import LOWERINGS, Lowering, NotLowered
from nxpipe.emulator.lower.records import EmittedProgram, KernelGroup, PlacedGraph
from nxpipe.emulator.lower.view import View

NOTHING: Final[Mapping[object, int]] = MappingProxyType({})


def emit_kernels(placed: PlacedGraph, reserved: Mapping[object, int] = NOTHING) -> EmittedProgram:
    """Group nodes into kernels, choose each kernel's tiling, and emit its instructions.

    The three are one step because each kernel's grouping reads the placement that the kernels before it have left: a
    node is fused only if its other operands are in HBM by then, in strides that the kernel's tiles can follow, and in
    free SBUF. The decisions are recorded in the result's `kernels`.

    `reserved`: bytes of each partition of SBUF that a node's kernel must leave free.
    """
    return _Emission(placed, reserved).emitted()


class _Emission:
    """One pass over a placed graph, with the lowering context that its kernels share."""

    def __init__(self, placed: PlacedGraph, reserved: Mapping[object, int]) -> None:
        self._placed = placed
        self._graph = placed.target.graph
        self._low = Lowering(placed)
        self._places = self._low.places
        self._reserved = reserved
        self._kernels: list[KernelGroup] = []

    def emitted(self) -> EmittedProgram:
        low, places = self._low, self._places
        position = 0
        for repeat in self._graph.repeats:
            self._nodes(self._graph.nodes[position : repeat.start])
            self._repeat(repeat)
            position = repeat.stop
        self._nodes(self._graph.nodes[position:])
        self._finish_outputs()
        return EmittedProgram(
            placed=self._placed,
            reserved=self._reserved,
            buffers=places.buffers.table,
            body=low.k.body,
            notes=tuple(low.notes),
            constants=places.constants,
            kernels=tuple(self._kernels),
            makers=low.k.makers,
        )

    def _nodes(self, nodes: Sequence[Node]) -> None:
        groups = self._low.groups
        for node in nodes:
            if not groups.is_due(node) or groups.defers(node):
                continue
            self._low.k.note = self._low.note(node)
            function = LOWERINGS.get(type(node.op))
            if function is None:
                raise NotLowered.at(node)
            reserved = self._reserved.get(node.result, 0)
            with self._low.k.scope(), self._low.k.made_for(node.result, reserved), _attributed(node):
                function(self._low, node, node.op)
            self._kernels.append(groups.recorded(node))

    def _repeat(self, repeat: Repeat) -> None:
        low, places = self._low, self._places
        before = dict(places.views)
        carried = {entry: self._two_halves(entry) for entry in repeat.carried}
        taken = {first: places.taken(first, later) for first, later in repeat.taken.items()}
        given = {value: places.given(value, row) for value, row in repeat.given.items()}
        with low.k.loop(repeat.count) as index:
            for first, series in taken.items():
                places.take(first, series.at(index))
            for entry, halves in carried.items():
                places.views[entry] = half_at(halves, index)
                places.homes[repeat.carried[entry]] = half_at(halves, index + 1)
            for value, series in given.items():
                if value not in places.homes and value not in places.stored:
                    places.homes[value] = series.at(index)
            self._nodes(self._graph.nodes[repeat.start : repeat.stop])
            for value, series in given.items():
                if places.homes.get(value) != series.at(index):
                    low.copy(series.at(index), places.views[value])
        places.views |= before
        self._after(repeat, carried, given)

    def _after(self, repeat: Repeat, carried: Mapping[Value, View], given: Mapping[Value, BufferSeries]) -> None:
        """After the loop, a value computed inside is that of the last iteration."""
        views = self._places.views
        for value, row in repeat.given.items():
            for number, each in enumerate(row):
                views[each] = given[value].at(Affine(number))
            views[value] = given[value].at(Affine(repeat.count - 1))
        for entry, halves in carried.items():
            views[repeat.carried[entry]] = half_at(halves, Affine(repeat.count))

    def _two_halves(self, entry: Value) -> View:
        """Two halves of scratch for a loop-carried value: an iteration reads one and writes the other, so that nothing
        is copied between iterations."""
        source = self._places.views[entry]
        halves = self._places.scratch(entry.type.dtype, entry.type.shape, count=2)
        self._low.copy(halves, source)
        return halves

    def _finish_outputs(self) -> None:
        """Copy outputs that are elsewhere: those with two names, those that no node computes, loop-carried values."""
        for name, value in self._graph.outputs.items():
            home = self._places.output(name)
            if self._places.views[value] != home:
                self._low.copy(home, self._places.views[value])


@contextmanager
def _attributed(node: Node) -> Iterator[None]:
    """Name the node, its tensors and the remedy where one of its tiles does not fit."""
    try:
        yield
    except OutOfMemory as fault:
        who = f"{node.op.label} at {str(node.origin) or 'an unknown place'}, for {fault.subject},"
        ends = [(f"its operand {number}", value) for number, value in enumerate(node.operands)]
        ends.append(("its result", node.result))
        tensors = [TensorAllocation(what, str(value.type), value.type.nbytes) for what, value in ends]
        largest = sorted(tensors, key=lambda taken: -taken.nbytes)
        remedy = "use a smaller bucket, or divide the model among more cores (--tp)"
        raise OutOfMemory(who, fault.memory, fault.need, fault.capacity, largest, remedy) from fault
