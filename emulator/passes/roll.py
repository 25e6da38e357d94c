"""Repeated layers stored once: a repeat is found and proven on the nodes themselves.

A run of nodes repeats with period L when each node applies the operator of the node L places before it to operands
that correspond: L places further on, or the same value, or a parameter of the same name but for a number. Candidates
for L come from comparing the sequence of operators with itself; a candidate is accepted only if the operands prove it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Repeat, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes.options import PassOptions

# How many periods, those that would save most nodes first, are tried before a stretch counts as without repetition.
_PERIODS_TRIED = 8
_NUMBER = re.compile(r"\d+")

# What stands in a later iteration where the first reads a value from outside: the result at this place of the
# iteration before, or a value from outside again.
Link = int | Value


def roll(graph: Graph, _: PassOptions) -> Graph:
    """The same graph with each repeated run of nodes stored once; unrolled, it has the same key."""
    graph = unroll(graph)
    patterns = {
        value: (role, _NUMBER.sub("*", name), value.type)
        for role, side in (("input", graph.inputs), ("parameter", graph.parameters))
        for name, value in side.items()
    }
    nodes, runs = _find(list(graph.nodes), _Exchange(patterns), 0)
    return _rolled(replace(graph, nodes=tuple(nodes)), runs) if runs else graph


@dataclass(frozen=True)
class _Exchange:
    """A pattern of values that may differ between iterations without being computed in them."""

    patterns: Mapping[Value, object]

    def allows(self, a: Value, b: Value) -> bool:
        return a == b or (a in self.patterns and self.patterns[a] == self.patterns.get(b))


@dataclass
class _Run:
    """Nodes from `start` on are `count` iterations of `period` nodes; `links` has a column a value from outside."""

    start: int
    period: int
    count: int = 1
    links: dict[Value, list[Link]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        return self.period * (self.count - 1)


def _find(nodes: list[Node], exchange: _Exchange, offset: int) -> tuple[list[Node], list[_Run]]:
    """All repeats in a range of nodes, largest first; the nodes are reordered to expose them."""
    run = _largest_run(nodes, exchange)
    if run is None:
        return nodes, []
    nodes, run = _with_shared_work_first(nodes, run, exchange)
    left, runs_left = _find(nodes[: run.start], exchange, offset)
    right, runs_right = _find(nodes[run.stop :], exchange, offset + run.stop)
    found = replace(run, start=run.start + offset)
    return [*left, *nodes[run.start : run.stop], *right], [*runs_left, found, *runs_right]


def _with_shared_work_first(nodes: list[Node], run: _Run, exchange: _Exchange) -> tuple[list[Node], _Run]:
    """What all iterations read is often computed among the nodes of the first; with it out of the way, that one too
    is an iteration."""
    place = _places(nodes)
    wanted = {place[a] for a, links in run.links.items() if a in place and all(a == link for link in links)}
    if not any(position >= run.start - run.period for position in wanted):
        return nodes, run
    for position in range(run.start - 1, -1, -1):
        if position in wanted:
            wanted.update(place[operand] for operand in nodes[position].operands if operand in place)
    order = sorted(wanted) + [position for position in range(len(nodes)) if position not in wanted]
    reordered = [nodes[position] for position in order]
    better = _largest_run(reordered, exchange)
    return (reordered, better) if better and better.saved > run.saved else (nodes, run)


def _largest_run(nodes: Sequence[Node], exchange: _Exchange) -> _Run | None:
    place = _places(nodes)
    best: _Run | None = None
    for period, saved in _periods(nodes):
        if best and saved <= best.saved:
            break
        for start in _starts(nodes, place, period, exchange):
            run = _grown(nodes, place, _Run(start, period), exchange)
            if run.saved > (best.saved if best else 0):
                best = run
    return best


def _places(nodes: Sequence[Node]) -> dict[Value, int]:
    return {node.result: position for position, node in enumerate(nodes)}


def _periods(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Periods at which the sequence of operators agrees with itself, and the most nodes each could save."""
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault((n.op, n.result.type, len(n.operands)), len(numbers)) for n in nodes])
    found = []
    for period in range(1, len(nodes) // 2 + 1):
        longest = max((stop - start for start, stop in _stretches(kinds[period:] == kinds[:-period])), default=0)
        if longest >= period:
            found.append((period, longest // period * period))
    found.sort(key=lambda entry: (-entry[1], entry[0]))
    return found[:_PERIODS_TRIED]


def _stretches(agree: Array) -> list[tuple[int, int]]:
    """The ranges in which a sequence of booleans is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], agree, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _starts(nodes: Sequence[Node], place: Mapping[Value, int], period: int, exchange: _Exchange) -> Iterator[int]:
    """Candidates for the start of the first iteration: near a range of agreement, where the fewest values are live."""
    agree = [_agree(nodes, place, position, period, exchange) for position in range(len(nodes) - period)]
    live = _live_values(nodes, place)
    for first, last in _stretches(np.array(agree, np.bool_)):
        if last - first >= period:
            fewest = min(live[first : first + period])
            window = range(max(0, first - period), first + period)
            yield from (position for position in window if live[position] <= fewest)


def _agree(nodes: Sequence[Node], place: Mapping[Value, int], position: int, period: int, exchange: _Exchange) -> bool:
    """A node and the one a period later apply the same operator to corresponding operands."""
    node, later = nodes[position], nodes[position + period]
    if node.op != later.op or len(node.operands) != len(later.operands):
        return False
    return all(
        exchange.allows(a, b) or (a in place and b in place and place[b] - place[a] == period)
        for a, b in zip(node.operands, later.operands, strict=True)
    )


def _live_values(nodes: Sequence[Node], place: Mapping[Value, int]) -> list[int]:
    """Before each node, how many results of earlier nodes are still to be read by it or later ones."""
    last_read = {operand: position for position, node in enumerate(nodes) for operand in node.operands}
    change = np.zeros(len(nodes) + 2, np.int64)
    for value, defined in place.items():
        if value in last_read:
            change[defined + 1] += 1
            change[last_read[value] + 1] -= 1
    lives: list[int] = np.cumsum(change).tolist()
    return lives


def _grown(nodes: Sequence[Node], place: Mapping[Value, int], run: _Run, exchange: _Exchange) -> _Run:
    """The run with as many iterations as can be proven."""
    while run.stop + run.period <= len(nodes):
        row = _next_row(nodes, place, run, exchange)
        if row is None:
            break
        links = {value: [*run.links.get(value, []), link] for value, link in row.items()}
        run = replace(run, count=run.count + 1, links=links)
    return run


def _next_row(
    nodes: Sequence[Node], place: Mapping[Value, int], run: _Run, exchange: _Exchange
) -> dict[Value, Link] | None:
    """The links of the nodes after a run, if they are one more iteration of it."""
    row: dict[Value, Link] = {}
    for step in range(run.period):
        first, now = nodes[run.start + step], nodes[run.stop + step]
        if first.op != now.op or len(first.operands) != len(now.operands):
            return None
        for a, b in zip(first.operands, now.operands, strict=True):
            if place.get(a, -1) >= run.start:
                if place.get(b, -1) - place[a] != run.stop - run.start:
                    return None
                continue
            link = _link(place, run, a, b, exchange)
            if link is None or row.setdefault(a, link) != link:
                return None
    return row


def _link(place: Mapping[Value, int], run: _Run, a: Value, b: Value, exchange: _Exchange) -> Link | None:
    """The counterpart of an outside value in the next iteration, if it continues the pattern so far."""
    step = place.get(b, -1) - (run.stop - run.period)
    if 0 <= step < run.period and a.type == b.type:
        return step if all(link == step for link in run.links.get(a, [])) else None
    so_far_from_outside = all(isinstance(link, Value) for link in run.links.get(a, []))
    return b if so_far_from_outside and exchange.allows(a, b) else None


def _rolled(graph: Graph, runs: Sequence[_Run]) -> Graph:
    """Drop all iterations but the first; readers outside of them read the values that the repeat gives instead."""
    numbers = count(max(value.id for value in _all_values(graph)) + 1)
    stands_for: dict[Value, Value] = {}
    nodes: list[Node] = []
    repeats: list[Repeat] = []
    position = 0
    for run in runs:
        body = graph.nodes[run.start : run.start + run.period]
        nodes += _reading(stands_for, graph.nodes[position : run.start])
        start = len(nodes)
        nodes += _reading(stands_for, body)
        carried = {
            stands_for.get(value, value): body[links[0]].result
            for value, links in run.links.items()
            if isinstance(links[0], int)
        }
        taken = {
            value: tuple(link for link in links if isinstance(link, Value))
            for value, links in run.links.items()
            if isinstance(links[0], Value) and any(link != value for link in links)
        }
        given = _given(graph, run, numbers, stands_for)
        repeats.append(Repeat(start, len(nodes), run.count, carried, taken, given))
        position = run.stop
    nodes += _reading(stands_for, graph.nodes[position:])
    outputs = {name: stands_for.get(value, value) for name, value in graph.outputs.items()}
    return replace(graph, nodes=tuple(nodes), outputs=outputs, repeats=tuple(repeats))


def _all_values(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)


def _reading(stands_for: Mapping[Value, Value], nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield replace(node, operands=tuple(stands_for.get(operand, operand) for operand in node.operands))


def _given(
    graph: Graph, run: _Run, numbers: Iterator[int], stands_for: dict[Value, Value]
) -> dict[Value, tuple[Value, ...]]:
    """The values that are read outside: the last iteration's under the first's names, all others by iteration."""
    others = (*graph.nodes[: run.start], *graph.nodes[run.stop :])
    read = {operand for node in others for operand in node.operands} | set(graph.outputs.values())
    given: dict[Value, tuple[Value, ...]] = {}
    for step in range(run.period):
        each = [node.result for node in graph.nodes[run.start + step : run.stop : run.period]]
        if not read.isdisjoint(each[:-1]):
            given[each[0]] = tuple(Value(next(numbers), value.type) for value in each)
            stands_for.update(zip(each, given[each[0]], strict=True))
        elif each[-1] in read:
            stands_for[each[-1]] = each[0]
    return given
