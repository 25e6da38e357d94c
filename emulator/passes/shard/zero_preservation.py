"""Zero preservation: where units of zeros would change a result, so that work may not be padded with them.

Padding begins as zeros, for its weights are zeros, and flows through the graph beside everything else. It does no harm
as long as it is multiplied with zeros before anything is summed over it, unless it has become infinite or NaN by then,
as the reciprocal of zero does. So the value of the padding is computed along with the graph, node by node.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
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
from nxpipe.emulator.passes.shard.propagation import Walk

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
