"""Ranks on emulated cores with collectives: each equals the result of `run.fast.LoadedRanks`, to the bit."""

import pytest

from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.lower import NotLowered, lower
from nxpipe.emulator.ops import AllGather, AllReduce, RankSlice, ReduceScatter, Unary
from nxpipe.emulator.ops.collective import Share, uneven
from tests.lower.harness import case, wholes
from tests.lower.sweep import FLOATS, INTEGERS, Draw, Row, sweep

Numbers = tuple[int, ...]
Division = tuple[int, int, Numbers, Numbers, int, Numbers, Numbers]


def _division(draw: Draw) -> tuple[tuple[int, ...], Division]:
    """A shape, and blocks of one of its axes that a few ranks share: evenly, with neighbours, or with padding."""
    shape, degree = draw.shape(most=3, largest=5), draw.one_of((2, 3, 4))
    axis, outer = draw.integer(0, len(shape) - 1), draw.one_of((1, 1, draw.integer(1, 3)))
    wide = draw.integer(10, 20) if draw.integer(0, 4) == 0 else 1
    shares = [draw.one_of((_even, _even, _in_turn, _in_slots))(draw, degree, wide) for _ in range(draw.integer(1, 3))]
    sizes, parts = tuple(share.size for share in shares), tuple(share.parts for share in shares)
    whole = (*shape[:axis], outer * sum(sizes), *shape[axis + 1 :])
    return whole, (axis, outer, sizes, parts, degree, *uneven(shares, degree))


def _even(draw: Draw, degree: int, wide: int) -> Share:
    parts = draw.one_of([parts for parts in range(1, degree + 1) if degree % parts == 0])
    length = wide * draw.integer(1, 5)
    return Share(parts * length, parts, 1, length)


def _in_turn(draw: Draw, degree: int, wide: int) -> Share:
    """A stretch for each, and padding behind."""
    units = draw.integer(degree, 3 * degree)
    return Share(units * wide, 1, 1, -(-units // degree) * wide)


def _in_slots(draw: Draw, degree: int, wide: int) -> Share:
    """Places enough for all parts, and for each part copies, or its stretches."""
    parts = draw.integer(1, 2 * degree)
    slots = draw.integer(-(-parts // degree), parts)
    group, copies = draw.integer(1, 5), degree * slots // parts
    return Share(parts * group * wide, parts, slots, draw.one_of((group, -(-group // copies))) * wide)


def _sliced(draw: Draw) -> Value:
    """Each rank takes its pieces of a tensor, and does something to them, so that they are in no view of it."""
    shape, division = _division(draw)
    dtype = draw.one_of((*FLOATS, *INTEGERS, DType.BOOL))
    piece = draw.builder.add(RankSlice(*division), draw.tensor(shape, dtype))
    if dtype is not DType.BOOL and draw.integer(0, 1):
        piece = draw.builder.add(Unary("abs"), piece)
    return draw.builder.add(AllGather(*division), piece)


def _reduced(draw: Draw) -> Value:
    """Different numbers of each rank: those of its piece. Floats are added in the order of ranks, and rounded once."""
    shape, division = _division(draw)
    piece = draw.builder.add(RankSlice(*division), draw.tensor(shape, draw.one_of(FLOATS)))
    return draw.builder.add(AllReduce(division[4]), piece)


def _scattered(draw: Draw) -> Value:
    """Each rank's pieces of the sum."""
    shape, division = _division(draw)
    piece = draw.builder.add(RankSlice(*division), draw.tensor(shape, draw.one_of(FLOATS)))
    wide = draw.builder.add(AllGather(*division), draw.builder.add(Unary("abs"), piece))
    return draw.builder.add(AllGather(*division), draw.builder.add(ReduceScatter(*division), wide))


TABLE = (
    Row("rank_slice", RankSlice, _sliced),
    Row("all_gather", AllGather, _sliced),
    Row("all_reduce", AllReduce, _reduced),
    Row("reduce_scatter", ReduceScatter, _scattered),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_ranks_do_together_is_what_fast_makes_of_it(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_ranks_do_together_is_what_fast_makes_of_it_in_many_forms(row: Row) -> None:
    sweep(row, 200)


def test_a_program_for_another_number_of_ranks_is_refused() -> None:
    of_one = case(lambda builder, x: builder.add(AllReduce(2), x), wholes(3, 4))
    with pytest.raises(NotLowered, match="for 2 ranks: the program is for 1"):
        lower(of_one.graph, "v2")
