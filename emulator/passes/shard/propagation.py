"""Sharding propagation: one walk over a graph decides how each node's operands and result lie across ranks.

Operands that a rule does not cover are computed whole on every rank, so a walk is always correct. The walk is repeated
with what the one before found: where it had to gather, the next one chooses a better layout.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ops import Cast, Gather, Transpose
from nxpipe.emulator.passes.shard.layout import AxisSplit, Layout, Split


@dataclass(frozen=True)
class Verdict:
    """The layouts of a node's operands and result; with `reduced`, ranks add up their results."""

    operands: tuple[Layout, ...]
    result: Layout
    reduced: bool = False


@dataclass(frozen=True)
class Hints:
    """Findings of earlier walks."""

    whole: Mapping[str, str] = field(default_factory=dict)  # weights that had better stay in one piece, and why
    seams: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # where a weight's rows are several tensors


@dataclass(frozen=True)
class _Chain:
    """A value that is a parameter or a state, but for casts and the order of axes."""

    root: Value
    order: tuple[int, ...]  # axis i of the value is axis order[i] of the root


class Walk:
    def __init__(self, graph: Graph, may_split: Callable[[str], bool], hints: Hints) -> None:
        self.graph = graph
        self.layouts: dict[Value, Layout] = {}
        self.verdicts: dict[Value, Verdict] = {}  # by the result of the node
        self.gathered: dict[str, str] = {}  # the weights that should have stayed whole, as they were met, and why
        self.seams: dict[str, set[int]] = {}
        self._may_split = may_split
        self._hints = hints
        self._states = {value: name for name, value in graph.inputs.items() if name in graph.outputs}
        self._names = {value: name for name, value in graph.parameters.items()} | self._states
        self._chains = {root: _Chain(root, tuple(range(root.type.rank))) for root in self._names}
        self._links: dict[Value, list[Value]] = {root: [root] for root in self._names}
        self._settled: set[Value] = set()
        self._fresh: list[tuple[str, int, Split]] = []
        self._here: Node | None = None  # where the walk is
        self.varying = set(graph.inputs.values())
        self.vocabulary = self._largest_looked_up_table()

    def run(self, rule_of: "Callable[[Walk, Node], Callable[[Walk, Node], Verdict]]") -> None:
        chained = []
        for node in self.graph.nodes:
            if not self.varying.isdisjoint(node.operands):
                self.varying.add(node.result)
            if self._extends_chain(node):
                chained.append(node)
                continue
            self._here = node
            self.verdicts[node.result] = verdict = rule_of(self, node)(self, node)
            self.layouts[node.result] = verdict.result if can_be_divided(verdict.result) else None
        for node in chained:
            self.verdicts[node.result] = Verdict((self.layout(node.operands[0]),), self.layout(node.result))
        self._spread_over_repeats()
        self._bring_states_home()

    def layout(self, value: Value) -> Layout:
        return self.layouts.get(value)

    # Weights and states: their layout is what the first to ask for one wants.

    def _extends_chain(self, node: Node) -> bool:
        if not isinstance(node.op, Cast | Transpose) or node.operands[0] not in self._chains:
            return False
        chain = self._chains[node.operands[0]]
        order = node.op.order if isinstance(node.op, Transpose) else range(node.result.type.rank)
        self._chains[node.result] = _Chain(chain.root, tuple(chain.order[axis] for axis in order))
        self._links[chain.root].append(node.result)
        layout = self.layout(chain.root)
        self.layouts[node.result] = layout and layout.at(self._chains[node.result].order.index(layout.axis))
        return True

    def uses(self, weight: Value) -> list[Verdict]:
        """The verdicts of the nodes that read a weight. Of layers stored once, only the first one's are read."""
        links = self._links[weight]
        return [self.verdicts[reader] for link in links for reader in self._readers[link] if reader not in links]

    @cached_property
    def _readers(self) -> Mapping[Value, Sequence[Value]]:
        readers: defaultdict[Value, list[Value]] = defaultdict(list)
        for node in self.graph.nodes:
            for operand in node.operands:
                readers[operand].append(node.result)
        return readers

    def adopt(self, value: Value, layout: Split) -> bool:
        """Lay out a weight or a state as its first reader wants it; no, if it is something else or already settled."""
        chain = self._chains.get(value)
        if chain is None or layout.outer != 1 or chain.root in self._settled:
            return False
        if self._names[chain.root] in self._hints.whole:
            return False
        self._settled.add(chain.root)
        axis = chain.order[layout.axis]
        for link in self._links[chain.root]:
            self.layouts[link] = layout.at(self._chains[link].order.index(axis))
        return True

    def divide(self, value: Value, axis: int) -> Layout:
        """A weight divided along an axis in a way of its own; None if it should stay whole."""
        chain = self._chains.get(value)
        if chain is None or chain.root in self._settled or chain.root in self._states:
            return None
        name = self._names[chain.root]
        if not self._may_split(name):
            return None
        size = value.type.shape[axis]
        edges = [0, *self._hints.seams.get(name, ()), size]
        sizes = tuple(stop - start for start, stop in pairwise(edges))
        layout = Split(axis, 1, sizes, tuple(AxisSplit(block, name) for block in sizes))
        if not self.adopt(value, layout):
            return None
        self._fresh.append((name, size, layout))
        return layout

    def _largest_looked_up_table(self) -> Value | None:
        """The embedding of the vocabulary: other tables are too small to be worth an exchange."""
        tables = [node.operands[0] for node in self.graph.nodes if isinstance(node.op, Gather) and node.op.axis == 0]
        weights = [table for table in tables if self._rooted(table)]
        return max(weights, key=lambda table: table.type.shape[0], default=None)

    def _rooted(self, table: Value) -> bool:
        """A table is a weight, possibly through a cast, which the walk visits later."""
        defined = {node.result: node for node in self.graph.nodes if isinstance(node.op, Cast)}
        while table in defined:
            table = defined[table].operands[0]
        return table in self.graph.parameters.values()

    # Bringing values where a rule wants them.

    def bring(self, value: Value, layout: Split) -> Split:
        """Want a value laid out so: it is, or a weight becomes so, or each rank will slice its own share."""
        current = self.layout(value)
        if current is not None and current.matches(layout):
            current.join(layout)
        elif current is not None:
            self._regret(current)
        else:
            self.adopt(value, layout)
        return layout

    def whole(self, value: Value) -> None:
        """Want a value in one piece on every rank."""
        current = self.layout(value)
        if current is not None:
            self._regret(current)
        elif value in self._chains:
            self._settled.add(self._chains[value].root)

    def want_seams(self, layout: Split, *places: int) -> None:
        """A divided axis is taken apart at these places: weights should be divided in blocks that end there."""
        mine = {cut.root() for cut in layout.cuts}
        total = layout.outer * sum(layout.sizes)
        asked = False
        for name, size, fresh in self._fresh:
            held = [number for number, cut in enumerate(fresh.cuts) if cut.root() in mine]
            if not held:
                continue
            first, length = sum(fresh.sizes[: held[0]]), sum(fresh.sizes[number] for number in held)
            exact = {first + place * length // total for place in places if place * length % total == 0} - {0, size}
            new = exact.difference(self._hints.seams.get(name, ()))
            asked |= bool(new)
            self.seams.setdefault(name, set()).update(new)
        if not asked:
            self._regret(layout)

    def _regret(self, layout: Split) -> None:
        """A divided value had to be gathered; its weights stay whole next time."""
        mine = {cut.root() for cut in layout.cuts}
        causes = [name for name, _, fresh in self._fresh if mine & {cut.root() for cut in fresh.cuts}]
        place = f"{self._here.op.label} {self._here.origin}".strip() if self._here else "the program"
        self.gathered.update(dict.fromkeys(causes, f"{place} needs what comes of it in one piece"))

    def _bring_states_home(self) -> None:
        """A state must have the same layout after a step as before."""
        for value, name in self._states.items():
            before, after = self.layout(value), self.layout(self.graph.outputs[name])
            if before is not None and after is not None and before.matches(after):
                before.join(after)
            elif before is not None or after is not None:
                self.gathered[name] = "its layout after a step differs from that before"
                for layout in (before, after):
                    if layout is not None and name in self._hints.whole:
                        self._regret(layout)

    def _spread_over_repeats(self) -> None:
        """Every iteration divides its weights and states as the first does, and hands on what it was handed."""
        for repeat in self.graph.repeats:
            for rows in (repeat.taken, repeat.given):
                for first, others in rows.items():
                    self.layouts.update(dict.fromkeys(others, self.layout(first)))
            for before, after in repeat.carried.items():
                if self.layout(before) is None:
                    self.whole(after)
                else:
                    self.whole(before)


def can_be_divided(layout: Layout) -> bool:
    """A single unit is whole on every rank: the one key head of multi-query attention."""
    return layout is not None and any(cut.units > 1 for cut in layout.cuts)


def shifted(layout: Split, by: int) -> Split:
    return layout.at(layout.axis + by)


def lined_up(walk: Walk, operands: Sequence[Value], rank: int) -> Split | None:
    """The first layout among operands that broadcast together, in the axes of the result."""
    for operand in operands:
        layout = walk.layout(operand)
        if layout is not None:
            return shifted(layout, rank - operand.type.rank)
    return None
