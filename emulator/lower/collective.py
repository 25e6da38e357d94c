"""What ranks do together, and what each takes of a tensor that all of them know.

All ranks run one program. What is a rank's own is found by its number, which the host puts into an input: it chooses a
row of a table of places, and the places are copied by indirect DMA.
"""

from dataclasses import replace
from itertools import accumulate
from math import gcd, prod

import numpy as np

from emulator.graph import Node
from emulator.isa import instructions as isa
from emulator.isa.affine import Affine
from emulator.isa.instructions import Engine
from emulator.isa.operands import Axis, Far
from emulator.lower.kernel import PARTITIONS
from emulator.lower.lowering import Lowering, NotLowered, lowers
from emulator.lower.view import View
from emulator.numerics import Array
from emulator.ops import AllGather, AllReduce, RankSlice
from emulator.types import DType


@lowers(AllReduce)
def _all_reduce(low: Lowering, node: Node, op: AllReduce) -> None:
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if home.elements:
        low.k.emit(isa.AllReduce(engine=Engine.COLLECTIVE, dst=_line(home), src=_line(source)))


@lowers(AllGather)
def _all_gather(low: Lowering, node: Node, op: AllGather) -> None:
    """Where a rank's share is not one stretch of the whole, what was gathered is put in order afterwards."""
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if not home.elements:
        return
    outer, inner = prod(source.shape[: op.axis]) * op.outer, prod(source.shape[op.axis + 1 :])
    lengths = [size // parts for size, parts in zip(op.sizes, op.parts, strict=True)]
    in_order = outer == 1 and op.parts == (op.degree,)
    gathered = home if in_order else low.scratch(source.dtype, (op.degree, *source.shape))
    low.k.emit(isa.AllGather(engine=Engine.COLLECTIVE, dst=_line(gathered), src=_line(source)))
    if in_order:
        return
    shares = gathered.packed_as((op.degree, outer, sum(lengths), inner))
    whole = home.packed_as((outer, sum(op.sizes), inner))
    starts = list(accumulate(op.sizes, initial=0))
    own = list(accumulate(lengths, initial=0))
    for number, (parts, length) in enumerate(zip(op.parts, lengths, strict=True)):
        block = shares.cut((0, parts), (0, outer), (own[number], length))
        apart = shares.strides[0] * (op.degree // parts)  # of ranks that share a piece, the first
        owners = replace(block, strides=(apart, *block.strides[1:])).transposed((1, 0, 2, 3))
        place = whole.cut((0, outer), (starts[number], parts * length)).reshaped((outer, parts, length, inner))
        assert place is not None  # an axis in two always has strides
        low.copy(place, owners)


@lowers(RankSlice)
def _rank_slice(low: Lowering, node: Node, op: RankSlice) -> None:
    _require_degree(low, node, op.degree)
    source, home = low.packed(low.view(node.operands[0])), low.home(node.result)
    if not home.elements:
        return
    k, inner = low.k, prod(source.shape[op.axis + 1 :])
    table, unit = _places(op, prod(source.shape[: op.axis]) * op.outer)
    count, width = table.shape[1], unit * inner
    places = low.constant(table, DType.UINT32)
    rows = home.packed_as((count, width))
    with k.room():
        rank = k.tile(DType.UINT32, 1, 1).whole
        k.copy(rank, low.rank().far())
        for top, some in k.spans(count, PARTITIONS):
            with k.room():
                numbers = k.tile(DType.UINT32, some, 1, turns=2).whole
                own = Far(places.buffer, DType.UINT32, places.offset + top, (Axis(1, count), Axis(some, 1)), rank)
                k.copy(numbers, own)
                axes = (Axis(some, width), Axis(width, 1))
                piece = Far(source.buffer, source.dtype, source.offset, axes, numbers)
                k.copy(rows.cut((top, some)).far(), piece)


def _places(op: RankSlice, outer: int) -> tuple[Array, int]:
    """For each rank, which stretches of the axis it takes, one after the other for all outer repetitions; and how long
    each stretch is."""
    lengths = [size // parts for size, parts in zip(op.sizes, op.parts, strict=True)]
    starts = list(accumulate(op.sizes, initial=0))
    unit = gcd(*lengths, *starts) or 1
    table = []
    for rank in range(op.degree):
        own = [
            np.arange(length // unit) + (start + rank * parts // op.degree * length) // unit
            for start, length, parts in zip(starts, lengths, op.parts, strict=False)
        ]
        table.append(np.add.outer(np.arange(outer) * (starts[-1] // unit), np.concatenate(own)).reshape(-1))
    return np.array(table), unit


def _line(view: View) -> Far:
    """All of what lies row by row, as one stretch."""
    return Far(view.buffer, view.dtype, view.offset + Affine(), (Axis(view.elements, 1),))


def _require_degree(low: Lowering, node: Node, degree: int) -> None:
    if degree != low.ranks:
        raise NotLowered(f"{node.op.label} is for {degree} ranks, but the program is for {low.ranks}")
