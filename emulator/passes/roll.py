"""Loop rolling: detects repeated layers in the node sequence and stores them once.

A run of nodes repeats with period L if each node applies the same operator as the node L positions before it, to
corresponding operands: values L positions later, the same value, or a parameter whose name differs in a number only.
Candidates for L come from comparing the sequence of operators with itself; the operands must prove a candidate.
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
from nxpipe.emulator.ops import Unary
from nxpipe.emulator.passes.options import PassOptions

# The number of periods that are tried, in order of the nodes they could save, before a range counts as unrepeated.
_PERIODS_TRIED = 8
_NUMBER = re.compile(r"\d+")

# The counterpart, in a later iteration, of an outside value that the first iteration reads: the result at this position
# of the previous iteration (loop-carried), or another outside value.
Link = int | Value


def roll(graph: Graph, _: PassOptions) -> Graph:
    """The same graph with each repeated run of nodes stored once. Its key is unchanged."""
    graph = unroll(graph)
    patterns = {
        value: (role, _NUMBER.sub("*", name), value.type)
        for role, side in (("input", graph.inputs), ("parameter", graph.parameters))
        for name, value in side.items()
    }
    nodes, runs = _find(list(graph.nodes), _Varying(patterns), 0)
    return _rolled(replace(graph, nodes=tuple(nodes)), runs) if runs else graph


@dataclass(frozen=True)
class _Varying:
    """The outside values that may differ between iterations: inputs and parameters with equal patterns."""

    patterns: Mapping[Value, object]

    def allows(self, a: Value, b: Value) -> bool:
        return a == b or (a in self.patterns and self.patterns[a] == self.patterns.get(b))


@dataclass
class _Run:
    """A run of `count` iterations of `period` nodes from `start` on. `links` has, for each outside value that the first
    iteration reads, its counterparts in the later iterations."""

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


def _find(nodes: list[Node], varying: _Varying, offset: int) -> tuple[list[Node], list[_Run]]:
    """All repeats in a range of nodes, found largest first; the nodes are reordered to expose repeats."""
    run = _largest_run(nodes, varying)
    if run is None:
        return nodes, []
    nodes, run = _hoisted(nodes, run, varying)
    left, runs_left = _find(nodes[: run.start], varying, offset)
    right, runs_right = _find(nodes[run.stop :], varying, offset + run.stop)
    located = replace(run, start=run.start + offset)
    return [*left, *nodes[run.start : run.stop], *right], [*runs_left, located, *runs_right]


def _hoisted(nodes: list[Node], run: _Run, varying: _Varying) -> tuple[list[Node], _Run]:
    """Move nodes whose results all iterations read before the run. They are often among the nodes of the first layer,
    which then becomes one more iteration."""
    positions = _positions(nodes)
    shared = {positions[a] for a, links in run.links.items() if a in positions and all(a == link for link in links)}
    if not any(position >= run.start - run.period for position in shared):
        return nodes, run
    for position in range(run.start - 1, -1, -1):
        if position in shared:
            shared.update(positions[operand] for operand in nodes[position].operands if operand in positions)
    order = sorted(shared) + [position for position in range(len(nodes)) if position not in shared]
    reordered = [nodes[position] for position in order]
    better = _largest_run(reordered, varying)
    return (reordered, better) if better and better.saved > run.saved else (nodes, run)


def _largest_run(nodes: Sequence[Node], varying: _Varying) -> _Run | None:
    positions = _positions(nodes)
    best: _Run | None = None
    for period, saved in _periods(nodes):
        if best and saved <= best.saved:
            break
        for start in _starts(nodes, positions, period, varying):
            run = _extended(nodes, positions, _Run(start, period), varying)
            if run.saved > (best.saved if best else 0):
                best = run
    return best


def _positions(nodes: Sequence[Node]) -> dict[Value, int]:
    return {node.result: position for position, node in enumerate(nodes)}


def _periods(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Candidate periods of the sequence of operators, each with the number of nodes it could save at most."""
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault((n.op, n.result.type, len(n.operands)), len(numbers)) for n in nodes])
    candidates = []
    for period in range(1, len(nodes) // 2 + 1):
        longest = max((stop - start for start, stop in _true_ranges(kinds[period:] == kinds[:-period])), default=0)
        if longest >= period:
            candidates.append((period, longest // period * period))
    candidates.sort(key=lambda entry: (-entry[1], entry[0]))
    return candidates[:_PERIODS_TRIED]


def _true_ranges(agree: Array) -> list[tuple[int, int]]:
    """The maximal ranges in which a sequence of booleans is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], agree, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _starts(nodes: Sequence[Node], positions: Mapping[Value, int], period: int, varying: _Varying) -> Iterator[int]:
    """Candidates for the start of the first iteration: near a range of agreement, where fewest values are live."""
    agree = [_agree(nodes, positions, position, period, varying) for position in range(len(nodes) - period)]
    live = _live_values(nodes, positions)
    for first, last in _true_ranges(np.array(agree, np.bool_)):
        if last - first >= period:
            fewest = min(live[first : first + period])
            window = range(max(0, first - period), first + period)
            yield from (position for position in window if live[position] <= fewest)


def _agree(
    nodes: Sequence[Node], positions: Mapping[Value, int], position: int, period: int, varying: _Varying
) -> bool:
    """True if a node and the node a period later apply the same operator to corresponding operands."""
    node, later = nodes[position], nodes[position + period]
    if node.op != later.op or len(node.operands) != len(later.operands):
        return False
    return all(
        varying.allows(a, b) or (a in positions and b in positions and positions[b] - positions[a] == period)
        for a, b in zip(node.operands, later.operands, strict=True)
    )


def _live_values(nodes: Sequence[Node], positions: Mapping[Value, int]) -> list[int]:
    """The number of live values before each node: results of earlier nodes that it or a later node reads. One more
    before a function of the previous result: behind the border, it would be a kernel of its own."""
    last_read = {operand: position for position, node in enumerate(nodes) for operand in node.operands}
    change = np.zeros(len(nodes) + 2, np.int64)
    for value, defined in positions.items():
        if value in last_read:
            change[defined + 1] += 1
            change[last_read[value] + 1] -= 1
    live: list[int] = np.cumsum(change).tolist()
    for position, node in enumerate(nodes):
        if isinstance(node.op, Unary) and positions.get(node.operands[0]) == position - 1:
            live[position] += 1
    return live


def _extended(nodes: Sequence[Node], positions: Mapping[Value, int], run: _Run, varying: _Varying) -> _Run:
    """The run extended by all iterations that the operands prove."""
    while run.stop + run.period <= len(nodes):
        row = _next_row(nodes, positions, run, varying)
        if row is None:
            break
        links = {value: [*run.links.get(value, []), link] for value, link in row.items()}
        run = replace(run, count=run.count + 1, links=links)
    return run


def _next_row(
    nodes: Sequence[Node], positions: Mapping[Value, int], run: _Run, varying: _Varying
) -> dict[Value, Link] | None:
    """The links of the next iteration after a run; None if the next nodes are not an iteration of it."""
    row: dict[Value, Link] = {}
    for step in range(run.period):
        first, later = nodes[run.start + step], nodes[run.stop + step]
        if first.op != later.op or len(first.operands) != len(later.operands):
            return None
        for a, b in zip(first.operands, later.operands, strict=True):
            if positions.get(a, -1) >= run.start:
                if positions.get(b, -1) - positions[a] != run.stop - run.start:
                    return None
                continue
            link = _link(positions, run, a, b, varying)
            if link is None or row.setdefault(a, link) != link:
                return None
    return row


def _link(positions: Mapping[Value, int], run: _Run, a: Value, b: Value, varying: _Varying) -> Link | None:
    """The counterpart of an outside value in the next iteration; None if it breaks the pattern so far."""
    step = positions.get(b, -1) - (run.stop - run.period)
    if 0 <= step < run.period and a.type == b.type:
        return step if all(link == step for link in run.links.get(a, [])) else None
    always_outside = all(isinstance(link, Value) for link in run.links.get(a, []))
    return b if always_outside and varying.allows(a, b) else None


def _rolled(graph: Graph, runs: Sequence[_Run]) -> Graph:
    """The graph with only the first iteration of each run; readers outside use the `given` values of the repeat."""
    numbers = count(max(value.id for value in _all_values(graph)) + 1)
    replacement: dict[Value, Value] = {}
    nodes: list[Node] = []
    repeats: list[Repeat] = []
    position = 0
    for run in runs:
        body = graph.nodes[run.start : run.start + run.period]
        nodes += _substituted(replacement, graph.nodes[position : run.start])
        start = len(nodes)
        nodes += _substituted(replacement, body)
        carried = {
            replacement.get(value, value): body[links[0]].result
            for value, links in run.links.items()
            if isinstance(links[0], int)
        }
        taken = {
            value: tuple(link for link in links if isinstance(link, Value))
            for value, links in run.links.items()
            if isinstance(links[0], Value) and any(link != value for link in links)
        }
        given = _given(graph, run, numbers, replacement)
        repeats.append(Repeat(start, len(nodes), run.count, carried, taken, given))
        position = run.stop
    nodes += _substituted(replacement, graph.nodes[position:])
    outputs = {name: replacement.get(value, value) for name, value in graph.outputs.items()}
    return replace(graph, nodes=tuple(nodes), outputs=outputs, repeats=tuple(repeats))


def _all_values(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs.values(), *graph.parameters.values(), *graph.constants)
    yield from (node.result for node in graph.nodes)


def _substituted(replacement: Mapping[Value, Value], nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield replace(node, operands=tuple(replacement.get(operand, operand) for operand in node.operands))


def _given(
    graph: Graph, run: _Run, numbers: Iterator[int], replacement: dict[Value, Value]
) -> dict[Value, tuple[Value, ...]]:
    """The `given` values: those read outside in an iteration other than the last. Values that are read outside in the
    last iteration only are replaced by those of the stored iteration."""
    outside = (*graph.nodes[: run.start], *graph.nodes[run.stop :])
    read = {operand for node in outside for operand in node.operands} | set(graph.outputs.values())
    given: dict[Value, tuple[Value, ...]] = {}
    for step in range(run.period):
        iterations = [node.result for node in graph.nodes[run.start + step : run.stop : run.period]]
        if not read.isdisjoint(iterations[:-1]):
            given[iterations[0]] = tuple(Value(next(numbers), value.type) for value in iterations)
            replacement.update(zip(iterations, given[iterations[0]], strict=True))
        elif iterations[-1] in read:
            replacement[iterations[-1]] = iterations[0]
    return given
