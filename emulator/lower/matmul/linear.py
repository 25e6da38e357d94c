"""Matmuls of rows by weights, alone or batched; matmuls that read the same rows are emitted as one kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.lower.grouping import EpilogueFusion, has_one_weight
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.lowering import Lowering, lowers
from nxpipe.emulator.lower.matmul.kernel import MatmulKernel
from nxpipe.emulator.lower.matmul.operands import HbmRows, OutputGroup, WeightOperand
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.ops import Linear, MatMul


@lowers(Linear, MatMul)
def _matmul(low: Lowering, node: Node, op: Linear | MatMul) -> None:
    if not has_one_weight(node):
        _batched_matmul(low, node)
        return
    x, *_ = node.operands
    rows = HbmRows(low.k, row_matrix(low, x), x.type.dtype.on_device)
    MatmulKernel(low.k, rows, output_groups(low, low.groups.matmuls_of(x, node.result))).write()


def _batched_matmul(low: Lowering, node: Node) -> None:
    a, b = node.operands
    *batch, rows, columns = node.result.type.shape
    epilogue = low.epilogue(node.result, columns)
    left, right = low.stored_view(a), low.view(b)
    views = [left.broadcast((*batch, *left.shape[-2:])), right.broadcast((*batch, *right.shape[-2:]))]
    for at, (left, right) in batch_loop(low.k, views, len(batch)):
        factor = WeightOperand(node.result, right, None, b.type.dtype.on_device, node.result.type.dtype.on_device)
        loaded = HbmRows(low.k, left, a.type.dtype.on_device)
        MatmulKernel(low.k, loaded, (OutputGroup((factor,), epilogue, low.note(node)),), at * rows).write()


def output_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Output groups of matmuls that read the same rows: those share a group whose results meet in an epilogue."""
    sums = {node: low.groups.reduce_scatter_of(node) for node in nodes}
    sharded = [_sharded_group(low, node, found) for node, found in sums.items() if found is not None]
    return (*sharded, *_fused_groups(low, [node for node, found in sums.items() if found is None]))


def _sharded_group(low: Lowering, node: Node, scatter: Node) -> OutputGroup:
    """A matmul whose results ranks reduce-scatter; each rank applies the epilogue to its share of the rows."""
    result = scatter.result
    epilogue = low.fuse_epilogue(low.groups.epilogue(result, result.type.shape[-1]), result, [node])
    operand = replace(_operand(low, node), result=result)
    return OutputGroup((operand,), epilogue, low.note(node), low.groups.row_sharding(scatter))


def _fused_groups(low: Lowering, nodes: Sequence[Node]) -> tuple[OutputGroup, ...]:
    """Each matmul joins the first group with which its result meets in a common epilogue, else begins a new one."""
    meeting: list[tuple[list[Node], EpilogueFusion]] = []
    for node in nodes:
        for number, (others, _) in enumerate(meeting):
            found = low.groups.common_epilogue([*others, node])
            if found is not None:
                meeting[number] = ([*others, node], found)
                break
        else:
            alone = low.groups.common_epilogue([node])
            assert alone is not None  # a single result meets itself
            meeting.append(([node], alone))
    return tuple(
        OutputGroup(
            tuple(_operand(low, node) for node in group), low.fuse_epilogue(found, group[0].result), low.note(group[0])
        )
        for group, found in meeting
    )


def _operand(low: Lowering, node: Node) -> WeightOperand:
    _, weight, *bias = node.operands
    view = low.view(weight)
    stands = view.transposed((1, 0)) if isinstance(node.op, Linear) else view.reshaped(view.shape[-2:])
    assert stands is not None  # axes of size 1 are always gone
    out = node.result.type.dtype.on_device
    return WeightOperand(node.result, stands, low.view(bias[0]) if bias else None, weight.type.dtype.on_device, out)


def row_matrix(low: Lowering, x: Value) -> View:
    """A value as a matrix of rows, in the type in which it is stored."""
    return as_matrix(low, low.stored_view(x), prod(x.type.shape[:-1]), x.type.shape[-1])


def as_matrix(low: Lowering, view: View, rows: int, width: int) -> View:
    """A view as a matrix; copied to contiguous rows where strides cannot express it."""
    made = view.reshaped((rows, width)) or low.packed(view).reshaped((rows, width))
    assert made is not None  # packed rows are a matrix
    return made


def batch_loop(k: Kernel, views: Sequence[View], axes: int) -> Iterator[tuple[Affine, list[View]]]:
    """Loops over the leading axes: the flat index of each combination, with the views there."""
    if not axes:
        yield Affine(), list(views)
        return
    size = views[0].shape[0]
    if not size:
        return
    with k.loop(size) as index:
        for inner, inside in batch_loop(k, [view.pick(0, index) for view in views], axes - 1):
            yield index * prod(views[0].shape[1:axes]) + inner, inside
