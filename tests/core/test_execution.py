"""An execution on an instance: links between chips, the fixed cost of collectives, the host, requests in flight."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.hardware.instance import INSTANCES
from nxpipe.emulator.hardware.links import host_ns
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import (
    CollectiveAllGather,
    CollectiveAllReduce,
    CollectiveReduceScatter,
    exchange,
    instance_for,
)
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Far, contiguous
from nxpipe.emulator.isa.program import Program
from nxpipe.emulator.schedule.execution import Execution, copied, execute, fixed_ns
from nxpipe.emulator.schedule.timeline import latency_ns
from tests.isa.assembler import program as parsed

HEAD = "core v2, ranks {ranks}\ninput x: f32[128,2048] at 0\noutput y: f32[128,2048] at 1048576\n\n"
REDUCE = "collective all_reduce y[0 : f32 262144] <- x[0 : f32 262144]\n"
INF2, TRN1, TRN2 = (INSTANCES[name] for name in ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge"))


def of(ranks: int, lines: str = REDUCE) -> Program:
    return parsed(HEAD.format(ranks=ranks) + lines)


def reduce(nbytes: int) -> CollectiveAllReduce:
    place = Far(0, DType.BFLOAT16, Affine(), contiguous(nbytes // 2))
    return CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=place, src=place)


def test_a_small_exchange_takes_as_long_as_its_hops() -> None:
    """The documented sample for 32 ranks of a Trn1 is 6.19 us: two hops in each direction of the torus, and one on the
    chip."""
    small, whole = (Far(0, DType.BFLOAT16, Affine(), contiguous(each)) for each in (16, 512))
    gather = CollectiveAllGather(engine=Engine.COLLECTIVE, dst=whole, src=small)
    scatter = CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=small, src=whole)
    assert exchange(gather, 32, TRN1).start == exchange(scatter, 32, TRN1).start == 5 * 1300
    assert exchange(reduce(512), 32, TRN1).start == 10 * 1300
    assert exchange(reduce(512), 24, INF2).start == 2 * (6 + 1) * 1300  # a ring of twelve chips


def test_a_large_exchange_takes_as_long_as_one_link() -> None:
    """The documented samples: 512 MB between 16 ranks in 9.69 ms, 1 GB between two of a chip in 18.93 ms."""
    assert exchange(reduce(512 << 20), 16, TRN1).takes / 1e6 == pytest.approx(9.69, rel=0.06)
    assert exchange(reduce(1_000_000_000), 2, INF2).takes / 1e6 == pytest.approx(18.93, rel=0.01)


@given(st.integers(1, 1 << 20), st.sampled_from((*INSTANCES.values(),)))
def test_an_exchange_takes_longer_between_more_ranks_and_for_more_bytes(nbytes: int, machine: object) -> None:
    ranks = [1 << power for power in range(1, 8) if 1 << power <= machine.cores]  # type: ignore[attr-defined]
    found = [exchange(reduce(2 * nbytes), each, machine) for each in ranks]  # type: ignore[arg-type]
    assert all(before.takes <= after.takes for before, after in pairwise(found))
    assert all(
        exchange(reduce(4 * nbytes), each, machine).takes >= once.takes  # type: ignore[arg-type]
        for each, once in zip(ranks, found, strict=True)
    )


def test_the_timeline_uses_the_links_of_the_instance() -> None:
    ring, torus = (latency_ns(of(24), instance=each) for each in (INF2, TRN1))
    assert ring is not None
    assert torus is not None
    expected = exchange(reduce(1 << 20), 24, INF2)
    assert ring == pytest.approx(expected.start + expected.takes, rel=1e-3)
    assert torus < ring
    assert latency_ns(of(24)) == ring, "the smallest instance with that many cores"
    assert instance_for("v2", 32) is TRN1


def test_an_execution_with_collectives_across_chips_has_the_measured_fixed_cost() -> None:
    assert [fixed_ns(of(ranks)) / 1e6 for ranks in (1, 2, 8, 16, 32)] == [0, 0, 2.34, 3.66, 4.97]
    assert 3.66 < fixed_ns(of(24)) / 1e6 < 4.97
    assert fixed_ns(of(32, "dma0 dma_copy y[0 : f32 262144] <- x[0 : f32 262144]\n")) == 0


def found(program: Program, in_flight: float) -> Execution:
    execution = execute(program, TRN1, in_flight=in_flight)
    assert execution is not None
    return execution


def test_requests_in_flight_overlap_host_and_device_up_to_the_longer_of_both() -> None:
    program = of(32)
    one, two, many = (found(program, number) for number in (1, 2, 63))
    assert one.host == pytest.approx(host_ns(2 * (1 << 20)))
    assert one.cycle == one.device + one.host
    assert two.cycle == many.cycle == max(one.device, one.host)
    assert copied(replace(program, buffers=())) == 0
    assert host_ns(0) < host_ns(1 << 20)


def test_no_execution_is_below_its_floor() -> None:
    moved = 1 << 34  # more than the timeline's copies take
    execution = execute(of(1), TRN1, bytes_at_least=moved)
    assert execution is not None
    assert execution.device == execution.floor == pytest.approx(moved / 410)
    assert CORES["v2"].tflops_16bit <= TRN1.tflops_bf16 / TRN1.cores
