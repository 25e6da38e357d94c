"""Ranks on emulated cores that meet at collectives: each of them ends with what `emulator.ranks` makes, to the bit."""

from collections.abc import Callable

import numpy as np
import pytest

from emulator.builder import GraphBuilder
from emulator.core import Machine
from emulator.graph import Value
from emulator.isa.limits import check
from emulator.isa.program import RANK
from emulator.lower import NotLowered, lower
from emulator.ops import AllGather, AllReduce, RankSlice
from emulator.ranks import execute_ranks
from emulator.types import DType
from tests.lower.harness import CORES, ORDERS, case, floats, wholes

BF16 = DType.BFLOAT16
DIVISIONS = {
    "in order": ((8, 5), (0, 1, (8,), (4,), 4)),
    "inside": ((3, 8, 5), (1, 1, (8,), (4,), 4)),
    "blocks that ranks share": ((3, 200, 12), (2, 1, (8, 4), (4, 2), 4)),
    "repeated, one block for all": ((3, 18, 5), (1, 2, (6, 3), (2, 1), 2)),
}


def _require_equal(build: Callable[[GraphBuilder, Value], Value], shape: tuple[int, ...], degree: int) -> None:
    of_one = case(build, floats(*shape, dtype=BF16))
    expected = execute_ranks(of_one.graph, {}, of_one.inputs)["result"]
    for core in CORES:
        program = lower(of_one.graph, core, degree)
        check(program)
        for order in ORDERS:
            machine = Machine(program, order=order)
            machine.write("input0", of_one.inputs["input0"])
            for rank in range(degree):
                machine.write(RANK, np.array([rank]), rank)
            machine.execute()
            for rank in range(degree):
                assert np.array_equal(machine.read("result", rank), expected), f"rank {rank} on {core}"


@pytest.mark.parametrize("division", DIVISIONS)
def test_what_ranks_slice_and_gather_is_whole_again(division: str) -> None:
    shape, attributes = DIVISIONS[division]

    def build(builder: GraphBuilder, x: Value) -> Value:
        return builder.add(AllGather(*attributes), builder.add(RankSlice(*attributes), x))

    _require_equal(build, shape, attributes[-1])


@pytest.mark.parametrize("degree", [2, 4])
def test_sums_over_ranks_are_rounded_once(degree: int) -> None:
    def build(builder: GraphBuilder, x: Value) -> Value:
        return builder.add(AllReduce(degree), builder.add(RankSlice(0, 1, (8,), (degree,), degree), x))

    _require_equal(build, (8, 33), degree)


def test_a_program_for_another_number_of_ranks_is_refused() -> None:
    of_one = case(lambda builder, x: builder.add(AllReduce(2), x), wholes(3, 4))
    with pytest.raises(NotLowered, match="for 2 ranks, but the program is for 1"):
        lower(of_one.graph, "v2")
