"""Sharding plan: how each value is divided among ranks, and where padding with zeros would change a result.

Padding begins as zeros, for its weights are zeros, and flows through the graph beside everything else. It does no harm
as long as it is multiplied with zeros before anything is summed over it, unless it has become infinite or NaN by then,
as the reciprocal of zero does. So the value of the padding is computed along with the graph, node by node.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    AllGather,
    Attention,
    Binary,
    Broadcast,
    Cast,
    Concat,
    Cumulate,
    Flip,
    Gather,
    GroupedMatMul,
    Index,
    IndexUpdate,
    LayerNorm,
    Linear,
    MatMul,
    Operator,
    Pad,
    Pool,
    RankSlice,
    Reduce,
    Resample,
    Reshape,
    RmsNorm,
    Slice,
    SliceUpdate,
    Softmax,
    Transpose,
    Unary,
    Where,
)
from nxpipe.emulator.ops.collective import Share, shares_of, uneven
from nxpipe.emulator.passes.shard.layout import AxisSplit, Layout
from nxpipe.emulator.passes.shard.propagation import Hints, Walk, can_be_divided
from nxpipe.emulator.passes.shard.sharding_rules import rule_of

# The value of all of a tensor's padding: this number; NaN once an element is not finite; or None for unknown finite
# values, of a kind that the tensor has elsewhere too.
_Content: TypeAlias = float | None

_NAN: Final = float("nan")
_LEFT: Final = (0.5, 1.0, 2.0)  # for something finite: negative bases of broken powers trouble real elements as well
_RIGHT: Final = (-1.0, 0.5, 1.0, 2.0)
_ROUNDS: Final = 3


def forbid_harmful_padding(walk: Walk) -> None:
    """Say of each cut that may not be padded why."""
    states = {value: name for name, value in walk.graph.inputs.items() if name in walk.graph.outputs}
    before: dict[Value, _Content] = dict.fromkeys(states, 0.0)
    for _ in range(_ROUNDS):
        following = _Following(walk, before)
        after = {value: following.of(walk.graph.outputs[name]) for value, name in states.items()}
        joined = {value: _alike(before[value], content) for value, content in after.items()}
        if all(_same(joined[value], before[value]) for value in states):
            return
        before = joined


class _Following:
    """One walk over the graph behind the one that divided it."""

    def __init__(self, walk: Walk, states: Mapping[Value, _Content]) -> None:
        self._walk = walk
        self._contents: dict[Value, _Content] = {**dict.fromkeys(walk.graph.parameters.values(), 0.0), **states}
        self._uniform = {value: _uniform(data) for value, data in walk.graph.constants.items()}
        for node in walk.graph.nodes:
            self._visit(node)

    def of(self, value: Value) -> _Content:
        """The value of the padding of a divided tensor; of a whole tensor its constant value, if known."""
        if self._walk.layout(value) is None:
            return self._uniform.get(value)
        return self._contents.get(value, 0.0)

    def _visit(self, node: Node) -> None:
        verdict = self._walk.verdicts[node.result]
        layouts = [layout for layout in verdict.operands if layout is not None]
        if not layouts or (verdict.result is None and not verdict.reduced):
            return
        contents = [
            self._uniform.get(operand) if wanted is None else self._sliced(operand)
            for operand, wanted in zip(node.operands, verdict.operands, strict=True)
        ]
        if verdict.reduced:
            harmless = isinstance(node.op, Gather) or _sums_to_nothing(node.op, contents)
        else:
            self._contents[node.result] = _made(node, contents)
            harmless = True
        if not harmless:
            why = f"{node.op.label} {node.origin}".strip() + " would sum what zeros become"
            for cut in (cut for layout in layouts for cut in layout.cuts):
                cut.forbid_padding(why)

    def _sliced(self, operand: Value) -> _Content:
        """The padding of an operand's slice: a whole tensor is padded with zeros when a rank takes its share."""
        return 0.0 if self._walk.layout(operand) is None else self._contents.get(operand, 0.0)


def _uniform(data: Array) -> _Content:
    """The constant value of a table, if finite: the infinity of a mask meets real elements as well."""
    alone = data.size and np.isfinite(data.flat[0]) and (data == data.flat[0]).all()
    return float(data.flat[0]) if alone else None


def _alike(*contents: _Content) -> _Content:
    """The common value: NaN if one is not finite, None if they differ or are unknown."""
    if any(content is not None and not np.isfinite(content) for content in contents):
        return _NAN
    return contents[0] if len(set(contents)) == 1 else None


def _same(one: _Content, other: _Content) -> bool:
    return one == other or (one is not None and other is not None and np.isnan(one) and np.isnan(other))


def _sums_to_nothing(op: Operator, contents: list[_Content]) -> bool:
    """A sum over padding is zero: for products, if one factor is zero and the other finite."""
    terms = contents[:2] if isinstance(op, Linear | MatMul | GroupedMatMul) else contents[:1]
    return 0.0 in terms and _alike(*terms) is not _NAN


def _made(node: Node, contents: list[_Content]) -> _Content:
    """The value of the padding of a result."""
    op = node.op
    if isinstance(op, Unary | Binary | Where | Cast):
        return _elementwise(node, contents)
    rule = _RULES.get(type(op))
    if rule is None or _alike(*contents) is _NAN:
        return _NAN
    return rule(op, contents)


def _elementwise(node: Node, contents: list[_Content]) -> _Content:
    """The result of an operator on padding, by evaluation; an unknown finite value is tried as several numbers."""
    if _alike(*contents) is _NAN and not isinstance(node.op, Where):
        return _NAN
    choices = [
        _choices(place, operand.type.dtype) if content is None else (content,)
        for place, (content, operand) in enumerate(zip(contents, node.operands, strict=True))
    ]
    found = set()
    with np.errstate(all="ignore"):
        for numbers in product(*choices):
            operands = zip(numbers, node.operands, strict=True)
            arrays = [_one(number, operand.type) for number, operand in operands]
            found.add(float(node.op.compute(*arrays).flat[0]))
    return _alike(*found)


def _one(number: float, of: TensorType) -> Array:
    """An element of a tensor, or the scalar, which has no say in the type of a result."""
    return np.full((1,) * min(of.rank, 1), number).astype(of.dtype.held)


def _choices(place: int, dtype: DType) -> tuple[float, ...]:
    if dtype is DType.BOOL:
        return (0.0, 1.0)
    return _LEFT if place == 0 else _RIGHT


def _keeps(op: Operator, contents: list[_Content]) -> _Content:
    return contents[0]


def _keeps_zero(op: Operator, contents: list[_Content]) -> _Content:
    return 0.0 if contents[0] == 0 else None


def _together(op: Operator, contents: list[_Content]) -> _Content:
    return _alike(*contents)


def _updated(op: Operator, contents: list[_Content]) -> _Content:
    return _alike(*contents[:2])


def _folded(op: Operator, contents: list[_Content]) -> _Content:
    assert isinstance(op, Reduce)
    return _keeps_zero(op, contents) if op.function in ("sum", "prod") else contents[0]


def _normed(op: Operator, contents: list[_Content]) -> _Content:
    """Nothing, divided by its own size."""
    assert isinstance(op, LayerNorm | RmsNorm)
    if op.epsilon <= 0:
        return _NAN
    shifted = isinstance(op, LayerNorm) and len(contents) > 2
    return None if shifted else _keeps_zero(op, contents)


def _multiplied(op: Operator, contents: list[_Content]) -> _Content:
    return 0.0 if 0.0 in contents[:2] else None


def _layer(op: Operator, contents: list[_Content]) -> _Content:
    """The bias, where nothing else comes."""
    bias = contents[2] if len(contents) > 2 else 0.0
    return bias if 0.0 in contents[:2] else None


def _averaged(op: Operator, contents: list[_Content]) -> _Content:
    """Attention: of nothing but zeros."""
    return 0.0 if contents[2] == 0 else None


def _finite(op: Operator, contents: list[_Content]) -> _Content:
    return None


_RULES: Final[Mapping[type[Operator], Callable[[Operator, list[_Content]], _Content]]] = {
    Attention: _averaged,
    Broadcast: _keeps,
    Concat: _together,
    Cumulate: _keeps_zero,
    Flip: _keeps,
    Gather: _keeps,
    GroupedMatMul: _multiplied,
    Index: _keeps,
    IndexUpdate: _updated,
    LayerNorm: _normed,
    Linear: _layer,
    MatMul: _multiplied,
    Pad: _together,
    Pool: _keeps_zero,
    Reduce: _folded,
    Resample: _keeps_zero,
    Reshape: _keeps,
    RmsNorm: _normed,
    Slice: _keeps,
    SliceUpdate: _updated,
    Softmax: _finite,
    Transpose: _keeps,
}


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
    """The division of a tensor among ranks: each block of one axis into equal parts (one part: replicated).

    `slots` and `lengths` give the slots of a rank for each block where blocks do not divide evenly; the rest of them is
    padding with zeros. See Share.
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

    def split(self, whole: Array, degree: int) -> list[Array]:
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
