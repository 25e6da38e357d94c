"""Where each value of a graph lies: inputs, parameters, constants and outputs from the start, all others as they are
made."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, rotating_offset
from nxpipe.emulator.isa.program import RANK, Role
from nxpipe.emulator.lower.buffers import Buffers, narrowed, on_device
from nxpipe.emulator.lower.lifetimes import Lifetimes
from nxpipe.emulator.lower.parameters import Stored, stored_parameters
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.numerics import Array


@dataclass(frozen=True)
class Series:
    """What a value stands for in each turn of a repeat: tensors one behind the other in a buffer."""

    first: View
    count: int

    def at(self, turn: Affine) -> View:
        return replace(self.first, offset=self.first.offset + turn * self.first.elements)


def half(halves: View, turn: Affine) -> View:
    """Of what a turn hands to the next: it reads one and writes the other."""
    return replace(halves, offset=halves.offset + rotating_offset(turn, 2, halves.elements))


class Places:
    """`views` says where values lie, `homes` where some have to be put."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes) -> None:
        self._graph = graph
        self._lifetimes = lifetimes
        self.buffers = Buffers()
        self.constants: dict[str, bytes] = {}
        self.views: dict[Value, View] = {}
        self.homes: dict[Value, View] = {}
        self.states = {name: value for name, value in graph.inputs.items() if name in graph.outputs}
        self.stored: Mapping[Value, Stored] = stored_parameters(graph)
        self._lying: dict[Value, View] = {}  # parameters in their own order of axes
        self._outputs: dict[str, View] = {}
        self._tables: dict[tuple[str, DType, tuple[int, ...]], View] = {}
        self._rank: View | None = None

    def scratch(self, dtype: Any, shape: tuple[int, ...], count: int = 1) -> View:
        return self.buffers.add(Role.SCRATCH, [f"scratch.{number}" for number in range(count)], dtype, shape)

    def constant(self, data: Array, dtype: DType) -> View:
        """A table that lies in HBM from the start, once however often it is asked for."""
        raw = narrowed(data, dtype).astype(on_device(dtype).stored).tobytes()
        key = (hashlib.sha256(raw).hexdigest(), dtype, data.shape)
        self.constants[key[0]] = raw
        if key not in self._tables:
            self._tables[key] = self.buffers.add(Role.CONSTANT, [key[0]], dtype, data.shape)
        return self._tables[key]

    def rank(self) -> View:
        """Where each rank finds its own number; the host puts it there."""
        if self._rank is None:
            self._rank = self.buffers.add(Role.INPUT, [RANK], DType.UINT32, (1,))
        return self._rank

    def number(self, value: Value) -> float | None:
        """Of a constant with one element, as it would lie on the device."""
        table = self._graph.constants.get(value)
        return None if table is None or table.size != 1 else narrowed(table, value.type.dtype).item()

    # The two ends

    def place_inputs(self) -> None:
        for first, values, names in self._rows(self._graph.inputs):
            roles = {Role.STATE if name in self.states else Role.INPUT for name in names}
            role = roles.pop() if len(roles) == 1 else Role.INPUT
            view = self.buffers.add(role, names, first.type.dtype, first.type.shape)
            self.views |= _spread(view, values)
        for first, values, names in self._rows(self._graph.parameters):
            stored = self.stored[first]
            view = self.buffers.add(Role.PARAMETER, names, stored.dtype, stored.shape, stored.order)
            self._lying |= _spread(view, values)
        for value, stored in self.stored.items():
            self.views[value] = stored.seen(self._lying[stored.parameter])
        for value, data in self._graph.constants.items():
            self.views[value] = self.constant(data, value.type.dtype)

    def _rows(self, named: Mapping[str, Value]) -> list[tuple[Value, list[Value], list[str]]]:
        """Tensors that belong into one buffer: those of a repeat's turns, or one alone."""
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
        """States are written where they were read. Outputs of the turns of a repeat are one buffer."""
        name_of = {value: name for name, value in self._graph.outputs.items()}
        for repeat in self._graph.repeats:
            for row in repeat.given.values():
                names = [name_of.get(value, "") for value in row]
                if all(names) and not any(name in self.states for name in names):
                    view = self.buffers.add(Role.OUTPUT, names, row[0].type.dtype, row[0].type.shape)
                    for number, value in enumerate(row):
                        self.homes[value] = self._outputs[names[number]] = Series(view, len(row)).at(Affine(number))
        for name, value in self._graph.outputs.items():
            if name in self.states:
                if self._lifetimes.ends_in_place(value, self.states[name]):
                    self.homes.setdefault(value, self.views[self.states[name]])
            elif value not in self.homes and value not in self.views:
                self.homes[value] = self.output(name)

    def output(self, name: str) -> View:
        """Where an output is found in the end."""
        if name in self.states:
            return self.views[self.states[name]]
        if name not in self._outputs:
            made = self._graph.outputs[name].type
            self._outputs[name] = self.buffers.add(Role.OUTPUT, [name], made.dtype, made.shape)
        return self._outputs[name]

    # Repeats

    def taken(self, first: Value, later: Sequence[Value]) -> Series:
        return Series(self._lying.get(first, self.views[first]), 1 + len(later))

    def take(self, first: Value, view: View) -> None:
        """In this turn, the value and all that the host has made of it lie there."""
        stored = [(value, made) for value, made in self.stored.items() if made.parameter == first]
        self.views |= {value: made.seen(view) for value, made in stored} or {first: view}

    def given(self, value: Value, row: Sequence[Value]) -> Series:
        """A series of its own, unless the values are outputs that have one already."""
        homes = [self.homes.get(each) for each in row]
        first = homes[0]
        if first is not None and homes == [Series(first, len(row)).at(Affine(number)) for number in range(len(row))]:
            return Series(first, len(row))
        return Series(self.scratch(value.type.dtype, value.type.shape, count=len(row)), len(row))


def _spread(view: View, values: Sequence[Value]) -> dict[Value, View]:
    series = Series(view, len(values))
    return {value: series.at(Affine(number)) for number, value in enumerate(values)}
