"""Sharding plan: the division of each value among ranks, and the splits where padding would change a result.

Padding is zero at first, because its weights are zeros, and propagates through the graph. It is harmless if it is
multiplied by zeros before a sum over it, unless it is infinite or NaN by then, for example the reciprocal of zero. An
abstract interpretation therefore computes the value of the padding, node by node.
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
from nxpipe.emulator.passes.shard.propagation import Hints, Propagation, is_divisible
from nxpipe.emulator.passes.shard.sharding_rules import rule_of

# The value of all elements of a tensor's padding: a number; NaN if an element is not finite; None if the values are
# finite but unknown.
_PaddingValue: TypeAlias = float | None

_NAN: Final = float("nan")
_LEFT: Final = (0.5, 1.0, 2.0)  # samples of unknown finite values; a fractional power of a negative one is NaN
_RIGHT: Final = (-1.0, 0.5, 1.0, 2.0)
_ROUNDS: Final = 3


def forbid_harmful_padding(propagation: Propagation) -> None:
    """Mark each split whose padding would change a result, with the reason."""
    states = {value: name for name, value in propagation.graph.inputs.items() if name in propagation.graph.outputs}
    before: dict[Value, _PaddingValue] = dict.fromkeys(states, 0.0)
    for _ in range(_ROUNDS):
        padding_values = _PaddingPropagation(propagation, before)
        after = {value: padding_values.of(propagation.graph.outputs[name]) for value, name in states.items()}
        joined = {value: _common(before[value], padding_value) for value, padding_value in after.items()}
        if all(_equal(joined[value], before[value]) for value in states):
            return
        before = joined


class _PaddingPropagation:
    """The value of the padding of every value of a sharded graph."""

    def __init__(self, propagation: Propagation, states: Mapping[Value, _PaddingValue]) -> None:
        self._propagation = propagation
        self._paddings: dict[Value, _PaddingValue] = {
            **dict.fromkeys(propagation.graph.parameters.values(), 0.0),
            **states,
        }
        self._uniform = {value: _uniform(data) for value, data in propagation.graph.constants.items()}
        for node in propagation.graph.nodes:
            self._visit(node)

    def of(self, value: Value) -> _PaddingValue:
        """The padding of a divided tensor; the constant value of a replicated tensor, if known."""
        if self._propagation.layout(value) is None:
            return self._uniform.get(value)
        return self._paddings.get(value, 0.0)

    def _visit(self, node: Node) -> None:
        node_sharding = self._propagation.node_shardings[node.result]
        layouts = [layout for layout in node_sharding.operands if layout is not None]
        if not layouts or (node_sharding.result is None and not node_sharding.reduced):
            return
        paddings = [
            self._uniform.get(operand) if operand_sharding is None else self._sliced(operand)
            for operand, operand_sharding in zip(node.operands, node_sharding.operands, strict=True)
        ]
        if node_sharding.reduced:
            harmless = isinstance(node.op, Gather) or _sums_to_zero(node.op, paddings)
        else:
            self._paddings[node.result] = _result_padding(node, paddings)
            harmless = True
        if not harmless:
            reason = f"{node.op.label} {node.origin}".strip() + " would sum padding that is not zero"
            for split in (split for layout in layouts for split in layout.splits):
                split.forbid_padding(reason)

    def _sliced(self, operand: Value) -> _PaddingValue:
        """The padding of an operand's share. The share of a replicated tensor is padded with zeros."""
        return 0.0 if self._propagation.layout(operand) is None else self._paddings.get(operand, 0.0)


def _uniform(data: Array) -> _PaddingValue:
    """The value of a constant table, if it is uniform and finite."""
    alone = data.size and np.isfinite(data.flat[0]) and (data == data.flat[0]).all()
    return float(data.flat[0]) if alone else None


def _common(*paddings: _PaddingValue) -> _PaddingValue:
    """The common value of several paddings: NaN if one is not finite, None if they differ or are unknown."""
    if any(padding_value is not None and not np.isfinite(padding_value) for padding_value in paddings):
        return _NAN
    return paddings[0] if len(set(paddings)) == 1 else None


def _equal(left: _PaddingValue, right: _PaddingValue) -> bool:
    return left == right or (left is not None and right is not None and np.isnan(left) and np.isnan(right))


def _sums_to_zero(op: Operator, paddings: list[_PaddingValue]) -> bool:
    """True if a sum over padding is zero; for products, if one factor is zero and the other finite."""
    terms = paddings[:2] if isinstance(op, Linear | MatMul | GroupedMatMul) else paddings[:1]
    return 0.0 in terms and _common(*terms) is not _NAN


def _result_padding(node: Node, paddings: list[_PaddingValue]) -> _PaddingValue:
    """The value of the padding of a result."""
    op = node.op
    if isinstance(op, Unary | Binary | Where | Cast):
        return _elementwise(node, paddings)
    rule = _RULES.get(type(op))
    if rule is None or _common(*paddings) is _NAN:
        return _NAN
    return rule(op, paddings)


def _elementwise(node: Node, paddings: list[_PaddingValue]) -> _PaddingValue:
    """The padding of an elementwise result, by evaluation; an unknown finite value is sampled."""
    if _common(*paddings) is _NAN and not isinstance(node.op, Where):
        return _NAN
    samples = [
        _samples(index, operand.type.dtype) if padding_value is None else (padding_value,)
        for index, (padding_value, operand) in enumerate(zip(paddings, node.operands, strict=True))
    ]
    results = set()
    with np.errstate(all="ignore"):
        for numbers in product(*samples):
            operands = zip(numbers, node.operands, strict=True)
            arrays = [_element(number, operand.type) for number, operand in operands]
            results.add(float(node.op.compute(*arrays).flat[0]))
    return _common(*results)


def _element(number: float, type_: TensorType) -> Array:
    """One element of a tensor, or a scalar, which does not determine the type of a result."""
    return np.full((1,) * min(type_.rank, 1), number).astype(type_.dtype.held)


def _samples(operand: int, dtype: DType) -> tuple[float, ...]:
    if dtype is DType.BOOL:
        return (0.0, 1.0)
    return _LEFT if operand == 0 else _RIGHT


def _unchanged(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return paddings[0]


def _keeps_zero(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return 0.0 if paddings[0] == 0 else None


def _combined(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return _common(*paddings)


def _updated(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return _common(*paddings[:2])


def _reduced(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    assert isinstance(op, Reduce)
    return _keeps_zero(op, paddings) if op.function in ("sum", "prod") else paddings[0]


def _normed(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    """Zeros, normalized by their own size and the epsilon."""
    assert isinstance(op, LayerNorm | RmsNorm)
    if op.epsilon <= 0:
        return _NAN
    shifted = isinstance(op, LayerNorm) and len(paddings) > 2
    return None if shifted else _keeps_zero(op, paddings)


def _multiplied(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return 0.0 if 0.0 in paddings[:2] else None


def _linear(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    """The bias, if the product is zero."""
    bias = paddings[2] if len(paddings) > 2 else 0.0
    return bias if 0.0 in paddings[:2] else None


def _attended(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    """Attention: zero, if all values are zeros."""
    return 0.0 if paddings[2] == 0 else None


def _finite(op: Operator, paddings: list[_PaddingValue]) -> _PaddingValue:
    return None


_RULES: Final[Mapping[type[Operator], Callable[[Operator, list[_PaddingValue]], _PaddingValue]]] = {
    Attention: _attended,
    Broadcast: _unchanged,
    Concat: _combined,
    Cumulate: _keeps_zero,
    Flip: _unchanged,
    Gather: _unchanged,
    GroupedMatMul: _multiplied,
    Index: _unchanged,
    IndexUpdate: _updated,
    LayerNorm: _normed,
    Linear: _linear,
    MatMul: _multiplied,
    Pad: _combined,
    Pool: _keeps_zero,
    Reduce: _reduced,
    Resample: _keeps_zero,
    Reshape: _unchanged,
    RmsNorm: _normed,
    Slice: _unchanged,
    SliceUpdate: _updated,
    Softmax: _finite,
    Transpose: _unchanged,
}


_BY_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output", "embedding_colwise")
_BY_INPUTS = ("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_rowwise")
_CHOSEN = (*_BY_OUTPUTS, "embedding_rowwise")


def may_split(graph: Graph, published: Mapping[str, str]) -> Callable[[str], bool]:
    """A predicate for the weights that the published plan divides; true for all if it names none of this graph. Plans
    name the layers of an MLP, and not those of the same names in a part of it, such as a shared expert: these are
    divided as well."""
    patterns = [_pattern(name, nested=True) for name, style in published.items() if style in _CHOSEN]
    named = {name for name in graph.parameters if any(pattern.search(name) for pattern in patterns)}
    tables = {name for name in graph.parameters if "embed" in name}
    return (lambda name: name in named | tables) if named else (lambda name: True)


def unmet(propagation: Propagation, kept_whole: Mapping[str, str], published: Mapping[str, str]) -> Iterator[str]:
    """One sentence, with the reason, for each entry of a published plan that the division does not follow.

    `kept_whole` has the reasons of weights that stay whole.
    """
    for entry, style in published.items():
        pattern, expected = _pattern(entry), style in _BY_INPUTS
        if style not in _BY_OUTPUTS + _BY_INPUTS:
            continue
        for name, value in propagation.graph.parameters.items():
            uses = propagation.uses(value) if value.type.rank > 1 and pattern.search(name) else []
            if not uses:
                continue
            by_inputs = any(use.reduced for use in uses)
            if not is_divisible(propagation.layout(value)):
                reason = kept_whole.get(name, "none of its readers can be divided")
                yield f"{entry} is published as {style}, but {name} stays whole: {reason}"
                break
            if by_inputs is not expected:
                direction = "inputs: its operand is divided" if by_inputs else "outputs: its operand is whole"
                yield f"{entry} is published as {style}, but {name} is divided by its {direction}"
                break


def _pattern(published: str, *, nested: bool = False) -> re.Pattern[str]:
    """The pattern for an entry such as `layers.*.mlp.up_proj`: a module or parameter, below any base name; `nested`:
    or in a module of its parent."""
    *parts, last = [r"\d+" if part == "*" else re.escape(part) for part in published.split(".")]
    parts.append((r"(\w+\.)?" if nested and parts else "") + last)
    return re.compile(r"(^|\.)" + r"\.".join(parts) + r"(\.weight|\.bias|\.\w+)?$")


# Each propagation keeps more weights whole or adds block boundaries, so the iteration terminates.
_MOST_PROPAGATIONS = 64
_ONE_CAUSE_AT_A_TIME = 16


class DegreeImpossible(CompileError):
    """A model cannot be divided among this number of ranks; `degrees` are the possible degrees."""

    def __init__(self, reason: str, degrees: Sequence[int]) -> None:
        super().__init__(f"{reason}; degrees that work: {_listed(degrees)}")
        self.reason = reason
        self.degrees = tuple(degrees)


@dataclass(frozen=True)
class Sharding:
    """The sharding of a tensor: each block of one axis is divided into equal parts (one part: replicated).

    If blocks do not divide evenly, `slots` and `lengths` are the slots of a rank for each block; unused slots are
    padded with zeros. See Share.
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
        """The shard of each rank, from a whole tensor."""
        split = RankSlice(self.axis, 1, self.sizes, self.parts, degree, self.slots, self.lengths)
        return [split.piece(whole, rank) for rank in range(degree)]

    def joined(self, shares: Sequence[Array]) -> Array:
        """The whole tensor, from the shards of all ranks."""
        gather = AllGather(self.axis, 1, self.sizes, self.parts, len(shares), self.slots, self.lengths)
        return gather.joined(shares)


@dataclass(frozen=True)
class ShardPlan:
    """The sharding of a graph for `degree` ranks. Parameters and states that are not listed are replicated."""

    degree: int
    parameters: Mapping[str, Sharding]
    states: Mapping[str, Sharding]
    refusal: DegreeImpossible | None  # the error if the degree is not possible
    propagation: Propagation = field(repr=False, compare=False)

    def local(self, name: str, whole: TensorType) -> TensorType:
        """The type of one rank's shard of a parameter or a state."""
        piece = self.parameters.get(name) or self.states.get(name)
        return piece.local(whole) if piece else whole


@dataclass(frozen=True)
class Division:
    """The sharding of a graph, for any degree."""

    graph: Graph
    propagation: Propagation
    unmet: tuple[str, ...]  # deviations from the published plan, with reasons

    def plan(self, degree: int) -> ShardPlan:
        """The plan at a degree; `refusal` is set if the degree is not possible."""
        parameters, states = (self._pieces(side, degree) for side in (self.graph.parameters, self.graph.inputs))
        return ShardPlan(degree, parameters, states, self._obstacle(degree), self.propagation)

    def degrees(self) -> list[int]:
        """The possible degrees, at which only the last ranks may have no part of work that must be shared."""
        splits = self._cuts
        required = [split.units for split in splits if split.required]
        most = min(required) if required else max((split.units for split in splits if split.is_summed), default=1)
        return [degree for degree in range(1, most + 1) if self._possible(degree)]

    def _pieces(self, values: Mapping[str, Value], degree: int) -> dict[str, Sharding]:
        pieces = {}
        for name, value in values.items():
            layout = self.propagation.layout(value)
            if layout is not None and layout.is_divided(degree):
                shares = layout.shares(degree)
                parts = tuple(share.parts for share in shares)
                pieces[name] = Sharding(layout.axis, layout.sizes, parts, *uneven(shares, degree))
        return pieces

    @cached_property
    def _cuts(self) -> dict[AxisSplit, None]:
        layouts: list[Layout] = [*self.propagation.layouts.values()]
        return dict.fromkeys(split.root() for layout in layouts if layout is not None for split in layout.splits)

    def _obstacle(self, degree: int) -> DegreeImpossible | None:
        if self._possible(degree):
            return None
        split = next((split for split in self._cuts if not split.allows(degree)), None)
        if split is None:
            return DegreeImpossible(f"no weight of this model can be divided among {degree} ranks", self.degrees())
        keys = [str(split.units) for split in split.served_by]
        served = f" and the {keys[0]} key heads that serve them" if keys else ""
        reason = f"the {split.units} units of {split.name}{served} cannot be shared by {degree} ranks"
        if split.padding_obstacle:
            reason += f", nor padded: {split.padding_obstacle}"
        return DegreeImpossible(reason, self.degrees())

    def _possible(self, degree: int) -> bool:
        splits = self._cuts
        must_divide = (split for split in splits if split.required or split.is_summed)
        shared = any(not split.share(split.units, degree).is_whole for split in must_divide)
        return degree == 1 or (shared and all(split.allows(degree) for split in splits))


def divide(graph: Graph, published: Mapping[str, str] | None = None) -> Division:
    """The sharding of a graph: repeats the propagation until no divided value has to be gathered."""
    hints = Hints()
    may_divide = may_split(graph, published or {})
    for number in range(_MOST_PROPAGATIONS):
        propagation = Propagation(graph, may_divide, hints)
        propagation.run(rule_of)
        # Later gathers may be consequences of the first one, so at first only the first becomes a hint.
        gathered = list(propagation.gathered.items())
        refined = _refined_hints(hints, propagation, dict(gathered[:1] if number < _ONE_CAUSE_AT_A_TIME else gathered))
        if refined == hints:
            forbid_harmful_padding(propagation)
            return Division(graph, propagation, tuple(unmet(propagation, hints.whole, published or {})))
        hints = refined
    raise CompileError("the sharding of this graph does not converge; compile it with a tensor-parallel degree of 1")


def plan(graph: Graph, degree: int, published: Mapping[str, str] | None = None) -> ShardPlan:
    """The plan of a graph for `degree` ranks."""
    return divide(graph, published).plan(degree)


def _listed(degrees: Sequence[int]) -> str:
    """The degrees as text, consecutive ones as a range."""
    runs: list[list[int]] = []
    for degree in degrees:
        if runs and degree == runs[-1][-1] + 1:
            runs[-1].append(degree)
        else:
            runs.append([degree])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _refined_hints(hints: Hints, propagation: Propagation, gathered: Mapping[str, str]) -> Hints:
    """The hints for the next propagation: new block boundaries first, because they may keep weights divided."""
    new = {name: tuple(sorted(places)) for name, places in propagation.boundaries.items() if places}
    if new:
        known = hints.boundaries
        return Hints(hints.whole, {**known, **{n: tuple(sorted({*known.get(n, ()), *p})) for n, p in new.items()}})
    return Hints({**gathered, **hints.whole}, hints.boundaries)
