"""Values that stay in SBUF between nodes: without HBM if there is space, and intact if there is none."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.utilization import HBM, totals
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.operands import Axis, Far, Memory
from nxpipe.emulator.isa.program import Buffer, Program, Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.lower.records import ResidentBuffer
from nxpipe.emulator.lower.sbuf_residency import SbufMatrix, _Candidate, _find_address
from nxpipe.emulator.ops import Attention, Binary, Linear, Reshape, RmsNorm, Transpose, Unary
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.roll import roll
from tests.lower.harness import Case, case, floats, require_equal, wholes
from tests.tiers import examples

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
TABLE = np.random.default_rng(0).integers(-2, 3, (256, 64)).astype(np.float32)


def _moved(program: Program) -> int:
    found = totals(program)
    return found.read[HBM] + found.written[HBM]


def _scratch(program: Program) -> list[tuple[int, ...]]:
    return [buffer.shape for buffer in program.buffers if buffer.role is Role.SCRATCH]


def _two(builder: GraphBuilder, x: Value, up: Value, down: Value) -> Value:
    return builder.add(Linear(BF16), builder.add(Linear(BF16), x, up), down)


@pytest.mark.parametrize("rows", [1, 8, 128, 300, 384])
def test_rows_stay_in_sbuf_between_products(rows: int) -> None:
    shapes = ((rows, 200), (130, 200), (70, 130))
    chain = case(_two, *(wholes(*shape, dtype=BF16, most=1, seed=seed) for seed, shape in enumerate(shapes)))
    require_equal(chain)
    program = lower(chain.graph, "v2")
    once = sum(prod(shape) for shape in (*shapes, (rows, 70))) * BF16.itemsize
    assert _moved(program) == once
    assert not _scratch(program)


def test_heads_stay_between_their_products_and_attention() -> None:
    """Whoever reads a piece of a row, or goes over rows by heads, finds it in its lane."""

    def build(builder: GraphBuilder, x: Value, *weights: Value) -> Value:
        def heads(weight: Value) -> Value:
            rows = builder.add(Reshape((1, 256, 2, 32)), builder.add(Linear(F32), x, weight))
            return builder.add(Transpose((0, 2, 1, 3)), rows)

        q, k, v, out = weights
        query = builder.add(Binary("multiply"), heads(q), builder.constant(TABLE[:, :32], F32))
        seen = builder.add(Attention(0.2, True, F32, F32), query, heads(k), heads(v))
        rows = builder.add(Reshape((1, 256, 64)), builder.add(Transpose((0, 2, 1, 3)), seen))
        return builder.add(Linear(F32), rows, out)

    given = [floats(1, 256, 48), *(floats(64, 48, seed=seed) for seed in (1, 2, 3)), floats(40, 64, seed=4)]
    made = case(build, *given)
    require_equal(made, units=4, noise=2e-4)
    assert not _scratch(lower(made.graph, "v2"))


def _layers(count: int) -> Graph:
    """Layers that multiply by a weight of their own and a common table, and pass on their rows."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((256, 64), F32))
    table = builder.constant(TABLE, F32)
    for number in range(count):
        weight = builder.parameter(f"layers.{number}.weight", TensorType((64, 64), F32))
        x = builder.add(Binary("minimum"), builder.add(Linear(F32), x, weight), builder.scalar(3.0))
        x = builder.add(Unary("relu"), builder.add(Binary("multiply"), x, table))
    builder.output("y", x)
    return run_passes(builder.build(), PassOptions(), (roll,))


def test_a_table_that_every_turn_of_a_loop_reads_is_loaded_once_and_is_there_in_the_last() -> None:
    graph = _layers(4)
    assert graph.repeats
    weights = {name: wholes(64, 64, most=1, seed=seed).data for seed, name in enumerate(graph.parameters)}
    require_equal(Case(graph, weights, {"x": wholes(256, 64, seed=9).data}))
    program = lower(graph, "v2")
    assert not _scratch(program)
    assert _moved(program) == (3 * TABLE.size + 4 * 64 * 64) * F32.itemsize


def _block(rows: int, width: int, inner: int) -> Program:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((rows, width), BF16))
    names = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    gate, up, down = (builder.parameter(name, TensorType(shape, BF16)) for name, shape in names.items())
    normal = builder.add(RmsNorm(1, 1e-5), x)
    hidden = builder.add(Unary("silu"), builder.add(Linear(BF16), normal, gate))
    hidden = builder.add(Binary("multiply"), hidden, builder.add(Linear(BF16), normal, up))
    builder.output("y", builder.add(Binary("add"), x, builder.add(Linear(BF16), hidden, down)))
    return lower(builder.build(), "v2")


def test_products_leave_room_for_what_it_costs_more_to_bring_back() -> None:
    program = _block(2048, 1024, 2048)
    assert not faults(program)
    assert not _scratch(program)


def test_what_is_larger_than_sbuf_goes_to_hbm_and_comes_back() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((8192, 512), BF16))
    up, down = (
        builder.parameter(name, TensorType(shape, BF16)) for name, shape in (("up", (2048, 512)), ("down", (512, 2048)))
    )
    hidden = builder.add(Linear(BF16), x, up)
    again = builder.add(Linear(BF16), builder.add(Linear(BF16), hidden, down), up)
    builder.output("y", builder.add(Binary("add"), hidden, again))
    program = lower(builder.build(), "v2")
    assert not faults(program)
    assert (8192, 2048) in _scratch(program)


SCRATCH = Buffer(Role.SCRATCH, ("scratch",), F32, (128, 8))
STAGES = 5
LIVE_RANGES = st.tuples(st.integers(0, STAGES - 1), st.integers(0, STAGES - 1)).map(lambda ends: (min(ends), max(ends)))
SIZES = st.integers(1, 6).map(lambda units: 64 * units)


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(SIZES, LIVE_RANGES), min_size=4, max_size=20),
    st.lists(st.integers(0, 100), min_size=STAGES, max_size=STAGES),
)
def test_a_resident_buffer_shares_no_byte_with_another_that_is_live_or_with_a_kernel(
    buffers: list[tuple[int, tuple[int, int]]], peaks: list[int]
) -> None:
    """The highest free address is taken: none above it is free too."""
    usable, placed = 1024, list[ResidentBuffer]()
    allocations: list[tuple[_Candidate, int]] = []
    for size, live_range in buffers:
        candidate = _Candidate(0, SbufMatrix(128, 8), size, live_range, 1)

        def is_free(address: int, candidate: _Candidate = candidate) -> bool:
            new = ResidentBuffer(SCRATCH, candidate.size, address, candidate.live_range)
            return not any(new.overlaps(other) for other in placed)

        floor = max(peaks[live_range[0] : live_range[1] + 1])
        free = [address for address in range(0, usable - size + 1, 64) if address >= floor and is_free(address)]
        address = _find_address(candidate, peaks, allocations, usable)
        assert address == (free[-1] if free else None)
        if address is not None:
            allocations.append((candidate, address))
            placed.append(ResidentBuffer(SCRATCH, size, address, live_range))


def test_a_residual_stays_intact_while_wider_values_come_and_go_beside_it() -> None:
    """Sums that are live one after the other, the last one together with wider hidden values."""

    def build(builder: GraphBuilder, x: Value, *weights: Value) -> Value:
        first, second, third, up, down = weights
        x = builder.add(Linear(F32), x, first)
        for weight in (second, third):
            x = builder.add(Binary("add"), builder.add(Linear(F32), x, weight), x)
        hidden = builder.add(Unary("relu"), builder.add(Linear(F32), x, up))
        return builder.add(Binary("add"), builder.add(Linear(F32), hidden, down), x)

    shapes = ((128, 8), (8, 8), (8, 8), (8, 8), (64, 8), (8, 64))
    require_equal(case(build, *(wholes(*shape, most=1, seed=seed) for seed, shape in enumerate(shapes))))


@pytest.mark.parametrize(
    ("offset", "axes", "lanes", "byte", "inner"),
    [
        (0, (Axis(128, 10), Axis(10, 1)), 128, 0, (Axis(10, 1),)),
        (1280 + 3, (Axis(128, 10), Axis(4, 2)), 128, 26, (Axis(4, 2),)),
        (50, (Axis(7, 10), Axis(3, 1280), Axis(2, 1)), 7, 0, (Axis(3, 10), Axis(2, 1))),
        (index(0) * 2560, (Axis(128, 10), Axis(10, 1)), 128, index(0) * 40, (Axis(10, 1),)),
        (
            rotating_offset(index(0), 2, 1280),
            (Axis(5, 10), Axis(1, 1)),
            5,
            rotating_offset(index(0), 2, 20),
            (Axis(1, 1),),
        ),
    ],
)
def test_a_part_of_a_matrix_lies_in_lanes(
    offset: Affine | int, axes: tuple[Axis, ...], lanes: int, byte: Affine | int, inner: tuple[Axis, ...]
) -> None:
    found = SbufMatrix(2048, 10).tile(Far(0, BF16, Affine() + offset, axes), (4,))
    assert found is not None
    assert (found.memory, found.partitions, found.offset) == (Memory.SBUF, lanes, Affine() + byte)
    assert tuple(axis for axis in found.axes if axis.size > 1) == tuple(axis for axis in inner if axis.size > 1)


@pytest.mark.parametrize(
    ("offset", "axes"),
    [
        (0, (Axis(129, 10), Axis(10, 1))),  # more rows than lanes
        (1270, (Axis(2, 10), Axis(10, 1))),  # from the last lane to the first
        (0, (Axis(10, 1), Axis(128, 10))),  # rows not first
        (8, (Axis(128, 10), Axis(4, 1))),  # over the end of a row
        (index(0) * 10, (Axis(1, 10), Axis(10, 1))),  # a lane that changes with a loop
        (index(0) * 3, (Axis(128, 10), Axis(2, 1))),  # over the end of a row in a later turn
        (index(0) * 1283, (Axis(128, 10), Axis(2, 1))),  # both at once
        (20, (Axis(3, -10), Axis(10, 1))),  # backwards
    ],
)
def test_what_lanes_cannot_say_stays_in_hbm(offset: Affine | int, axes: tuple[Axis, ...]) -> None:
    assert SbufMatrix(2048, 10).tile(Far(0, BF16, Affine() + offset, axes), (4,)) is None


def test_each_tensor_of_a_buffer_begins_in_the_first_lane_if_its_rows_do_not_fill_all_lanes() -> None:
    """Engines address lanes from 0, 32, 64 or 96 on, so that the second half of a double buffer is beside the first."""
    few, more = SbufMatrix(8, 10), SbufMatrix(200, 10)
    second = Far(0, BF16, rotating_offset(index(0), 2, 80), (Axis(8, 10), Axis(10, 1)))
    found = few.tile(second, (4,))
    assert found is not None
    assert (found.start, found.partitions, found.offset) == (0, 8, rotating_offset(index(0), 2, 20))
    rest = more.tile(Far(0, BF16, Affine(2000 + 1280), (Axis(72, 10), Axis(10, 1))), ())
    assert rest is not None
    assert (rest.start, rest.partitions, rest.offset) == (0, 72, Affine(20 * 2 + 20))


@pytest.mark.parametrize(
    "far",
    [
        Far(0, BF16, Affine(1280), (Axis(73, 10), Axis(10, 1))),  # rows of the next tensor
        Far(0, BF16, Affine(), (Axis(128, 10), Axis(2, 1280), Axis(10, 1))),  # a second block has 72 rows
    ],
)
def test_a_part_that_reaches_beyond_the_rows_of_a_tensor_stays_in_hbm(far: Far) -> None:
    assert SbufMatrix(200, 10).tile(far, ()) is None


def test_a_part_with_a_stride_that_no_access_pattern_has_stays_in_hbm() -> None:
    """A single row has all elements on one partition; strides are 16 bits."""
    assert SbufMatrix(1, 100_000).tile(Far(0, BF16, Affine(), (Axis(2, 40_000), Axis(7, 1))), ()) is None
    assert SbufMatrix(1, 100_000).tile(Far(0, BF16, Affine(), (Axis(2, 30_000), Axis(7, 1))), ()) is not None
