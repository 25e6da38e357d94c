"""HBM layout of a program: the table of its buffers, the view of each graph value in them, and the buffers' addresses.

`place_interface` is the first step of the back end: inputs, parameters, constants and outputs get their buffers before
any instruction exists. Kernel emission then adds scratch and views to a `Placement` of its own, so that a placed graph
can be emitted several times. `allocate_hbm` assigns addresses last, when the live ranges of scratch buffers are known.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, rotating_offset
from nxpipe.emulator.isa.program import RANK, Buffer, Lifetime, Program, Role, Step, lifetimes
from nxpipe.emulator.lower.dataflow import Liveness
from nxpipe.emulator.lower.parameters import stored_parameters
from nxpipe.emulator.lower.records import PlacedGraph, ResidentProgram, TableKey, TargetGraph
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.numerics import Array

_ALIGNMENT: Final = 4096  # bytes: a DMA packet


def narrowed(table: Array, dtype: DType) -> Array:
    """A table in its type on the device. 64-bit integers are clipped to 32 bits, since models use their limits as "no
    limit"."""
    if dtype not in (DType.INT64, DType.UINT64):
        return table
    limits = np.iinfo(dtype.on_device.stored)
    return np.clip(table, limits.min, limits.max)


class BufferTable:
    """Buffers in the order of addition; a view refers to its buffer by index."""

    def __init__(self, table: Sequence[Buffer] = ()) -> None:
        self._table = list(table)

    def add(
        self,
        role: Role,
        names: Sequence[str],
        dtype: DType,
        shape: tuple[int, ...],
        order: tuple[int, ...] = (),
        tile: int = 0,
    ) -> View:
        """Add a buffer for consecutive tensors of one shape, one per name; returns the view of the first."""
        self._table.append(Buffer(role, tuple(names), dtype.on_device, shape, order, tile=tile))
        return whole(len(self._table) - 1, dtype.on_device, shape)

    def named(self, role: Role) -> list[Buffer]:
        return [buffer for buffer in self._table if buffer.role is role]

    @property
    def table(self) -> tuple[Buffer, ...]:
        return tuple(self._table)


def allocate_hbm(resident: ResidentProgram) -> Program:
    """Assign every buffer its address in HBM."""
    target = resident.emitted.placed.target
    buffers = allocate(resident.buffers, resident.body)
    emitted = resident.emitted
    return Program(target.core, target.ranks, buffers, resident.body, emitted.notes, dict(emitted.constants))


def allocate(table: Sequence[Buffer], body: Sequence[Step]) -> tuple[Buffer, ...]:
    """The table with HBM addresses. Interface buffers and constants keep theirs for the whole run.

    Scratch buffers with disjoint live ranges share addresses. Minimizing the highest address is NP-hard (dynamic
    storage allocation). First fit in order of decreasing size wastes little, since a few large activations dominate.
    Invariant: a buffer never overlaps, in addresses, an allocated buffer whose live range meets its own.
    """
    live_ranges = lifetimes(body)
    allocated: dict[int, Buffer] = {}
    end = 0
    for index, buffer in enumerate(table):
        if buffer.role is not Role.SCRATCH:
            allocated[index] = replace(buffer, address=end)
            end += _aligned(buffer.nbytes)
    scratch = [index for index, buffer in enumerate(table) if buffer.role is Role.SCRATCH]
    allocations: list[tuple[Lifetime, int, int]] = []
    for index in sorted(scratch, key=lambda index: (-table[index].nbytes, index)):
        size, live_range = _aligned(table[index].nbytes), live_ranges.get(index, Lifetime(0, 0))
        address = _first_fit(end, size, [(low, high) for other, low, high in allocations if other.overlaps(live_range)])
        allocations.append((live_range, address, address + size))
        allocated[index] = replace(table[index], address=address)
    return tuple(allocated[index] for index in range(len(table)))


def _first_fit(start: int, size: int, taken: Iterable[tuple[int, int]]) -> int:
    address = start
    for low, high in sorted(taken):
        if address + size <= low:
            break
        address = max(address, high)
    return address


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class BufferSeries:
    """Consecutive tensors in a buffer, one per iteration of a repeat, for one value of its body."""

    first: View
    count: int

    def at(self, index: Affine) -> View:
        return replace(self.first, offset=self.first.offset + index * self.first.elements)


def _at(first: View, index: Affine) -> View:
    """The tensor of an iteration, among consecutive ones in a buffer."""
    return BufferSeries(first, 1).at(index)


def half_at(halves: View, index: Affine) -> View:
    """The half of a loop-carried double buffer that an iteration reads; it writes the half of the next iteration."""
    return replace(halves, offset=halves.offset + rotating_offset(index, 2, halves.elements))


def place_interface(target: TargetGraph) -> PlacedGraph:
    """Give inputs, states, parameters, constants and outputs their buffers."""
    graph = target.graph
    empty = PlacedGraph(target, Liveness(graph), stored_parameters(graph), (), {}, {}, {}, {}, {}, {}, {})
    placement = Placement(empty)
    placement.place_inputs()
    placement.place_outputs()
    return placement.frozen()


class Placement:
    """Locations of values during emission: `views` are current locations, `weights` those of tiled forms, `homes` are
    required locations of results."""

    def __init__(self, placed: PlacedGraph) -> None:
        self._placed = placed
        self._graph = placed.target.graph
        self._liveness = placed.liveness
        self.buffers = BufferTable(placed.buffers)
        self.constants = dict(placed.constants)
        self.views = dict(placed.views)
        self.homes = dict(placed.homes)
        self.states = {name: value for name, value in self._graph.inputs.items() if name in self._graph.outputs}
        self.stored = placed.stored
        self.weights = dict(placed.weights)
        self._parameters = dict(placed.parameters)
        self._outputs = dict(placed.outputs)
        self._tables: dict[TableKey, View] = dict(placed.tables)
        self._rank: View | None = None

    def frozen(self) -> PlacedGraph:
        return replace(
            self._placed,
            buffers=self.buffers.table,
            constants=self.constants,
            views=self.views,
            weights=self.weights,
            homes=self.homes,
            parameters=self._parameters,
            outputs=self._outputs,
            tables=self._tables,
        )

    def scratch(self, dtype: Any, shape: tuple[int, ...], count: int = 1) -> View:
        return self.buffers.add(Role.SCRATCH, [f"scratch.{number}" for number in range(count)], dtype, shape)

    def constant(self, data: Array, dtype: DType) -> View:
        """A table that the host loads into HBM; equal tables share one buffer."""
        raw = narrowed(data, dtype).astype(dtype.on_device.stored).tobytes()
        key = (hashlib.sha256(raw).hexdigest(), dtype, data.shape)
        self.constants[key[0]] = raw
        if key not in self._tables:
            self._tables[key] = self.buffers.add(Role.CONSTANT, [key[0]], dtype, data.shape)
        return self._tables[key]

    def rank(self) -> View:
        """The input in which the host passes each rank its number."""
        if self._rank is None:
            self._rank = self.buffers.add(Role.INPUT, [RANK], DType.UINT32, (1,))
        return self._rank

    def number(self, value: Value) -> float | None:
        """The element of a one-element constant, in its type on the device; None for any other value."""
        table = self._graph.constants.get(value)
        return None if table is None or table.size != 1 else narrowed(table, value.type.dtype).item()

    # Interface

    def place_inputs(self) -> None:
        for first, values, names in self._groups(self._graph.inputs):
            roles = {Role.STATE if name in self.states else Role.INPUT for name in names}
            role = roles.pop() if len(roles) == 1 else Role.INPUT
            view = self.buffers.add(role, names, first.type.dtype, first.type.shape)
            self.views |= _series_views(view, values)
        for first, values, names in self._groups(self._graph.parameters):
            for form in dict.fromkeys(form for forms in self.stored.values() for form in forms.all):
                if form.parameter != first:
                    continue
                view = self.buffers.add(Role.PARAMETER, names, form.dtype, form.shape, form.order, form.tile)
                self._parameters[form] = view
                self.views |= {value: form.view_of(each) for value, each in _series_views(view, values).items()}
            self.bind_iteration(first, Affine())
        for value, data in self._graph.constants.items():
            self.views[value] = self.constant(data, value.type.dtype)

    def _groups(self, named: Mapping[str, Value]) -> list[tuple[Value, list[Value], list[str]]]:
        """Groups of tensors that share a buffer, with the first of each group and the names: the tensors of a repeat's
        iterations are one group, any other tensor is alone."""
        name_of = {value: name for name, value in named.items()}
        rows: dict[Value, list[Value]] = {}
        for repeat in self._graph.repeats:
            for first, later in repeat.taken.items():
                if first in name_of:
                    rows.setdefault(first, [first, *later])
        inside = {value for row in rows.values() for value in row}
        for value in name_of:
            if value not in inside:
                rows[value] = [value]
        return [(first, row, [name_of[value] for value in row]) for first, row in rows.items()]

    def place_outputs(self) -> None:
        """Give outputs their locations. A state is written in place if its old value has no later reader. The outputs
        of a repeat's iterations share one buffer."""
        name_of = {value: name for name, value in self._graph.outputs.items()}
        for repeat in self._graph.repeats:
            for elements in repeat.given.values():
                names = [name_of.get(value, "") for value in elements]
                if all(names) and not any(name in self.states for name in names):
                    view = self.buffers.add(Role.OUTPUT, names, elements[0].type.dtype, elements[0].type.shape)
                    for iteration, value in enumerate(elements):
                        self.homes[value] = self._outputs[names[iteration]] = BufferSeries(view, len(elements)).at(
                            Affine(iteration)
                        )
        for name, value in self._graph.outputs.items():
            if name in self.states:
                if self._liveness.ends_in_place(value, self.states[name]):
                    self.homes.setdefault(value, self.views[self.states[name]])
            elif value not in self.homes and value not in self.views:
                self.homes[value] = self.output(name)

    def output(self, name: str) -> View:
        """The location from which the host reads an output."""
        if name in self.states:
            return self.views[self.states[name]]
        if name not in self._outputs:
            type_ = self._graph.outputs[name].type
            self._outputs[name] = self.buffers.add(Role.OUTPUT, [name], type_.dtype, type_.shape)
        return self._outputs[name]

    # Repeats

    def bind_iteration(self, first: Value, index: Affine) -> None:
        """Set the view of an input, or the views of a parameter's stored forms, to the tensor of an iteration."""
        if first not in self.stored:
            self.views[first] = _at(self.views[first], index)
            return
        for value, forms in self.stored.items():
            for form in forms.all:
                if form.parameter == first:
                    view = form.view_of(_at(self._parameters[form], index))
                    if form.tile:
                        self.weights[value] = view
                    if form == forms.all[0]:
                        self.views[value] = view

    def output_series(self, value: Value, row: Sequence[Value]) -> BufferSeries:
        """The series that a repeat writes: the outputs' buffer if the values are consecutive outputs, else scratch."""
        homes = [self.homes.get(element) for element in row]
        first = homes[0]
        if first is not None and homes == [
            BufferSeries(first, len(row)).at(Affine(iteration)) for iteration in range(len(row))
        ]:
            return BufferSeries(first, len(row))
        return BufferSeries(self.scratch(value.type.dtype, value.type.shape, count=len(row)), len(row))


def _series_views(view: View, values: Sequence[Value]) -> dict[Value, View]:
    series = BufferSeries(view, len(values))
    return {value: series.at(Affine(iteration)) for iteration, value in enumerate(values)}
