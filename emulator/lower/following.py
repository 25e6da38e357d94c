"""Which nodes behind a value can be worked off together with it, piece by piece, and what has to be stored of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.lower.elements import is_applicable, is_exact
from nxpipe.emulator.lower.places import Places
from nxpipe.emulator.lower.reading import Reading
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllReduce, Reshape

_MOST: Final = 8  # nodes taken in: all their tiles are at hand at once


@dataclass(frozen=True)
class Source:
    """An operand that lies in HBM: its number among what is loaded."""

    number: int


@dataclass(frozen=True)
class Link:
    """One node. An operand is a value made before it, one that is loaded, or a constant's number."""

    node: Node
    operands: tuple[Value | Source | float, ...]


@dataclass
class Following:
    """`shape` is that of the pieces' whole; `meets` says whether ranks had better add up a result of that shape while
    it is made."""

    shape: tuple[int, ...]
    places: Places
    reading: Reading
    meets: Callable[[Node, tuple[int, ...]], bool]
    waiting: Mapping[Value, Node]  # nodes that have been put off until now
    links: list[Link] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)
    known: dict[Value, Value] = field(default_factory=dict)  # a view of a tile is the value that the tile was made for

    def start(self, node: Node) -> bool:
        return self._take(node)

    def follow(self, value: Value) -> None:
        """From a value that is made here on: nodes in their order, for as long as there are any."""
        self.known[value] = value
        while len(self.links) < _MOST:
            ready = [node for value in self.known for node in self.reading.behind(value)]
            if not any(self._take(node) for node in ready if node.result not in self.known):
                return

    def combines(self, results: Sequence[Value]) -> bool:
        """Whether all of these meet in one node."""
        come = {result: {result} for result in results}
        for link in self.links:
            values = [each for each in link.operands if isinstance(each, Value)]
            come[link.node.result] = set().union(*(come.get(value, ()) for value in values))
        return any(len(each) == len(results) for each in come.values())

    def finished(self, read_here: Sequence[Node] = ()) -> tuple[set[Value], list[Value]]:
        """The results that nobody else has to make, and those of tiles that have to be stored, since others than these
        nodes read them."""
        done, needed = {*self.known, *(node.result for node in read_here)}, self.reading.is_needed
        while True:
            kept = {
                value for value, tile in self.known.items() if tile != value and value in done and needed(value, done)
            }
            if not kept:
                break
            done -= kept  # a view of what is stored is made in its own time
        return done, [value for value, tile in self.known.items() if tile == value and needed(value, done)]

    def _take(self, node: Node) -> bool:
        if self._is_view(node):
            if node.operands[0] not in self.known:
                return False
            self.known[node.result] = self.known[node.operands[0]]
            return True
        if isinstance(node.op, AllReduce):
            taken = self._adds_up(node)
        else:
            taken = is_applicable(node) and node.result.type.elements == prod(self.shape)
        return taken and self._link(node)

    def _is_view(self, node: Node) -> bool:
        """Whether its result is the same numbers: engines and DMA widen what they read by themselves."""
        return isinstance(node.op, Reshape) or (is_exact(node) and node.result not in self.places.homes)

    def _adds_up(self, node: Node) -> bool:
        """Ranks add where the tile lies, so that nobody else may want to see it before."""
        tile = self.known.get(node.operands[0])
        names = [value for value, known in self.known.items() if known == tile]
        return tile is not None and all(map(self.reading.only, names)) and self.meets(node, self.shape)

    def _link(self, node: Node) -> bool:
        absent = [each for each in node.operands if each not in self.known and each not in self.places.views]
        if not all(each in self.waiting for each in absent):
            return False
        if not all(each in self.known or self._take(self.waiting[each]) for each in absent):
            return False
        sources, operands = list(self.sources), []
        for operand in node.operands:
            found = self._operand(operand, node, sources)
            if found is None:
                return False
            operands.append(found)
        self.sources = sources
        self.links.append(Link(node, tuple(operands)))
        self.known[node.result] = node.result
        return True

    def _operand(self, operand: Value, node: Node, sources: list[View]) -> Value | Source | float | None:
        whole = operand.type.elements == node.result.type.elements
        if operand in self.known:  # stretched by axes of size one at most
            return self.known[operand] if whole else None
        number = self.places.number(operand)
        if number is not None:
            return number
        view = self.places.views.get(operand)
        flat = view.broadcast(node.result.type.shape).reshaped(self.shape) if view else None
        if flat is None:
            return None
        if flat not in sources:
            sources.append(flat)
        return Source(sources.index(flat))
