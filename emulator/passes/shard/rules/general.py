"""What most rules are made of: compute it whole, in step with the operands, or apart from some axes."""

from collections.abc import Callable

from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.passes.shard.layout import Layout, Split
from nxpipe.emulator.passes.shard.walk import Verdict, Walk, lined_up, shifted

Rule = Callable[[Walk, Node], Verdict]


def everything_whole(walk: Walk, node: Node) -> Verdict:
    """Every rank computes all of it."""
    for operand in node.operands:
        walk.whole(operand)
    return Verdict((None,) * len(node.operands), None)


def elementwise(walk: Walk, node: Node) -> Verdict:
    """Operands are divided alike; where one is broadcast, every rank has it."""
    layout = lined_up(walk, node.operands, node.result.type.rank)
    if layout is None or node.result.type.shape[layout.axis] != layout.outer * sum(layout.sizes):
        return everything_whole(walk, node)
    return Verdict(tuple(aligned(walk, node.result.type.rank, layout, operand) for operand in node.operands), layout)


def aligned(walk: Walk, rank: int, layout: Split, operand: Value) -> Layout:
    """Of an operand that broadcasts against a layout, the share that goes with it."""
    mine = shifted(layout, operand.type.rank - rank)
    if mine.axis < 0 or operand.type.shape[mine.axis] == 1:
        walk.whole(operand)
        return None
    return walk.bring(operand, mine)


def one_operand(walk: Walk, node: Node, result: Layout) -> Verdict:
    """The first operand stays where it lies and all others are whole; or, without a result, it is gathered."""
    if result is None:
        return everything_whole(walk, node)
    for operand in node.operands[1:]:
        walk.whole(operand)
    return Verdict((walk.layout(node.operands[0]), *[None] * (len(node.operands) - 1)), result)


def apart_from(axes: Callable[[Node], tuple[int, ...]]) -> Rule:
    """Operators that work along some axes, and treat the others as so many separate tensors."""

    def rule(walk: Walk, node: Node) -> Verdict:
        layout = walk.layout(node.operands[0])
        free = layout is not None and layout.axis not in axes(node)
        return one_operand(walk, node, layout if free else None)

    return rule


def summed(operands: tuple[Layout, ...], layout: Split) -> Verdict:
    """Each rank has a part of each sum, and no unit may be counted by two of them."""
    for cut in layout.cuts:
        cut.require_even()
        cut.add_up()
    return Verdict(operands, None, reduced=True)
