"""Matrix products: rows of activations times a weight, alone or for each of a batch.

Products that read the same rows are found here and written `together`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.factors import Factor, Loaded, Part, Sharing
from nxpipe.emulator.lower.following import Following
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.together import Products
from nxpipe.emulator.lower.turned import chunks_of
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import AllGather, Linear, MatMul, ReduceScatter


@lowers(Linear, MatMul)
def _product(low: Lowering, node: Node, op: Linear | MatMul) -> None:
    if not _has_one_weight(node):
        _batch(low, node)
        return
    x, *_ = node.operands
    rows = Loaded(low.k, rows_of(low, x), on_device(x.type.dtype))
    Products(low.k, rows, parts_of(low, products_of(low, x, node.result))).write()


def _batch(low: Lowering, node: Node) -> None:
    a, b = node.operands
    *batch, rows, columns = node.result.type.shape
    ending = low.ending(node.result, columns)
    left, right = low.lying(a), low.view(b)
    views = [left.broadcast((*batch, *left.shape[-2:])), right.broadcast((*batch, *right.shape[-2:]))]
    for at, (left, right) in each_of_batch(low.k, views, len(batch)):
        factor = Factor(node.result, right, None, on_device(b.type.dtype), on_device(node.result.type.dtype))
        loaded = Loaded(low.k, left, on_device(a.type.dtype))
        Products(low.k, loaded, (Part((factor,), ending, low.note(node)),), at * rows).write()


def _has_one_weight(node: Node) -> bool:
    """For all rows."""
    return isinstance(node.op, Linear) or all(size == 1 for size in node.operands[1].type.shape[:-2])


def products_of(low: Lowering, rows: Value, result: Value) -> list[Node]:
    """All that can be made of these rows together with the result of a node."""
    return [
        node
        for node in low.at_hand(rows, result)
        if isinstance(node.op, Linear | MatMul)
        and _has_one_weight(node)
        and node.operands[0] == rows
        and rows not in node.operands[1:]
    ]


def parts_of(low: Lowering, nodes: Sequence[Node]) -> tuple[Part, ...]:
    """Products of the same rows, with what follows them; those together whose results meet there."""
    shared = {node: shared_by(low, node) for node in nodes}
    parts = [_part_of_ranks(low, node, sum_) for node, sum_ in shared.items() if sum_ is not None]
    return (*parts, *_parts_of_one(low, [node for node, sum_ in shared.items() if sum_ is None]))


def _part_of_ranks(low: Lowering, node: Node, sum_: Node) -> Part:
    """What follows is done by each rank to its share of the rows."""
    result = sum_.result
    found = low.following(result, result.type.shape[-1])
    found.follow(result)
    ending = low.ended(found, result, [node])
    return Part((replace(_factor(low, node), result=result),), ending, low.note(node), sharing_of(low, sum_))


def shared_by(low: Lowering, node: Node) -> Node | None:
    """The node in which ranks add up this product, each its share of the rows, if that can be done as it is made: all
    ranks' rows for all lanes have to be at hand, and leave as much room again for the weights and what follows."""
    sum_ = low.only(node.result)
    if sum_ is None or not isinstance(sum_.op, ReduceScatter) or sharing_of(low, sum_) is None:
        return None
    x = node.operands[0].type
    room = chunks_of(x.shape[-1]) * PARTITIONS * low.ranks * on_device(x.dtype).itemsize
    return sum_ if 0 < 2 * room <= low.k.left(Memory.SBUF) else None


def sharing_of(low: Lowering, node: Node) -> Sharing | None:
    """How ranks share rows, if they do so in runs that fill their lanes together."""
    op = node.op
    if not isinstance(op, AllGather | ReduceScatter) or op.degree != low.ranks or op.axis != node.result.type.rank - 2:
        return None
    even = op.parts == (op.degree,) and not op.slots
    fills = op.local > 0 == PARTITIONS % op.local == op.outer * op.local % PARTITIONS
    return Sharing(op.degree, op.local) if even and fills else None


def _parts_of_one(low: Lowering, nodes: Sequence[Node]) -> tuple[Part, ...]:
    meeting: list[tuple[list[Node], Following]] = []
    for node in nodes:
        for number, (others, _) in enumerate(meeting):
            found = _following(low, [*others, node])
            if found is not None:
                meeting[number] = ([*others, node], found)
                break
        else:
            alone = _following(low, [node])
            assert alone is not None  # one meets itself
            meeting.append(([node], alone))
    return tuple(
        Part(tuple(_factor(low, node) for node in group), low.ended(found, group[0].result), low.note(group[0]))
        for group, found in meeting
    )


def _following(low: Lowering, nodes: Sequence[Node]) -> Following | None:
    """What follows these products, if they are equally wide and what follows combines all of them."""
    if len({node.result.type.shape[-1] for node in nodes}) > 1:
        return None
    found = low.following(nodes[0].result, nodes[0].result.type.shape[-1])
    for node in nodes:
        found.follow(node.result)
    return found if found.combines([node.result for node in nodes]) else None


def _factor(low: Lowering, node: Node) -> Factor:
    _, weight, *bias = node.operands
    view = low.view(weight)
    stands = view.transposed((1, 0)) if isinstance(node.op, Linear) else view.reshaped(view.shape[-2:])
    assert stands is not None  # axes of size 1 are always gone
    out = on_device(node.result.type.dtype)
    return Factor(node.result, stands, low.view(bias[0]) if bias else None, on_device(weight.type.dtype), out)


def rows_of(low: Lowering, x: Value) -> View:
    """As they lie."""
    return as_rows(low, low.lying(x), prod(x.type.shape[:-1]), x.type.shape[-1])


def as_rows(low: Lowering, view: View, rows: int, width: int) -> View:
    """As a matrix; packed where strides cannot say it."""
    made = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert made is not None  # packed rows are a matrix
    return made


def each_of_batch(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """The number of each combination of the leading axes, and what the views are there."""
    if not axes:
        yield Affine(), list(views)
        return
    size = views[0].shape[0]
    if not size:
        return
    with k.loop(size) as turn:
        for inner, inside in each_of_batch(k, [view.pick(0, turn) for view in views], axes - 1):
            yield turn * prod(views[0].shape[1:axes]) + inner, inside
