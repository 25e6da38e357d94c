"""Which rank holds which piece of which weight: found once for a graph, then asked for any degree.

The division follows from the graph: a weight that meets whole rows is divided by its outputs, one that meets divided
rows by its inputs. The model's own published plan, where there is one, says which weights may be divided by outputs.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from emulator.errors import CompileError
from emulator.graph import Graph, Value
from emulator.passes.shard.layout import Cut, Layout
from emulator.passes.shard.rules import rule_of
from emulator.passes.shard.walk import Hints, Walk
from emulator.types import TensorType

# Each walk leaves fewer weights divided or more seams known, so it ends by itself.
_MOST_WALKS = 64
_PATIENT_WALKS = 16
_BY_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output", "embedding_rowwise")


class DegreeImpossible(CompileError):
    """A model cannot be divided among so many ranks."""


@dataclass(frozen=True)
class Piece:
    """A rank's share of a tensor: of each block of an axis, one of so many parts. One part means all of the block."""

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]

    def local(self, whole: TensorType) -> TensorType:
        length = sum(size // parts for size, parts in zip(self.sizes, self.parts, strict=True))
        return whole.with_shape((*whole.shape[: self.axis], length, *whole.shape[self.axis + 1 :]))


@dataclass(frozen=True)
class Plan:
    """The division of a graph among `degree` ranks. What is not listed is whole on every rank."""

    degree: int
    parameters: Mapping[str, Piece]
    states: Mapping[str, Piece]
    reason: str | None  # why this degree is impossible
    walk: Walk = field(repr=False, compare=False)

    def bytes_per_rank(self, graph: Graph) -> int:
        """What the weights take on each rank; all ranks hold the same."""
        return sum(self.local(name, value.type).nbytes for name, value in graph.parameters.items())

    def local(self, name: str, whole: TensorType) -> TensorType:
        """The type of one rank's piece of a parameter or a state."""
        piece = self.parameters.get(name) or self.states.get(name)
        return piece.local(whole) if piece else whole


@dataclass(frozen=True)
class Division:
    """How a graph can be divided, for any degree."""

    graph: Graph
    walk: Walk

    def plan(self, degree: int) -> Plan:
        """The plan at a degree; `reason` says why if there is none."""
        parameters, states = (self._pieces(side, degree) for side in (self.graph.parameters, self.graph.inputs))
        return Plan(degree, parameters, states, self._obstacle(degree), self.walk)

    def degrees(self) -> list[int]:
        """All that are possible: each divides what must be shared evenly."""
        most = math.gcd(*[cut.units for cut in self._cuts() if cut.even]) or 1
        return [degree for degree in range(1, most + 1) if most % degree == 0 and self._possible(degree)]

    def _pieces(self, values: Mapping[str, Value], degree: int) -> dict[str, Piece]:
        pieces = {}
        for name, value in values.items():
            layout = self.walk.layout(value)
            if layout is not None and max(layout.parts(degree)) > 1:
                pieces[name] = Piece(layout.axis, layout.sizes, layout.parts(degree))
        return pieces

    def _cuts(self) -> dict[Cut, None]:
        layouts: list[Layout] = [*self.walk.layouts.values()]
        return dict.fromkeys(cut.root() for layout in layouts if layout is not None for cut in layout.cuts)

    def _obstacle(self, degree: int) -> str | None:
        if self._possible(degree):
            return None
        way_out = f"degrees that work: {', '.join(map(str, self.degrees()))}"
        bad = next((cut for cut in self._cuts() if not cut.allows(degree)), None)
        if bad is None:
            return f"no weight of this model can be divided among {degree} ranks; {way_out}"
        keys = [str(cut.units) for cut in bad.served_by]
        served = f" and the {keys[0]} key heads that serve them" if keys else ""
        return f"the {bad.units} units of {bad.name}{served} cannot be shared by {degree} ranks; {way_out}"

    def _possible(self, degree: int) -> bool:
        cuts = self._cuts()
        return degree == 1 or (any(cut.even for cut in cuts) and all(cut.allows(degree) for cut in cuts))


def divide(graph: Graph, published: Mapping[str, str] | None = None) -> Division:
    """Find the division of a graph, walking it until nothing has to be gathered that was divided."""
    hints = Hints()
    may_split = _published(graph, published or {})
    for number in range(_MOST_WALKS):
        walk = Walk(graph, may_split, hints)
        walk.run(rule_of)
        # What came of a first regret may be regretted in vain, so that for a while only the first is learned from.
        regretted = list(walk.gathered)
        better = _learned(hints, walk, regretted[:1] if number < _PATIENT_WALKS else regretted)
        if better == hints:
            return Division(graph, walk)
        hints = better
    raise CompileError("the division of this graph does not settle; compile it with a tensor-parallel degree of 1")


def plan(graph: Graph, degree: int, published: Mapping[str, str] | None = None) -> Plan:
    """The division of a graph among so many ranks."""
    return divide(graph, published).plan(degree)


def _learned(hints: Hints, walk: Walk, regretted: Sequence[str]) -> Hints:
    """Seams first: what they allow to stay divided need not be made whole."""
    new = {name: tuple(sorted(places)) for name, places in walk.seams.items() if places}
    if new:
        old = hints.seams
        return Hints(hints.whole, {**old, **{n: tuple(sorted({*old.get(n, ()), *p})) for n, p in new.items()}})
    return Hints(hints.whole.union(regretted), hints.seams)


def _published(graph: Graph, plan: Mapping[str, str]) -> Callable[[str], bool]:
    """Which weights a published plan divides by outputs; any, if it names none of this graph's."""
    patterns = [_pattern(name) for name, style in plan.items() if style in _BY_OUTPUTS]
    named = {name for name in graph.parameters if any(pattern.search(name) for pattern in patterns)}
    tables = {name for name in graph.parameters if "embed" in name}
    return (lambda name: name in named | tables) if named else (lambda name: True)


def _pattern(published: str) -> re.Pattern[str]:
    """`layers.*.mlp.up_proj` names a module or a parameter, below whatever the whole model calls its base."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in published.split(".")]
    return re.compile(r"(^|\.)" + r"\.".join(parts) + r"(\.weight|\.bias|\.\w+)?$")
