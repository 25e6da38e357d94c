"""Kernel emission: from a placed graph to instructions, kernel by kernel; repeated layers become one loop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

    The three are one step because each kernel's grouping depends on the placement after the kernels before it: a node
    is fused only if its other operands are already in HBM, in strides that the kernel's tiles can follow, and if SBUF
    has space. The result's `kernels` record the decisions.

    `reserved`: bytes per SBUF partition that a node's kernel must leave free, by the node's result.
    """
    return _Emission(placed, reserved).emitted()


class _Emission:
    """One emission of a placed graph, with the lowering context that its kernels share."""

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
            emitters=low.k.emitters,
            allocations=low.k.allocations,
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
            with self._low.k.scope(), self._low.k.attribute_to(node.result, reserved), _attributed(node):
                function(self._low, node, node.op)
            self._kernels.append(groups.close_record(node))

    def _repeat(self, repeat: Repeat) -> None:
        low, places = self._low, self._places
        outer_views, outer_weights = dict(places.views), dict(places.weights)
        carried = {entry: self._two_halves(entry) for entry in repeat.carried}
        output_series = {value: places.output_series(value, row) for value, row in repeat.given.items()}
        with low.k.loop(repeat.count) as index:
            for placeholder in repeat.taken:
                places.bind_iteration(placeholder, index)
            for entry, halves in carried.items():
                places.views[entry] = half_at(halves, index)
                places.homes[repeat.carried[entry]] = half_at(halves, index + 1)
            for value, series in output_series.items():
                if value not in places.homes and value not in places.stored:
                    places.homes[value] = series.at(index)
            self._nodes(self._graph.nodes[repeat.start : repeat.stop])
            for value, series in output_series.items():
                if places.homes.get(value) != series.at(index):
                    low.copy(series.at(index), places.views[value])
        # After the loop, a value of the body is that of the last iteration, also where its view moves with the index.
        ((depth, _),) = index.terms
        for value in places.views.keys() - outer_views.keys():
            view = places.views[value]
            places.views[value] = replace(view, offset=view.offset.bound(depth, repeat.count - 1))
        places.views |= outer_views
        places.weights |= outer_weights
        self._bind_loop_results(repeat, carried, output_series)

    def _bind_loop_results(
        self, repeat: Repeat, carried: Mapping[Value, View], output_series: Mapping[Value, BufferSeries]
    ) -> None:
        """Bind the values that leave a loop: series element by element, any other value to that of the last
        iteration."""
        views = self._places.views
        for value, row in repeat.given.items():
            for iteration, element in enumerate(row):
                views[element] = output_series[value].at(Affine(iteration))
            views[value] = output_series[value].at(Affine(repeat.count - 1))
        for entry, halves in carried.items():
            views[repeat.carried[entry]] = half_at(halves, Affine(repeat.count))

    def _two_halves(self, entry: Value) -> View:
        """A double buffer in scratch for a loop-carried value: an iteration reads one half and writes the other, so
        that nothing is copied between iterations."""
        source = self._places.views[entry]
        # In the order of the source's axes, which its readers may rely on.
        order = sorted(range(source.rank), key=lambda axis: (-source.strides[axis], axis))
        shape = tuple(entry.type.shape[axis] for axis in order)
        halves = self._places.scratch(entry.type.dtype, shape, count=2)
        halves = halves.transposed(tuple(order.index(axis) for axis in range(source.rank)))
        self._low.stored_like(halves, source)
        self._low.copy(halves, source)
        return halves

    def _finish_outputs(self) -> None:
        """Copy outputs that are not yet in their buffers: values with two output names, values that no node computes,
        and loop-carried values."""
        for name, value in self._graph.outputs.items():
            home = self._places.output(name)
            if self._places.views[value] != home:
                self._low.copy(home, self._places.views[value])


@contextmanager
def _attributed(node: Node) -> Iterator[None]:
    """Add the node, its tensors and the remedy to an OutOfMemory error of one of its tiles."""
    try:
        yield
    except OutOfMemory as error:
        subject = f"{node.op.label} at {str(node.origin) or 'an unknown place'}, for {error.subject},"
        labelled_values = [(f"its operand {number}", value) for number, value in enumerate(node.operands)]
        labelled_values.append(("its result", node.result))
        tensors = [TensorAllocation(label, str(value.type), value.type.nbytes) for label, value in labelled_values]
        largest = sorted(tensors, key=lambda tensor: -tensor.nbytes)
        remedy = "use a smaller bucket, or divide the model among more cores (--tp)"
        raise OutOfMemory(subject, error.memory, error.need, error.capacity, largest, remedy) from error
