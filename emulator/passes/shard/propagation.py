"""Sharding propagation: one traversal of a graph decides the layouts of each node's operands and result across ranks.

Operators without an applicable rule are computed whole on every rank, so every result is correct. The propagation is
repeated with hints from the previous one, which avoid its gathers.
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
class NodeSharding:
    """The layouts of a node's operands and result. If `reduced`, the results of the ranks are partial sums."""

    operands: tuple[Layout, ...]
    result: Layout
    reduced: bool = False


@dataclass(frozen=True)
class Hints:
    """Findings of earlier propagations."""

    whole: Mapping[str, str] = field(default_factory=dict)  # weights that should stay whole, with the reason
    boundaries: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in weights of several tensors


@dataclass(frozen=True)
class _Chain:
    """A parameter or state (`root`) after casts and transpositions."""

    root: Value
    order: tuple[int, ...]  # axis i of the value is axis order[i] of the root


class Propagation:
    """One sharding propagation over a graph: the layout of each value, and the sharding of each node."""

    def __init__(self, graph: Graph, may_split: Callable[[str], bool], hints: Hints) -> None:
        self.graph = graph
        self.layouts: dict[Value, Layout] = {}
        self.node_shardings: dict[Value, NodeSharding] = {}  # by the result of the node
        self.gathered: dict[str, str] = {}  # weights that should stay whole, with reasons, in order
        self.boundaries: dict[str, set[int]] = {}
        self._may_split = may_split
        self._hints = hints
        self._states = {value: name for name, value in graph.inputs.items() if name in graph.outputs}
        self._names = {value: name for name, value in graph.parameters.items()} | self._states
        self._chains = {root: _Chain(root, tuple(range(root.type.rank))) for root in self._names}
        self._links: dict[Value, list[Value]] = {root: [root] for root in self._names}
        self._assigned: set[Value] = set()
        self._divided_weights: list[tuple[str, int, Split]] = []
        self._node: Node | None = None  # the current node
        self.varying = set(graph.inputs.values())
        self.vocabulary = self._largest_embedding()

    def run(self, rule_of: "Callable[[Propagation, Node], Callable[[Propagation, Node], NodeSharding]]") -> None:
        chained = []
        for node in self.graph.nodes:
            if not self.varying.isdisjoint(node.operands):
                self.varying.add(node.result)
            if self._extends_chain(node):
                chained.append(node)
                continue
            self._node = node
            self.node_shardings[node.result] = node_sharding = rule_of(self, node)(self, node)
            self.layouts[node.result] = node_sharding.result if is_divisible(node_sharding.result) else None
        for node in chained:
            self.node_shardings[node.result] = NodeSharding((self.layout(node.operands[0]),), self.layout(node.result))
        self._extend_to_repeats()
        self._match_states()

    def layout(self, value: Value) -> Layout:
        return self.layouts.get(value)

    # The first reader that requires a layout determines the layout of a weight or a state.

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

    def uses(self, weight: Value) -> list[NodeSharding]:
        """The sharding of each node that reads a weight; of repeated layers, only of the first."""
        links = self._links[weight]
        return [self.node_shardings[reader] for link in links for reader in self._readers[link] if reader not in links]

    @cached_property
    def _readers(self) -> Mapping[Value, Sequence[Value]]:
        readers: defaultdict[Value, list[Value]] = defaultdict(list)
        for node in self.graph.nodes:
            for operand in node.operands:
                readers[operand].append(node.result)
        return readers

    def assign(self, value: Value, layout: Split) -> bool:
        """Assign a layout to a weight or state; False for other values and if its layout is already assigned."""
        chain = self._chains.get(value)
        if chain is None or layout.outer != 1 or chain.root in self._assigned:
            return False
        if self._names[chain.root] in self._hints.whole:
            return False
        self._assigned.add(chain.root)
        axis = chain.order[layout.axis]
        for link in self._links[chain.root]:
            self.layouts[link] = layout.at(self._chains[link].order.index(axis))
        return True

    def divide(self, value: Value, axis: int) -> Layout:
        """Divide a weight along an axis by a new split; None if it should stay whole."""
        chain = self._chains.get(value)
        if chain is None or chain.root in self._assigned or chain.root in self._states:
            return None
        name = self._names[chain.root]
        if not self._may_split(name):
            return None
        size = value.type.shape[axis]
        edges = [0, *self._hints.boundaries.get(name, ()), size]
        sizes = tuple(stop - start for start, stop in pairwise(edges))
        layout = Split(axis, 1, sizes, tuple(AxisSplit(block, name) for block in sizes))
        if not self.assign(value, layout):
            return None
        self._divided_weights.append((name, size, layout))
        return layout

    def _largest_embedding(self) -> Value | None:
        """The embedding table of the vocabulary; dividing smaller tables does not pay for the all-reduce."""
        tables = [node.operands[0] for node in self.graph.nodes if isinstance(node.op, Gather) and node.op.axis == 0]
        weights = [table for table in tables if self._is_weight(table)]
        return max(weights, key=lambda table: table.type.shape[0], default=None)

    def _is_weight(self, table: Value) -> bool:
        """True if a table is a weight, possibly after a cast that the propagation has not reached yet."""
        defined = {node.result: node for node in self.graph.nodes if isinstance(node.op, Cast)}
        while table in defined:
            table = defined[table].operands[0]
        return table in self.graph.parameters.values()

    # Requirements of rules on the layouts of operands.

    def align(self, value: Value, layout: Split) -> Split:
        """Require a layout: the value has it, a weight is assigned it, or each rank slices its share."""
        current = self.layout(value)
        if current is not None and current.matches(layout):
            current.join(layout)
        elif current is not None:
            self._record_gather(current)
        else:
            self.assign(value, layout)
        return layout

    def replicate(self, value: Value) -> None:
        """Require a value to be whole on every rank."""
        current = self.layout(value)
        if current is not None:
            self._record_gather(current)
        elif value in self._chains:
            self._assigned.add(self._chains[value].root)

    def require_boundaries(self, layout: Split, *places: int) -> None:
        """Require block boundaries at these positions of a divided axis, where a node splits it."""
        roots = {split.root() for split in layout.splits}
        total = layout.outer * sum(layout.sizes)
        requested = False
        for name, size, divided in self._divided_weights:
            blocks = [number for number, split in enumerate(divided.splits) if split.root() in roots]
            if not blocks:
                continue
            first, length = sum(divided.sizes[: blocks[0]]), sum(divided.sizes[number] for number in blocks)
            boundaries = {first + place * length // total for place in places if place * length % total == 0} - {
                0,
                size,
            }
            new = boundaries.difference(self._hints.boundaries.get(name, ()))
            requested |= bool(new)
            self.boundaries.setdefault(name, set()).update(new)
        if not requested:
            self._record_gather(layout)

    def _record_gather(self, layout: Split) -> None:
        """Record that a divided value must be gathered; its weights stay whole in the next propagation."""
        roots = {split.root() for split in layout.splits}
        causes = [
            name for name, _, divided in self._divided_weights if roots & {split.root() for split in divided.splits}
        ]
        reader = f"{self._node.op.label} {self._node.origin}".strip() if self._node else "the program"
        self.gathered.update(dict.fromkeys(causes, f"{reader} needs the whole result"))

    def _match_states(self) -> None:
        """Check that each state has the same layout before and after a step."""
        for value, name in self._states.items():
            before, after = self.layout(value), self.layout(self.graph.outputs[name])
            if before is not None and after is not None and before.matches(after):
                before.join(after)
            elif before is not None or after is not None:
                self.gathered[name] = "its layout after a step differs from that before"
                for layout in (before, after):
                    if layout is not None and name in self._hints.whole:
                        self._record_gather(layout)

    def _extend_to_repeats(self) -> None:
        """Assign the layouts of the first iteration to later iterations; loop-carried values keep their layout."""
        for repeat in self.graph.repeats:
            for rows in (repeat.taken, repeat.given):
                for first, others in rows.items():
                    self.layouts.update(dict.fromkeys(others, self.layout(first)))
            for before, after in repeat.carried.items():
                if self.layout(before) is None:
                    self.replicate(after)
                else:
                    self.replicate(before)


def is_divisible(layout: Layout) -> bool:
    """True if a layout has more than one unit; the single key head of multi-query attention is replicated."""
    return layout is not None and any(split.units > 1 for split in layout.splits)


def shifted(layout: Split, by: int) -> Split:
    return layout.at(layout.axis + by)


def common_layout(propagation: Propagation, operands: Sequence[Value], rank: int) -> Split | None:
    """The first layout among operands that broadcast together, in terms of the result's axes."""
    for operand in operands:
        layout = propagation.layout(operand)
        if layout is not None:
            return shifted(layout, rank - operand.type.rank)
    return None
