"""A repeat with another count: how the graph of a few layers becomes that of many.

Whether the longer graph is that of the deeper model is for the caller to prove; here it is made, names and all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from nxpipe.emulator.ir.graph import Graph, Node, Origin, Repeat, Value
from nxpipe.emulator.ir.repeat import taken_series
from nxpipe.emulator.ir.series import Series, Shift, renamed, series_of


class NotResizable(Exception):
    """The graph does not say how it would go on."""


def resize(graph: Graph, growth: Mapping[str, int]) -> Graph:
    """The graph with this many layers more (or, below zero, fewer) in each of these scopes, such as `model.layers.`.

    What comes after a repeat and carries the number of a later layer is renamed to that of a still later one.
    """
    numbers = count(max(value.id for value in _all_values(graph)) + 1)
    for scope, layers in growth.items():
        graph = _resized(graph, scope, layers, numbers)
    return graph


@dataclass
class _Row:
    """One tensor an iteration, under names that count."""

    series: Series
    values: list[Value]  # in the order of iterations, as many as the new count has


@dataclass
class _Change:
    """How one repeat changes: rows by the value of their first iteration, and what happens to other names."""

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
        """Where each scope's own numbers end, and how far the numbers behind them move."""
        shifts: dict[str, Shift] = {}
        for row in self.rows.values():
            series = row.series
            end = series.first + self.old * series.step
            known = shifts.get(series.prefix)
            distance = (self.new - self.old) * series.step
            shifts[series.prefix] = Shift(distance, min(end, known.start) if known else end)
        return shifts

    def side(self, side: Mapping[str, Value]) -> dict[str, Value]:
        """Inputs, parameters or outputs; tensors of further iterations follow those of the last one there was."""
        shifts, changed, ending = self.shifts, dict[str, Value](), list[_Row]()
        for name, value in side.items():
            first, iteration = self.iteration_of.get(value, (value, -1))
            if iteration != self.old - 1:
                self._go_on(ending, changed)
                ending = []
            if iteration == -1:
                changed[renamed(name, shifts)] = value
            elif iteration < self.new:
                changed[name] = value
            if iteration == self.old - 1:
                ending.append(self.rows[first])
        self._go_on(ending, changed)
        return changed

    def _go_on(self, rows: list[_Row], changed: dict[str, Value]) -> None:
        for iteration in range(self.old, self.new):
            for row in rows:
                changed[row.series.name(iteration)] = row.values[iteration]


def _resized(graph: Graph, scope: str, layers: int, numbers: Iterator[int]) -> Graph:
    number, repeat = _repeat_of(graph, scope)
    series = taken_series(graph, repeat)
    if len(series) < len(repeat.taken):
        raise NotResizable(f"not all that the repeat of {scope} takes has names that count")
    step = next(one.step for one in series.values() if one.prefix == scope)
    change = _Change(repeat.count, repeat.count + layers // step)
    if layers % step or change.new < 1:
        raise NotResizable(f"{layers} layers more of {scope} are no whole number of iterations")
    for first, one in series.items():
        change.add(one, (first, *repeat.taken[first]), numbers)
    for each in repeat.given.values():
        change.add(_output_series(graph, each), each, numbers)
    rows = change.rows
    taken = {first: tuple(rows[first].values[1:]) for first in repeat.taken}
    given = {value: tuple(rows[each[0]].values) for value, each in repeat.given.items()}
    after = replace(repeat, count=change.new, taken=taken, given=given)
    nodes = (*graph.nodes[: repeat.stop], *_renamed_origins(graph.nodes[repeat.stop :], change.shifts))
    changed = Graph(
        change.side(graph.inputs),
        change.side(graph.parameters),
        graph.constants,
        nodes,
        change.side(graph.outputs),
        (*graph.repeats[:number], after, *graph.repeats[number + 1 :]),
    )
    return changed if change.new > 1 else _dissolved(changed, after)


def _repeat_of(graph: Graph, scope: str) -> tuple[int, Repeat]:
    """The one that takes most layers at a time: what is left over behind it may repeat in smaller steps."""
    steps = {
        number: max((one.step for one in taken_series(graph, repeat).values() if one.prefix == scope), default=0)
        for number, repeat in enumerate(graph.repeats)
    }
    largest = max(steps.values(), default=0)
    found = [number for number, step in steps.items() if step == largest and step]
    if len(found) != 1:
        raise NotResizable(f"{len(found)} repeats take weights of {scope}, where one should")
    return found[0], graph.repeats[found[0]]


def _output_series(graph: Graph, each: tuple[Value, ...]) -> Series:
    names = {value: name for name, value in graph.outputs.items()}
    listed = [names[value] for value in each if value in names]
    series = series_of(listed) if len(listed) == len(each) else None
    read = {operand for node in graph.nodes for operand in node.operands}
    if series is None or not read.isdisjoint(each) or sum(v in each for v in graph.outputs.values()) != len(each):
        raise NotResizable("a repeat gives values other than outputs whose names count")
    return series


def _renamed_origins(nodes: tuple[Node, ...], shifts: Mapping[str, Shift]) -> Iterator[Node]:
    for node in nodes:
        yield replace(node, origin=Origin(renamed(node.origin.module, shifts), node.origin.source))


def _dissolved(graph: Graph, repeat: Repeat) -> Graph:
    """A single iteration is no repeat: what it gives is what it computes."""
    computed = {each[0]: value for value, each in repeat.given.items()}
    outputs = {name: computed.get(value, value) for name, value in graph.outputs.items()}
    return replace(graph, outputs=outputs, repeats=tuple(other for other in graph.repeats if other is not repeat))


def _all_values(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)
    yield from (value for repeat in graph.repeats for each in repeat.given.values() for value in each)
