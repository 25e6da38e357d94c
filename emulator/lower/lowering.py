"""From a graph to a program: where each tensor lies, and the instructions of each node.

Nodes are lowered in their order, layers that repeat inside one loop. Every operator's instructions are written by a
function of its own, found by its class in `LOWERINGS`; views cost nothing where strides can say them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from emulator.errors import CompileError
from emulator.graph import Graph, Node, Repeat, Value
from emulator.hardware import CORES
from emulator.isa.affine import Affine, turning
from emulator.isa.program import RANK, Program, Role
from emulator.lower.buffers import Buffers, narrowed, on_device
from emulator.lower.corners import copy_turned, turned_axis
from emulator.lower.ending import Chain, Ending, Following, chained
from emulator.lower.kernel import Kernel
from emulator.lower.lifetimes import Lifetimes
from emulator.lower.parameters import Stored, stored_parameters
from emulator.lower.view import View, packed
from emulator.numerics import Array
from emulator.ops import Transpose
from emulator.ops.base import Operator
from emulator.sync import synchronised
from emulator.types import DType

Kind = TypeVar("Kind", bound=Operator)
Writes: TypeAlias = Callable[["Lowering", Node, Kind], None]
LOWERINGS: dict[type[Operator], Writes[Any]] = {}


def lowers(*kinds: type[Operator]) -> Callable[[Writes[Kind]], Writes[Kind]]:
    """Marks the function that writes the instructions of an operator, or of several."""

    def register(function: Writes[Kind]) -> Writes[Kind]:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


class NotLowered(CompileError):
    """An operator, or a form of it, for which no instructions are known."""


def lower(graph: Graph, core: str, ranks: int = 1) -> Program:
    """The program of a graph for one core of this generation."""
    return Lowering(graph, core, ranks).program()


@dataclass(frozen=True)
class _Series:
    """What a value stands for in each turn of a repeat: tensors one behind the other in a buffer."""

    first: View
    count: int

    def at(self, turn: Affine) -> View:
        return View(
            self.first.buffer,
            self.first.dtype,
            self.first.offset + turn * self.first.elements,
            self.first.shape,
            self.first.strides,
        )


class Lowering:
    """The state of the walk. `k` writes instructions; `view` says where a value lies, `home` where it is to be put."""

    def __init__(self, graph: Graph, core: str, ranks: int) -> None:
        self.graph = graph
        self.k = Kernel(CORES[core])
        self.core = core
        self.ranks = ranks
        self.buffers = Buffers()
        self.constants: dict[str, bytes] = {}
        self._rank: View | None = None
        self._tables: dict[tuple[str, DType, tuple[int, ...]], View] = {}
        self._views: dict[Value, View] = {}
        self._lying: dict[Value, View] = {}  # parameters in their own order of axes
        self._homes: dict[Value, View] = {}
        self._outputs: dict[str, View] = {}
        self._notes: dict[str, int] = {"": 0}
        self._states = {name: value for name, value in graph.inputs.items() if name in graph.outputs}
        self._stored: Mapping[Value, Stored] = stored_parameters(graph)
        self._done: set[Value] = set()  # results of nodes that an earlier one has taken in
        self._readers, self._kept = _readers(graph)
        self._segments = _segments(graph)
        self._lifetimes = Lifetimes(graph)

    def program(self) -> Program:
        self._place_inputs()
        self._place_outputs()
        position = 0
        for repeat in self.graph.repeats:
            self._nodes(self.graph.nodes[position : repeat.start])
            self._repeat(repeat)
            position = repeat.stop
        self._nodes(self.graph.nodes[position:])
        self._finish_outputs()
        body = self.k.body
        return synchronised(
            Program(self.core, self.ranks, self.buffers.placed(body), body, tuple(self._notes), dict(self.constants))
        )

    # For the operators' functions

    def view(self, value: Value) -> View:
        return self._views[value]

    def home(self, value: Value) -> View:
        """Where the result of a node is to be written, row by row."""
        if value not in self._homes:
            self._homes[value] = self.scratch(value.type.dtype, value.type.shape)
        self._views[value] = self._homes[value]
        return self._homes[value]

    def constant(self, data: Array, dtype: DType) -> View:
        """A table that lies in HBM from the start, once however often it is asked for."""
        raw = narrowed(data, dtype).astype(on_device(dtype).stored).tobytes()
        key = (hashlib.sha256(raw).hexdigest(), dtype, data.shape)
        self.constants[key[0]] = raw
        if key not in self._tables:
            self._tables[key] = self.buffers.add(Role.CONSTANT, [key[0]], dtype, data.shape)
        return self._tables[key]

    def turned_home(self, value: Value) -> View:
        """As `home`, of a result that may be written in any order: if all that becomes of it is a transposition, it is
        written where that would be."""
        reading = self._readers.get(value, [])
        turn = reading[0] if len(reading) == 1 and value not in self._kept and value not in self._homes else None
        if turn is None or not isinstance(turn.op, Transpose) or self._segments[turn.result] != self._segments[value]:
            return self.home(value)
        self._done.add(turn.result)
        back = tuple(turn.op.order.index(axis) for axis in range(value.type.rank))
        self._views[value] = self.home(turn.result).transposed(back)
        return self._views[value]

    def rank(self) -> View:
        """Where each rank finds its own number; the host puts it there."""
        if self._rank is None:
            self._rank = self.buffers.add(Role.INPUT, [RANK], DType.UINT32, (1,))
        return self._rank

    def scratch(self, dtype: Any, shape: tuple[int, ...], count: int = 1) -> View:
        return self.buffers.add(Role.SCRATCH, [f"scratch.{number}" for number in range(count)], dtype, shape)

    def alias(self, value: Value, view: View) -> None:
        """The value lies where `view` says, unless it has to be somewhere else."""
        home = self._homes.get(value)
        if home is None:
            self._views[value] = view
        else:
            self.copy(home, view)
            self._views[value] = home

    def ending(self, result: Value, width: int) -> Ending:
        """What follows a node whose result is made piece by piece, as a matrix of rows so wide: the elementwise nodes
        behind it are taken in, and are done with it."""
        rows = result.type.elements // width if width else 0
        found = self._following(result, (rows, width))
        found.follow(result)
        return Ending(self.k, result, self._chained(found))

    def chain(self, node: Node) -> Chain:
        """An elementwise node, and those behind it."""
        found = self._following(node.result, node.result.type.shape)
        if not found.start(node):
            raise NotLowered(f"there are no instructions for {node.op.label} at {node.origin or 'an unknown place'}")
        found.follow(node.result)
        return self._chained(found)

    def _following(self, value: Value, shape: tuple[int, ...]) -> Following:
        segment = self._segments[value]

        def ready(value: Value) -> list[Node]:
            return [node for node in self._readers.get(value, ()) if self._segments[node.result] == segment]

        return Following(shape, ready, self._views.get, self.number)

    def _chained(self, found: Following) -> Chain:
        done, stored = found.finished(self._is_needed)
        self._done.update(done)
        found.sources = [self._in_runs(view) for view in found.sources]
        return chained(found, [(value, self.home(value)) for value in stored])

    def _in_runs(self, view: View) -> View:
        """A view whose pieces do not come one element at a time, if turning it all at once prevents that."""
        (flat,) = view.merged()
        turned = turned_axis(replace(flat, offset=Affine(), strides=packed(flat.shape)), flat)
        return view if turned is None else self.packed(view)

    def _is_needed(self, value: Value, done: set[Value]) -> bool:
        """Whether others than the makers of these results want to find a value in HBM."""
        reading = self._readers.get(value)
        return value in self._kept or not reading or any(node.result not in done for node in reading)

    def updated(self, node: Node) -> View:
        """Where the result of a node that changes a part of its first operand is to be: there is a copy of the operand,
        or, where nobody reads that any more, the operand itself."""
        old = node.operands[0]
        source = self._views[old]
        own = old in self._states.values() or self._homes.get(old) == source
        if node.result not in self._homes and own and self._lifetimes.is_last(old, node):
            self._homes[node.result] = source
        home = self.home(node.result)
        if home != source:
            self.copy(home, source)
        return home

    def number(self, value: Value) -> float | None:
        """Of a constant with one element, as it would lie on the device."""
        table = self.graph.constants.get(value)
        return None if table is None or table.size != 1 else narrowed(table, value.type.dtype).item()

    def packed(self, view: View) -> View:
        """The same elements, row by row."""
        return view if view.is_contiguous else self.copied(view)

    def copied(self, view: View) -> View:
        """In room of its own, row by row."""
        made = self.scratch(view.dtype, view.shape)
        self.copy(made, view)
        return made

    def copy(self, dst: View, src: View) -> None:
        """From HBM to HBM, element by element; the types may differ."""
        if not dst.elements:
            return
        to, source = dst.merged([src])
        axis = turned_axis(to, source)
        if axis is not None:
            copy_turned(self.k, to, source, axis)
            return
        outer = max(to.rank - 4, 0)
        self._copy_inside(to, source, outer)

    def _copy_inside(self, dst: View, src: View, outer: int) -> None:
        if not outer:
            self.k.copy(dst.far(), src.far())
            return
        with self.k.loop(dst.shape[0]) as turn:
            self._copy_inside(dst.pick(0, turn), src.pick(0, turn), outer - 1)

    # The walk

    def _nodes(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.result in self._stored or node.result in self._done:
                continue  # the host has done that once and for all, or an earlier node with its own work
            note = str(node.origin)
            self.k.note = self._notes.setdefault(note, len(self._notes))
            function = LOWERINGS.get(type(node.op))
            if function is None:
                raise NotLowered(
                    f"there are no instructions for {node.op.label} at {node.origin or 'an unknown place'}"
                )
            with self.k.room():
                function(self, node, node.op)

    def _repeat(self, repeat: Repeat) -> None:
        before = dict(self._views)
        carried = {entry: self._two_halves(entry) for entry in repeat.carried}
        taken = {first: self._series(first, later) for first, later in repeat.taken.items()}
        given = {value: self._given(value, row) for value, row in repeat.given.items()}
        with self.k.loop(repeat.count) as turn:
            for first, series in taken.items():
                self._take(first, series.at(turn))
            for entry, halves in carried.items():
                self._views[entry] = _half(halves, turn)
                self._homes[repeat.carried[entry]] = _half(halves, turn + 1)
            for value, series in given.items():
                if value not in self._homes and value not in self._stored:
                    self._homes[value] = series.at(turn)
            self._nodes(self.graph.nodes[repeat.start : repeat.stop])
            for value, series in given.items():
                if self._homes.get(value) != series.at(turn):
                    self.copy(series.at(turn), self._views[value])
        self._views |= before
        self._after(repeat, carried, given)

    def _after(self, repeat: Repeat, carried: Mapping[Value, View], given: Mapping[Value, _Series]) -> None:
        """Seen from behind the loop, a value of the inside is what the last turn made of it."""
        for value, row in repeat.given.items():
            for number, each in enumerate(row):
                self._views[each] = given[value].at(Affine(number))
            self._views[value] = given[value].at(Affine(repeat.count - 1))
        for entry, halves in carried.items():
            self._views[repeat.carried[entry]] = _half(halves, Affine(repeat.count))

    def _two_halves(self, entry: Value) -> View:
        """What a turn hands to the next: it reads one half and writes the other."""
        source = self._views[entry]
        halves = self.scratch(entry.type.dtype, entry.type.shape, count=2)
        self.copy(halves, source)
        return halves

    def _series(self, first: Value, later: Sequence[Value]) -> _Series:
        return _Series(self._lying.get(first, self._views[first]), 1 + len(later))

    def _take(self, first: Value, view: View) -> None:
        """In this turn, the value and all that the host has made of it lie there."""
        stored = [(value, made) for value, made in self._stored.items() if made.parameter == first]
        self._views |= {value: made.seen(view) for value, made in stored} or {first: view}

    def _given(self, value: Value, row: Sequence[Value]) -> _Series:
        """A series of its own, unless the values are outputs that have one already."""
        homes = [self._homes.get(each) for each in row]
        first = homes[0]
        if first is not None and homes == [_Series(first, len(row)).at(Affine(number)) for number in range(len(row))]:
            return _Series(first, len(row))
        return _Series(self.scratch(value.type.dtype, value.type.shape, count=len(row)), len(row))

    # The two ends

    def _place_inputs(self) -> None:
        for first, values, names in self._rows(self.graph.inputs):
            roles = {Role.STATE if name in self._states else Role.INPUT for name in names}
            role = roles.pop() if len(roles) == 1 else Role.INPUT
            view = self.buffers.add(role, names, first.type.dtype, first.type.shape)
            self._views |= _spread(view, values)
        for first, values, names in self._rows(self.graph.parameters):
            stored = self._stored[first]
            view = self.buffers.add(Role.PARAMETER, names, stored.dtype, stored.shape, stored.order)
            self._lying |= _spread(view, values)
        for value, stored in self._stored.items():
            self._views[value] = stored.seen(self._lying[stored.parameter])
        for value, data in self.graph.constants.items():
            self._views[value] = self.constant(data, value.type.dtype)

    def _rows(self, named: Mapping[str, Value]) -> list[tuple[Value, list[Value], list[str]]]:
        """Tensors that belong into one buffer: those of a repeat's turns, or one alone."""
        name_of = {value: name for name, value in named.items()}
        rows: dict[Value, list[Value]] = {}
        for repeat in self.graph.repeats:
            for first, later in repeat.taken.items():
                if first in name_of:
                    rows.setdefault(first, [first, *later])
        inside = {value for row in rows.values() for value in row}
        for value in name_of:
            if value not in inside:
                rows[value] = [value]
        return [(first, row, [name_of[value] for value in row]) for first, row in rows.items()]

    def _place_outputs(self) -> None:
        """States are written where they were read. Outputs of the turns of a repeat are one buffer."""
        name_of = {value: name for name, value in self.graph.outputs.items()}
        for repeat in self.graph.repeats:
            for row in repeat.given.values():
                names = [name_of.get(value, "") for value in row]
                if all(names) and not any(name in self._states for name in names):
                    view = self.buffers.add(Role.OUTPUT, names, row[0].type.dtype, row[0].type.shape)
                    for number, value in enumerate(row):
                        self._homes[value] = self._outputs[names[number]] = _Series(view, len(row)).at(Affine(number))
        for name, value in self.graph.outputs.items():
            if name in self._states:
                if self._lifetimes.ends_in_place(value, self._states[name]):
                    self._homes.setdefault(value, self._views[self._states[name]])
            elif value not in self._homes and value not in self._views:
                self._homes[value] = self._outputs[name] = self._output(name, value)

    def _output(self, name: str, value: Value) -> View:
        return self.buffers.add(Role.OUTPUT, [name], value.type.dtype, value.type.shape)

    def _finish_outputs(self) -> None:
        """What is an output by another name as well, or is no node's result, is copied; so is what a loop hands on."""
        for name, value in self.graph.outputs.items():
            if name in self._states:
                home = self._views[self._states[name]]
            else:
                home = self._outputs.get(name) or self._output(name, value)
            if self._views[value] != home:
                self.copy(home, self._views[value])


def _spread(view: View, values: Sequence[Value]) -> dict[Value, View]:
    series = _Series(view, len(values))
    return {value: series.at(Affine(number)) for number, value in enumerate(values)}


def _readers(graph: Graph) -> tuple[dict[Value, list[Node]], set[Value]]:
    """Who reads each value; and the values that are needed beyond the nodes that read them."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    kept = set(graph.outputs.values())
    for repeat in graph.repeats:
        kept.update(repeat.carried, repeat.carried.values(), repeat.given)
        inside = {node.result for node in graph.nodes[repeat.start : repeat.stop]}
        after = graph.nodes[repeat.stop :]
        kept.update(operand for node in after for operand in node.operands if operand in inside)
        # Nothing from before a loop ends inside of it: there it would be done anew in each turn.
        body = graph.nodes[repeat.start : repeat.stop]
        kept.update(operand for node in body for operand in node.operands if operand not in inside)
    return readers, kept


def _segments(graph: Graph) -> dict[Value, int]:
    """For each node's result which stretch of the program it is made in: before, in, between or behind repeats."""
    ends = [end for repeat in graph.repeats for end in (repeat.start, repeat.stop)]
    return {node.result: sum(end <= position for end in ends) for position, node in enumerate(graph.nodes)}


def _half(halves: View, turn: Affine) -> View:
    offset = halves.offset + turning(turn, 2, halves.elements)
    return View(halves.buffer, halves.dtype, offset, halves.shape, halves.strides)
