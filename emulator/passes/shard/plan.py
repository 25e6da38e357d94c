"""The sharding plan: each rank's part of each weight, found once for a graph and then asked for any degree.

The division follows from the graph: a weight that multiplies whole rows is divided by its outputs (column parallel),
one that multiplies divided rows by its inputs (row parallel). The plan that a model's authors published in
transformers, such as `("layers.*.mlp.up_proj", "colwise")`, decides where weights are divided by outputs, which is a
choice; the rest follows from the graph.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import AllGather, RankSlice
from nxpipe.emulator.ops.collective import Share, shares_of, uneven
from nxpipe.emulator.passes.shard.layout import AxisSplit, Layout
from nxpipe.emulator.passes.shard.propagation import Hints, Walk, can_be_divided
from nxpipe.emulator.passes.shard.sharding_rules import rule_of
from nxpipe.emulator.passes.shard.zero_preservation import forbid_harmful_padding

_BY_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output", "embedding_colwise")
_BY_INPUTS = ("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_rowwise")
_CHOSEN = (*_BY_OUTPUTS, "embedding_rowwise")


def may_split(graph: Graph, published: Mapping[str, str]) -> Callable[[str], bool]:
    """The weights that the published plan lets be divided; any, if it names none of this graph's."""
    patterns = [_pattern(name) for name, style in published.items() if style in _CHOSEN]
    named = {name for name in graph.parameters if any(pattern.search(name) for pattern in patterns)}
    tables = {name for name in graph.parameters if "embed" in name}
    return (lambda name: name in named | tables) if named else (lambda name: True)


def unmet(walk: Walk, kept_whole: Mapping[str, str], published: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each entry of a plan that a division does not follow, with the reason.

    `kept_whole` says of weights that should have been divided why they are not.
    """
    for entry, style in published.items():
        pattern, wanted = _pattern(entry), style in _BY_INPUTS
        if style not in _BY_OUTPUTS + _BY_INPUTS:
            continue
        for name, value in walk.graph.parameters.items():
            uses = walk.uses(value) if value.type.rank > 1 and pattern.search(name) else []
            if not uses:
                continue
            found = any(use.reduced for use in uses)
            if not can_be_divided(walk.layout(value)):
                why = kept_whole.get(name, "nothing that reads it can be divided")
                yield f"{entry} is published as {style}, but {name} stays whole: {why}"
                break
            if found is not wanted:
                way = "inputs: what it meets is divided" if found else "outputs: what it meets is whole"
                yield f"{entry} is published as {style}, but {name} is divided by its {way}"
                break


def _pattern(published: str) -> re.Pattern[str]:
    """`layers.*.mlp.up_proj` names a module or a parameter, below any base name of the whole model."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in published.split(".")]
    return re.compile(r"(^|\.)" + r"\.".join(parts) + r"(\.weight|\.bias|\.\w+)?$")


# Each walk leaves fewer weights divided or more seams known, so it ends by itself.
_MOST_WALKS = 64
_PATIENT_WALKS = 16


class DegreeImpossible(CompileError):
    """A model cannot be divided among so many ranks; `degrees` are those that it can."""

    def __init__(self, reason: str, degrees: Sequence[int]) -> None:
        super().__init__(f"{reason}; degrees that work: {_listed(degrees)}")
        self.reason = reason
        self.degrees = tuple(degrees)


@dataclass(frozen=True)
class Sharding:
    """A rank's share of a tensor: of each block of an axis, one of so many parts. One part means all of the block.

    `slots` and `lengths` say of each block what room a rank has, where blocks do not go up evenly; what they do not
    fill of it is zeros. See Share.
    """

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    slots: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def shares(self) -> tuple[Share, ...]:
        return shares_of(self.sizes, self.parts, self.slots, self.lengths)

    def local(self, whole: TensorType) -> TensorType:
        length = sum(share.local for share in self.shares)
        return whole.with_shape((*whole.shape[: self.axis], length, *whole.shape[self.axis + 1 :]))

    def whole(self, local: TensorType) -> TensorType:
        return local.with_shape((*local.shape[: self.axis], sum(self.sizes), *local.shape[self.axis + 1 :]))

    def parted(self, whole: Array, degree: int) -> list[Array]:
        """The share of each rank, from a whole tensor."""
        cut = RankSlice(self.axis, 1, self.sizes, self.parts, degree, self.slots, self.lengths)
        return [cut.piece(whole, rank) for rank in range(degree)]

    def joined(self, shares: Sequence[Array]) -> Array:
        """The whole tensor, from the shares of ranks."""
        gather = AllGather(self.axis, 1, self.sizes, self.parts, len(shares), self.slots, self.lengths)
        return gather.joined(shares)


@dataclass(frozen=True)
class ShardPlan:
    """The division of a graph among `degree` ranks. What is not listed is whole on every rank."""

    degree: int
    parameters: Mapping[str, Sharding]
    states: Mapping[str, Sharding]
    refusal: DegreeImpossible | None  # the reason if there is no plan
    walk: Walk = field(repr=False, compare=False)

    def local(self, name: str, whole: TensorType) -> TensorType:
        """The type of one rank's piece of a parameter or a state."""
        piece = self.parameters.get(name) or self.states.get(name)
        return piece.local(whole) if piece else whole


@dataclass(frozen=True)
class Division:
    """The division of a graph, for any degree."""

    graph: Graph
    walk: Walk
    unmet: tuple[str, ...]  # what of the published plan is not followed, and why

    def plan(self, degree: int) -> ShardPlan:
        """The plan at a degree; `refusal` has the reason if there is none."""
        parameters, states = (self._pieces(side, degree) for side in (self.graph.parameters, self.graph.inputs))
        return ShardPlan(degree, parameters, states, self._obstacle(degree), self.walk)

    def degrees(self) -> list[int]:
        """The possible degrees, at which only the last ranks may have no part of work that must be shared."""
        cuts = self._cuts
        even = [cut.units for cut in cuts if cut.even]
        most = min(even) if even else max((cut.units for cut in cuts if cut.added), default=1)
        return [degree for degree in range(1, most + 1) if self._possible(degree)]

    def _pieces(self, values: Mapping[str, Value], degree: int) -> dict[str, Sharding]:
        pieces = {}
        for name, value in values.items():
            layout = self.walk.layout(value)
            if layout is not None and layout.is_divided(degree):
                shares = layout.shares(degree)
                parts = tuple(share.parts for share in shares)
                pieces[name] = Sharding(layout.axis, layout.sizes, parts, *uneven(shares, degree))
        return pieces

    @cached_property
    def _cuts(self) -> dict[AxisSplit, None]:
        layouts: list[Layout] = [*self.walk.layouts.values()]
        return dict.fromkeys(cut.root() for layout in layouts if layout is not None for cut in layout.cuts)

    def _obstacle(self, degree: int) -> DegreeImpossible | None:
        if self._possible(degree):
            return None
        bad = next((cut for cut in self._cuts if not cut.allows(degree)), None)
        if bad is None:
            return DegreeImpossible(f"no weight of this model can be divided among {degree} ranks", self.degrees())
        keys = [str(cut.units) for cut in bad.served_by]
        served = f" and the {keys[0]} key heads that serve them" if keys else ""
        why = f"the {bad.units} units of {bad.name}{served} cannot be shared by {degree} ranks"
        if bad.unpadded:
            why += f", nor padded: {bad.unpadded}"
        return DegreeImpossible(why, self.degrees())

    def _possible(self, degree: int) -> bool:
        cuts = self._cuts
        shared = any(not cut.share(cut.units, degree).is_whole for cut in cuts if cut.even or cut.added)
        return degree == 1 or (shared and all(cut.allows(degree) for cut in cuts))


def divide(graph: Graph, published: Mapping[str, str] | None = None) -> Division:
    """Find the division of a graph, walking it until nothing has to be gathered that was divided."""
    hints = Hints()
    chosen = may_split(graph, published or {})
    for number in range(_MOST_WALKS):
        walk = Walk(graph, chosen, hints)
        walk.run(rule_of)
        # What came of a first regret may be regretted in vain, so that for a while only the first is learned from.
        regretted = list(walk.gathered.items())
        better = _learned(hints, walk, dict(regretted[:1] if number < _PATIENT_WALKS else regretted))
        if better == hints:
            forbid_harmful_padding(walk)
            return Division(graph, walk, tuple(unmet(walk, hints.whole, published or {})))
        hints = better
    raise CompileError("the division of this graph does not settle; compile it with a tensor-parallel degree of 1")


def plan(graph: Graph, degree: int, published: Mapping[str, str] | None = None) -> ShardPlan:
    """The division of a graph among so many ranks."""
    return divide(graph, published).plan(degree)


def _listed(degrees: Sequence[int]) -> str:
    """Neighbours as a range."""
    runs: list[list[int]] = []
    for degree in degrees:
        if runs and degree == runs[-1][-1] + 1:
            runs[-1].append(degree)
        else:
            runs.append([degree])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _learned(hints: Hints, walk: Walk, regretted: Mapping[str, str]) -> Hints:
    """Seams first: what they allow to stay divided need not be made whole."""
    new = {name: tuple(sorted(places)) for name, places in walk.seams.items() if places}
    if new:
        old = hints.seams
        return Hints(hints.whole, {**old, **{n: tuple(sorted({*old.get(n, ()), *p})) for n, p in new.items()}})
    return Hints({**regretted, **hints.whole}, hints.seams)
