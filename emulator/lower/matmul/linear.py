"""Matrix products: rows of activations times a weight, alone or for each of a batch.

Products that read the same rows are found here and written `together`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from nxpipe.emulator.ir.graph import Node, Value
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.epilogue import EpilogueFusion
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.operands import HbmRows, OutputGroup, RowSharding, WeightOperand
from nxpipe.emulator.lower.transpose import chunks_of
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllGather, Linear, MatMul, ReduceScatter


@lowers(Linear, MatMul)
def _matmul(low: Lowering, node: Node, op: Linear | MatMul) -> None:
    if not _has_one_weight(node):
        _batched_matmul(low, node)
        return
    x, *_ = node.operands
    rows = HbmRows(low.k, row_matrix(low, x), x.type.dtype.on_device)
    MatmulKernel(low.k, rows, output_groups(low, matmuls_of(low, x, node.result))).write()


def _batched_matmul(low: Lowering, node: Node) -> None:
    a, b = node.operands
    *batch, rows, columns = node.result.type.shape
    ending = low.ending(node.result, columns)
    left, right = low.lying(a), low.view(b)
    views = [left.broadcast((*batch, *left.shape[-2:])), right.broadcast((*batch, *right.shape[-2:]))]
    for at, (left, right) in batch_loop(low.k, views, len(batch)):
        factor = WeightOperand(node.result, right, None, b.type.dtype.on_device, node.result.type.dtype.on_device)
        loaded = HbmRows(low.k, left, a.type.dtype.on_device)
        MatmulKernel(low.k, loaded, (OutputGroup((factor,), ending, low.note(node)),), at * rows).write()


def _has_one_weight(node: Node) -> bool:
    """For all rows."""
    return isinstance(node.op, Linear) or all(size == 1 for size in node.operands[1].type.shape[:-2])


def matmuls_of(low: Lowering, rows: Value, result: Value) -> list[Node]:
    """All that can be made of these rows together with the result of a node."""
    return [
        node
        for node in low.at_hand(rows, result)
        if isinstance(node.op, Linear | MatMul)
        and _has_one_weight(node)
        and node.operands[0] == rows
        and rows not in node.operands[1:]
    ]


def output_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Products of the same rows, with what follows them; those together whose results meet there."""
    shared = {node: reduce_scatter_of(low, node) for node in nodes}
    parts = [_sharded_group(low, node, sum_) for node, sum_ in shared.items() if sum_ is not None]
    return (*parts, *_fused_groups(low, [node for node, sum_ in shared.items() if sum_ is None]))


def _sharded_group(low: Lowering, node: Node, sum_: Node) -> OutputGroup:
    """What follows is done by each rank to its share of the rows."""
    result = sum_.result
    found = low.following(result, result.type.shape[-1])
    found.follow(result)
    ending = low.ended(found, result, [node])
    return OutputGroup((replace(_operand(low, node), result=result),), ending, low.note(node), row_sharding(low, sum_))


def reduce_scatter_of(low: Lowering, node: Node) -> Node | None:
    """The node in which ranks add up this product, each its share of the rows, if that can be done as it is made: all
    ranks' rows for all lanes have to be at hand, and leave as much room again for the weights and what follows."""
    sum_ = low.only(node.result)
    if sum_ is None or not isinstance(sum_.op, ReduceScatter) or row_sharding(low, sum_) is None:
        return None
    x = node.operands[0].type
    room = chunks_of(x.shape[-1]) * PARTITIONS * low.ranks * x.dtype.on_device.itemsize
    return sum_ if 0 < 2 * room <= low.k.left(Memory.SBUF) else None


def row_sharding(low: Lowering, node: Node) -> RowSharding | None:
    """How ranks share rows, if they do so in runs that fill their lanes together."""
    op = node.op
    if not isinstance(op, AllGather | ReduceScatter) or op.degree != low.ranks or op.axis != node.result.type.rank - 2:
        return None
    even = op.parts == (op.degree,) and not op.slots
    fills = op.local > 0 == PARTITIONS % op.local == op.outer * op.local % PARTITIONS
    return RowSharding(op.degree, op.local) if even and fills else None


def _fused_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    meeting: list[tuple[list[Node], EpilogueFusion]] = []
    for node in nodes:
        for number, (others, _) in enumerate(meeting):
            found = _fusion(low, [*others, node])
            if found is not None:
                meeting[number] = ([*others, node], found)
                break
        else:
            alone = _fusion(low, [node])
            assert alone is not None  # one meets itself
            meeting.append(([node], alone))
    return tuple(
        OutputGroup(tuple(_operand(low, node) for node in group), low.ended(found, group[0].result), low.note(group[0]))
        for group, found in meeting
    )


def _fusion(low: Lowering, nodes: Sequence[Node]) -> EpilogueFusion | None:
    """What follows these products, if they are equally wide and what follows combines all of them."""
    if len({node.result.type.shape[-1] for node in nodes}) > 1:
        return None
    found = low.following(nodes[0].result, nodes[0].result.type.shape[-1])
    for node in nodes:
        found.follow(node.result)
    return found if found.combines([node.result for node in nodes]) else None


def _operand(low: Lowering, node: Node) -> WeightOperand:
    _, weight, *bias = node.operands
    view = low.view(weight)
    stands = view.transposed((1, 0)) if isinstance(node.op, Linear) else view.reshaped(view.shape[-2:])
    assert stands is not None  # axes of size 1 are always gone
    out = node.result.type.dtype.on_device
    return WeightOperand(node.result, stands, low.view(bias[0]) if bias else None, weight.type.dtype.on_device, out)


def row_matrix(low: Lowering, x: Value) -> View:
    """As they lie."""
    return as_matrix(low, low.lying(x), prod(x.type.shape[:-1]), x.type.shape[-1])


def as_matrix(low: Lowering, view: View, rows: int, width: int) -> View:
    """As a matrix; packed where strides cannot say it."""
    made = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert made is not None  # packed rows are a matrix
    return made


def batch_loop(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """The number of each combination of the leading axes, and what the views are there."""
    if not axes:
        yield Affine(), list(views)
        return
    size = views[0].shape[0]
    if not size:
        return
    with k.loop(size) as index:
        for inner, inside in batch_loop(k, [view.pick(0, index) for view in views], axes - 1):
            yield index * prod(views[0].shape[1:axes]) + inner, inside
