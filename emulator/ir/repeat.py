"""What a repeat means: the rules that make it sound, and its exact expansion."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

from nxpipe.emulator.errors import GraphInvalid
from nxpipe.emulator.ir.graph import Graph, Node, Origin, Repeat, Value
from nxpipe.emulator.ir.series import Series, Shift, renamed, series_of

# Reached by no real model; it keeps hostile graphs from asking for absurd amounts of work.
_MOST_NODES = 1 << 20


def unroll(graph: Graph) -> Graph:
    """The same program with every iteration written out. A graph without repeats is its own expansion."""
    return _Unrolling(graph).run() if graph.repeats else graph


class _Unrolling:
    """Walks the nodes in the order in which they run; `_now` says what a value stands for at that moment."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        defined = list(_definitions(graph))
        self._now = dict(zip(defined, defined, strict=True))
        self._numbers = count(max((value.id for value in defined), default=0) + 1)
        self._nodes: list[Node] = []

    def run(self) -> Graph:
        position = 0
        for repeat in self._graph.repeats:
            self._copy(self._graph.nodes[position : repeat.start])
            self._repeat(repeat)
            position = repeat.stop
        self._copy(self._graph.nodes[position:])
        outputs = {name: self._now[value] for name, value in self._graph.outputs.items()}
        return replace(self._graph, nodes=tuple(self._nodes), outputs=outputs, repeats=())

    def _copy(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._nodes.append(replace(node, operands=tuple(self._now[operand] for operand in node.operands)))

    def _repeat(self, repeat: Repeat) -> None:
        before = {value: self._now[value] for value in (*repeat.carried, *repeat.taken)}
        steps = {series.prefix: series.step for series in taken_series(self._graph, repeat).values()}
        body = self._graph.nodes[repeat.start : repeat.stop]
        for iteration in range(repeat.count):
            if iteration:
                carried = {entry: self._now[leaving] for entry, leaving in repeat.carried.items()}
                self._now |= carried | {first: later[iteration - 1] for first, later in repeat.taken.items()}
            shifts = {scope: Shift(step * iteration) for scope, step in steps.items()}
            for node in body:
                self._iterate(node, iteration, shifts)
            self._now |= {each[iteration]: self._now[value] for value, each in repeat.given.items()}
        self._now |= before

    def _iterate(self, node: Node, iteration: int, shifts: Mapping[str, Shift]) -> None:
        """Provenance counts along: an iteration comes from the layer whose weights it takes."""
        operands = tuple(self._now[operand] for operand in node.operands)
        result, origin = node.result, node.origin
        if iteration:
            result = Value(next(self._numbers), result.type)
            origin = Origin(renamed(origin.module, shifts), origin.source)
        self._nodes.append(Node(result, node.op, operands, origin))
        self._now[node.result] = result


def taken_series(graph: Graph, repeat: Repeat) -> dict[Value, Series]:
    """The parameters and inputs that a repeat takes, by their value in the first iteration, where names count."""
    name_of = {value: name for side in (graph.inputs, graph.parameters) for name, value in side.items()}
    rows = {first: [name_of[value] for value in (first, *later)] for first, later in repeat.taken.items()}
    return {first: series for first, names in rows.items() if (series := series_of(names))}


def require_sound_repeats(graph: Graph) -> None:
    """Raise GraphInvalid unless every repeat stands for an expansion in which each value is defined before use.

    That the nodes themselves are in order is not asked here.
    """
    outside = {value for side in (graph.inputs, graph.parameters) for value in side.values()}
    known = outside | set(graph.constants)
    position = 0
    for repeat in graph.repeats:
        _require(
            position <= repeat.start < repeat.stop <= len(graph.nodes), repeat, "does not lie after the one before"
        )
        _require(repeat.count >= 2, repeat, "is none")
        known |= {node.result for node in graph.nodes[position : repeat.start]}
        inside = {node.result for node in graph.nodes[repeat.start : repeat.stop]}
        _require_sound(repeat, outside, known, inside)
        known |= inside | {value for each in repeat.given.values() for value in each}
        position = repeat.stop
    if sum((repeat.stop - repeat.start) * repeat.count for repeat in graph.repeats) > _MOST_NODES:
        raise GraphInvalid(f"the graph's repeats expand to more than {_MOST_NODES} nodes")


def _require_sound(repeat: Repeat, outside: set[Value], known: set[Value], inside: set[Value]) -> None:
    for entry, leaving in repeat.carried.items():
        _require(entry in known and leaving in inside, repeat, "carries a value from elsewhere")
        _require(entry.type == leaving.type, repeat, f"carries {leaving.type} on as {entry.type}")
    for first, later in repeat.taken.items():
        _require(first not in repeat.carried, repeat, "both takes and carries a value")
        _require(len(later) == repeat.count - 1, repeat, f"takes {len(later) + 1} tensors in one place")
        _require(outside.issuperset((first, *later)), repeat, "takes what is neither parameter nor input")
        _require(all(value.type == first.type for value in later), repeat, f"takes tensors not all {first.type}")
    for value, each in repeat.given.items():
        _require(value in inside and len(each) == repeat.count, repeat, "gives values from elsewhere")
        _require(all(one.type == value.type for one in each), repeat, f"gives values that are not all {value.type}")


def _require(condition: bool, repeat: Repeat, otherwise: str) -> None:
    if not condition:
        start, stop, times = (str(number)[:20] for number in (repeat.start, repeat.stop, repeat.count))
        raise GraphInvalid(f"the repeat of nodes {start} to {stop}, {times} times, {otherwise}")


def _definitions(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)
    yield from (value for repeat in graph.repeats for each in repeat.given.values() for value in each)
