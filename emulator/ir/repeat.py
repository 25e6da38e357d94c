"""Repeated layers: validity of repeats, unrolling, and resizing to another number of layers.

Names of parameters and inputs are numbered by layer: `layers.0.weight`, `layers.1.weight`, ... are a series, whose
scope is `layers.`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from nxpipe.emulator.errors import GraphInvalid
from nxpipe.emulator.ir.nodes import Node, Origin, Repeat, Value

if TYPE_CHECKING:
    from nxpipe.emulator.ir.graph import Graph

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Series:
    """Names that differ in one number, which increases by `step` from one name to the next."""

    prefix: str
    first: int
    step: int
    suffix: str

    def name(self, position: int) -> str:
        return f"{self.prefix}{self.first + position * self.step}{self.suffix}"

    def text(self, count: int) -> str:
        """The series of `count` names as one expression: `layers.{0..31}.weight`, or `layers.{0,2..30}.weight`."""
        second = f",{self.first + self.step}" if self.step > 1 and count > 2 else ""
        return f"{self.prefix}{{{self.first}{second}..{self.first + (count - 1) * self.step}}}{self.suffix}"


def series_of(names: Sequence[str]) -> Series | None:
    """The series of these names in this order; None if they are not a series."""
    parts = [_NUMBER.split(name) for name in names[:2]]
    if len(parts) < 2 or len(parts[0]) != len(parts[1]):
        return None
    differing = [position for position, (a, b) in enumerate(zip(*parts, strict=True)) if a != b]
    if len(differing) != 1 or not differing[0] % 2:
        return None
    (position,) = differing
    first, second = (int(part[position]) for part in parts)
    series = Series("".join(parts[0][:position]), first, second - first, "".join(parts[0][position + 1 :]))
    exact = series.step > 0 and all(series.name(index) == name for index, name in enumerate(names))
    return series if exact else None


@dataclass(frozen=True)
class Shift:
    """A renumbering: numbers from `start` on increase by `distance`."""

    distance: int
    start: int = 0


def renamed(name: str, shifts: Mapping[str, Shift]) -> str:
    """The name with the number after its scope shifted; unchanged if it has none of these scopes."""
    for scope, shift in shifts.items():
        number = _NUMBER.match(name, len(scope)) if name.startswith(scope) else None
        if number and int(number[0]) >= shift.start:
            return f"{scope}{int(number[0]) + shift.distance}{name[number.end() :]}"
    return name


# A limit on the work for hostile graphs; no real model reaches it.
_MOST_NODES = 1 << 20


def unroll(graph: "Graph") -> "Graph":
    """The same program with every iteration as separate nodes; a graph without repeats is returned unchanged."""
    return _Unroller(graph).run() if graph.repeats else graph


class _Unroller:
    """Unrolls in the order of execution; `_current` maps a value to its definition in the current iteration."""

    def __init__(self, graph: "Graph") -> None:
        self._graph = graph
        defined = list(_definitions(graph))
        self._current = dict(zip(defined, defined, strict=True))
        self._fresh_ids = count(max((value.id for value in defined), default=0) + 1)
        self._nodes: list[Node] = []

    def run(self) -> "Graph":
        position = 0
        for repeat in self._graph.repeats:
            self._copy(self._graph.nodes[position : repeat.start])
            self._repeat(repeat)
            position = repeat.stop
        self._copy(self._graph.nodes[position:])
        outputs = {name: self._current[value] for name, value in self._graph.outputs.items()}
        return replace(self._graph, nodes=tuple(self._nodes), outputs=outputs, repeats=())

    def _copy(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._nodes.append(replace(node, operands=tuple(self._current[operand] for operand in node.operands)))

    def _repeat(self, repeat: Repeat) -> None:
        before = {value: self._current[value] for value in (*repeat.carried, *repeat.taken)}
        steps = {series.prefix: series.step for series in taken_series(self._graph, repeat).values()}
        body = self._graph.nodes[repeat.start : repeat.stop]
        for iteration in range(repeat.count):
            if iteration:
                carried = {entry: self._current[leaving] for entry, leaving in repeat.carried.items()}
                self._current |= carried | {first: later[iteration - 1] for first, later in repeat.taken.items()}
            shifts = {scope: Shift(step * iteration) for scope, step in steps.items()}
            for node in body:
                self._iterate(node, iteration, shifts)
            self._current |= {results[iteration]: self._current[value] for value, results in repeat.given.items()}
        self._current |= before

    def _iterate(self, node: Node, iteration: int, shifts: Mapping[str, Shift]) -> None:
        """Copy a node; its origin is renumbered to the layer of the iteration."""
        operands = tuple(self._current[operand] for operand in node.operands)
        result, origin = node.result, node.origin
        if iteration:
            result = Value(next(self._fresh_ids), result.type)
            origin = Origin(renamed(origin.module, shifts), origin.source)
        self._nodes.append(Node(result, node.op, operands, origin))
        self._current[node.result] = result


def taken_series(graph: "Graph", repeat: Repeat) -> dict[Value, Series]:
    """The series of the parameters and inputs that a repeat takes, by their value in the first iteration."""
    name_of = {value: name for side in (graph.inputs, graph.parameters) for name, value in side.items()}
    rows = {first: [name_of[value] for value in (first, *later)] for first, later in repeat.taken.items()}
    return {first: series for first, names in rows.items() if (series := series_of(names))}


def require_sound_repeats(graph: "Graph") -> None:
    """Raise GraphInvalid unless each value is defined before use when the repeats are unrolled.

    The order of the nodes themselves is not checked.
    """
    outside = {value for side in (graph.inputs, graph.parameters) for value in side.values()}
    known = outside | set(graph.constants)
    position = 0
    for repeat in graph.repeats:
        _require(
            position <= repeat.start < repeat.stop <= len(graph.nodes),
            repeat,
            "overlaps the repeat before it, or ends after the last node",
        )
        _require(repeat.count >= 2, repeat, "has fewer than 2 iterations")
        known |= {node.result for node in graph.nodes[position : repeat.start]}
        inside = {node.result for node in graph.nodes[repeat.start : repeat.stop]}
        _require_sound(repeat, outside, known, inside)
        known |= inside | {value for results in repeat.given.values() for value in results}
        position = repeat.stop
    if sum((repeat.stop - repeat.start) * repeat.count for repeat in graph.repeats) > _MOST_NODES:
        raise GraphInvalid(f"the graph's repeats expand to more than {_MOST_NODES} nodes")


def _require_sound(repeat: Repeat, outside: set[Value], known: set[Value], inside: set[Value]) -> None:
    for entry, leaving in repeat.carried.items():
        _require(
            entry in known and leaving in inside,
            repeat,
            "carries a value that is not defined before it, or one that is not computed inside it",
        )
        _require(entry.type == leaving.type, repeat, f"carries {leaving.type} as {entry.type}")
    for first, later in repeat.taken.items():
        _require(first not in repeat.carried, repeat, "both takes and carries a value")
        _require(len(later) == repeat.count - 1, repeat, f"takes {len(later) + 1} tensors for one value")
        _require(outside.issuperset((first, *later)), repeat, "takes a value other than parameters and inputs")
        _require(
            all(value.type == first.type for value in later), repeat, f"takes tensors that are not all {first.type}"
        )
    for value, results in repeat.given.items():
        complete = value in inside and len(results) == repeat.count
        _require(complete, repeat, "gives a value that is not computed inside it, or not for each iteration")
        same_type = all(result.type == value.type for result in results)
        _require(same_type, repeat, f"gives values that are not all {value.type}")


def _require(condition: bool, repeat: Repeat, reason: str) -> None:
    if not condition:
        start, stop, times = (str(number)[:20] for number in (repeat.start, repeat.stop, repeat.count))
        raise GraphInvalid(f"the repeat of nodes {start} to {stop}, {times} times, {reason}")


def _definitions(graph: "Graph") -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)
    yield from (value for repeat in graph.repeats for results in repeat.given.values() for value in results)


class NotResizable(Exception):
    """A graph that cannot be resized, because its layers do not determine further layers."""


def resize(graph: "Graph", growth: Mapping[str, int]) -> "Graph":
    """The graph with `growth[scope]` more layers (fewer if negative) in each scope, such as `model.layers.`.

    Names after a repeat that have the number of a later layer are renumbered. Raises NotResizable.
    """
    numbers = count(max(value.id for value in _all_values(graph)) + 1)
    for scope, layers in growth.items():
        graph = _resized(graph, scope, layers, numbers)
    return graph


@dataclass
class _Row:
    """One tensor for each iteration, whose names are a series."""

    series: Series
    values: list[Value]  # one for each of the new number of iterations, in order


@dataclass
class _Change:
    """The resizing of one repeat: its rows by their value in the first iteration, and the shifts of other names."""

    old: int
    new: int
    rows: dict[Value, _Row] = field(default_factory=dict)
    iteration_of: dict[Value, tuple[Value, int]] = field(default_factory=dict)

    def add(self, series: Series, values: tuple[Value, ...], numbers: Iterator[int]) -> None:
        first = values[0]
        fresh = [Value(next(numbers), first.type) for _ in range(self.old, self.new)]
        self.rows[first] = _Row(series, [*values[: self.new], *fresh])
        self.iteration_of |= {value: (first, iteration) for iteration, value in enumerate(values)}

    @property
    def shifts(self) -> dict[str, Shift]:
        """The shift of the numbers after the repeat's own numbers, by scope."""
        shifts: dict[str, Shift] = {}
        for row in self.rows.values():
            series = row.series
            end = series.first + self.old * series.step
            known = shifts.get(series.prefix)
            distance = (self.new - self.old) * series.step
            shifts[series.prefix] = Shift(distance, min(end, known.start) if known else end)
        return shifts

    def side(self, side: Mapping[str, Value]) -> dict[str, Value]:
        """Resized inputs, parameters or outputs; tensors of new iterations follow those of the last old iteration."""
        shifts, changed, ending = self.shifts, dict[str, Value](), list[_Row]()
        for name, value in side.items():
            first, iteration = self.iteration_of.get(value, (value, -1))
            if iteration != self.old - 1:
                self._append_new(ending, changed)
                ending = []
            if iteration == -1:
                changed[renamed(name, shifts)] = value
            elif iteration < self.new:
                changed[name] = value
            if iteration == self.old - 1:
                ending.append(self.rows[first])
        self._append_new(ending, changed)
        return changed

    def _append_new(self, rows: list[_Row], changed: dict[str, Value]) -> None:
        for iteration in range(self.old, self.new):
            for row in rows:
                changed[row.series.name(iteration)] = row.values[iteration]


def _resized(graph: "Graph", scope: str, layers: int, numbers: Iterator[int]) -> "Graph":
    number, repeat = _repeat_of(graph, scope)
    series = taken_series(graph, repeat)
    if len(series) < len(repeat.taken):
        raise NotResizable(f"the repeat of {scope} takes tensors whose names are not numbered by layer")
    step = next(taken.step for taken in series.values() if taken.prefix == scope)
    change = _Change(repeat.count, repeat.count + layers // step)
    if layers % step or change.new < 1:
        raise NotResizable(f"{layers} more layers of {scope} are no whole number of iterations")
    for first, names in series.items():
        change.add(names, (first, *repeat.taken[first]), numbers)
    for results in repeat.given.values():
        change.add(_output_series(graph, results), results, numbers)
    rows = change.rows
    taken = {first: tuple(rows[first].values[1:]) for first in repeat.taken}
    given = {value: tuple(rows[results[0]].values) for value, results in repeat.given.items()}
    after = replace(repeat, count=change.new, taken=taken, given=given)
    nodes = (*graph.nodes[: repeat.stop], *_renamed_origins(graph.nodes[repeat.stop :], change.shifts))
    changed = replace(
        graph,
        inputs=change.side(graph.inputs),
        parameters=change.side(graph.parameters),
        nodes=nodes,
        outputs=change.side(graph.outputs),
        repeats=(*graph.repeats[:number], after, *graph.repeats[number + 1 :]),
    )
    return changed if change.new > 1 else _inlined(changed, after)


def _repeat_of(graph: "Graph", scope: str) -> tuple[int, Repeat]:
    """The repeat with the most layers in each iteration; a remainder after it may repeat in smaller steps."""
    steps = {
        number: max(
            (series.step for series in taken_series(graph, repeat).values() if series.prefix == scope), default=0
        )
        for number, repeat in enumerate(graph.repeats)
    }
    largest = max(steps.values(), default=0)
    matches = [number for number, step in steps.items() if step == largest and step]
    if len(matches) != 1:
        raise NotResizable(f"{len(matches)} repeats take weights of {scope}; exactly one is required")
    return matches[0], graph.repeats[matches[0]]


def _output_series(graph: "Graph", results: tuple[Value, ...]) -> Series:
    names = {value: name for name, value in graph.outputs.items()}
    listed = [names[value] for value in results if value in names]
    series = series_of(listed) if len(listed) == len(results) else None
    read = {operand for node in graph.nodes for operand in node.operands}
    if (
        series is None
        or not read.isdisjoint(results)
        or sum(v in results for v in graph.outputs.values()) != len(results)
    ):
        raise NotResizable("a repeat gives values other than numbered outputs")
    return series


def _renamed_origins(nodes: tuple[Node, ...], shifts: Mapping[str, Shift]) -> Iterator[Node]:
    for node in nodes:
        yield replace(node, origin=Origin(renamed(node.origin.module, shifts), node.origin.source))


def _inlined(graph: "Graph", repeat: Repeat) -> "Graph":
    """The graph with a repeat of one iteration replaced by its nodes."""
    computed = {results[0]: value for value, results in repeat.given.items()}
    outputs = {name: computed.get(value, value) for name, value in graph.outputs.items()}
    return replace(graph, outputs=outputs, repeats=tuple(other for other in graph.repeats if other is not repeat))


def _all_values(graph: "Graph") -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)
    yield from (value for repeat in graph.repeats for results in repeat.given.values() for value in results)
