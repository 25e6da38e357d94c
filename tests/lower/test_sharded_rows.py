"""Rows sharded between products: outputs equal those of one rank, and each rank stores only its share in HBM."""

from collections import Counter
from collections.abc import Callable

import pytest

from nxpipe.emulator.compile import emit, shard_graph
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.collective import CollectiveAllGather as Exchange
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Program, Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.numerics import round_to
from nxpipe.emulator.ops import (
    AllGather,
    AllReduce,
    Binary,
    Cast,
    Linear,
    Operator,
    RankSlice,
    ReduceScatter,
    RmsNorm,
    Unary,
)
from nxpipe.emulator.ops import Softmax as AcrossRows
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks, execute
from nxpipe.emulator.run.isa import Isa
from tests.lower.harness import Case, Given, case, floats, require_close, require_equal

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
Body = Callable[..., Value]


def _block(builder: GraphBuilder, x: Value, scale: Value, up: Value, beside: Value, down: Value) -> Value:
    """A residual, and what two layers make of its norm, of which ranks share the features between them."""
    rows = builder.add(Cast(BF16), builder.add(RmsNorm(1, 1e-5), builder.add(Cast(F32), x)))
    rows = builder.add(Binary("multiply"), scale, rows)
    hidden = builder.add(Unary("relu"), builder.add(Linear(BF16), rows, up))
    hidden = builder.add(Binary("multiply"), hidden, builder.add(Linear(BF16), rows, beside))
    return builder.add(Binary("add"), x, builder.add(Linear(BF16), hidden, down))


def _blocks(builder: GraphBuilder, x: Value, *weights: Value) -> Value:
    for _ in range(2):
        x = _block(builder, x, *weights)
    return x


def _case(rows: int, width: int, inner: int, body: Body = _blocks, batch: int = 1) -> Case:
    shapes = ((width,), (inner, width), (inner, width), (width, inner))
    weights = [
        Given(round_to(floats(*shape, seed=seed).data / shape[-1] ** 0.5, BF16), BF16, Role.PARAMETER)
        for seed, shape in enumerate(shapes, 1)
    ]
    return case(body, floats(batch, rows, width, dtype=BF16), *weights)


def _require_one_answer(of: Case, degree: int, core: str) -> Program:
    """Require equal outputs of one rank, of all ranks' graphs, and of their programs in two orders."""
    program = shard_graph(of.graph, PassOptions(tensor_parallel=degree))
    executable = emit(program, core)
    assert not faults(executable.program)
    alone = execute(of.graph, of.parameters, of.inputs)
    together = LoadedProgram(program, LoadedRanks(program.graph, of.parameters)).run(of.inputs)
    for order in ("hostile", "random:3"):
        found = LoadedProgram(program, Isa(executable, order=order).load(of.parameters)).run(of.inputs)
        for name, value in of.graph.outputs.items():
            require_close(f"{name}, divided", value.type.dtype, found[name], together[name], 2, 0.03)
            require_close(f"{name}, whole", value.type.dtype, found[name], alone[name], 2, 0.06)
    return executable.program


def _kinds(graph: Graph) -> Counter[type[Operator]]:
    return Counter(type(node.op) for node in graph.nodes)


def _kept(program: Program, gathered: bool = False) -> int:
    """The largest scratch in HBM, except for the gathered rows of an output."""
    met = {
        place.buffer
        for instruction in instructions(program.body)
        if isinstance(instruction, Exchange)
        for place in _far(instruction)
    }
    scratch = [number for number, buffer in enumerate(program.buffers) if buffer.role is Role.SCRATCH]
    return max((program.buffers[number].elements for number in scratch if gathered or number not in met), default=0)


def _far(instruction: Instruction) -> list[Far]:
    return [place for place in instruction.places.values() if isinstance(place, Far)]


@pytest.mark.parametrize(
    ("rows", "width", "inner", "degree", "core"),
    [(256, 256, 384, 2, "v2"), (512, 128, 256, 4, "v3"), (320, 128, 256, 2, "v2")],
)
def test_ranks_share_rows_and_what_they_gather_never_lies_in_hbm(
    rows: int, width: int, inner: int, degree: int, core: str
) -> None:
    program = _require_one_answer(_case(rows, width, inner), degree, core)
    assert _kept(program) <= rows * max(width // degree, inner // degree)


@pytest.mark.parametrize(("rows", "width", "batch"), [(512, 200, 1), (256, 128, 2)])
def test_runs_of_rows_and_rows_that_are_no_whole_chunks_are_shared_as_well(rows: int, width: int, batch: int) -> None:
    _require_one_answer(_case(rows, width, 130, batch=batch), 2, "v2")


def test_rows_too_wide_to_be_turned_beside_a_run_of_all_ranks_meet_in_hbm() -> None:
    def build(builder: GraphBuilder, x: Value, weight: Value) -> Value:
        every = builder.add(AllGather(0, 1, (2048,), (16,), 16), x)
        return builder.add(Linear(BF16), every, weight)

    builder = GraphBuilder()
    given = [builder.input(name, TensorType(shape, BF16)) for name, shape in (("x", (128, 8192)), ("w", (64, 8192)))]
    builder.output("y", build(builder, *given))
    program = lower(builder.build(), "v2", 16)
    assert not faults(program)
    assert _kept(program, gathered=True) == 2048 * 8192


# All ranks' rows are longer than an axis of a tile; do not fit SBUF; nor does a rank's share beside a matrix.
_TOO_WIDE = [(8192, 8), (8192, 16), (16384, 8)]


def _norm_of_shares(width: int, ranks: int, runs: int = 1, rows_of_run: int = 128) -> Case:
    """A norm of each rank's own rows, and a layer of all rows."""
    shares = (0, runs, (rows_of_run * ranks,), (ranks,), ranks)

    def build(builder: GraphBuilder, x: Value, scale: Value, weight: Value) -> Value:
        rows = builder.add(RankSlice(*shares), x)
        rows = builder.add(Cast(BF16), builder.add(RmsNorm(1, 1e-5), builder.add(Cast(F32), rows)))
        rows = builder.add(Binary("multiply"), scale, rows)
        every = builder.add(AllGather(*shares), rows)
        return builder.add(Linear(BF16), every, weight)

    shapes = ((runs * rows_of_run * ranks, width), (width,), (64, width))
    return case(build, *(floats(*shape, dtype=BF16) for shape in shapes))


@pytest.mark.parametrize(("width", "ranks"), _TOO_WIDE)
def test_norms_too_wide_for_the_rows_of_all_ranks_are_gathered_in_hbm(width: int, ranks: int) -> None:
    program = lower(_norm_of_shares(width, ranks).graph, "v2", ranks)
    assert not faults(program)
    assert _kept(program, gathered=True) == 128 * ranks * width


@pytest.mark.sample(3)
@pytest.mark.parametrize(("width", "ranks"), _TOO_WIDE)
def test_layers_of_norms_gathered_in_hbm_equal_those_of_the_graph(width: int, ranks: int) -> None:
    require_equal(_norm_of_shares(width, ranks), units=2, noise=0.06, cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize("width", [128, 1024])
def test_layers_of_norms_of_short_runs_of_rows_equal_those_of_the_graph(width: int) -> None:
    require_equal(_norm_of_shares(width, 4, runs=25, rows_of_run=8), units=2, noise=0.06, cores=("v3",))


def _divided(body: Body, rows: int, degree: int = 2) -> Counter[type[Operator]]:
    return _kinds(shard_graph(_case(rows, 16, 64, body).graph, PassOptions(tensor_parallel=degree)).graph)


def test_norms_and_residuals_between_sums_are_done_on_shares() -> None:
    kinds = _divided(_blocks, 256)
    assert (kinds[ReduceScatter], kinds[AllGather], kinds[AllReduce]) == (2, 2, 0)


@pytest.mark.parametrize(("rows", "degree"), [(128, 2), (255, 2), (272, 2), (256, 4), (64 * 196, 64)])
def test_rows_that_do_not_fill_the_lanes_of_all_ranks_stay_whole(rows: int, degree: int) -> None:
    kinds = _divided(_blocks, rows, degree)
    assert (kinds[ReduceScatter], kinds[AllReduce]) == (0, 2)


@pytest.mark.parametrize(("rows", "degree"), [(320, 2), (12_800, 64)])
def test_rows_that_fill_the_lanes_but_no_whole_number_of_times_are_shared(rows: int, degree: int) -> None:
    kinds = _divided(_blocks, rows, degree)
    assert (kinds[ReduceScatter], kinds[AllReduce]) == (2, 0)


def test_a_sum_that_is_read_whole_more_than_once_is_not_shared() -> None:
    def across(builder: GraphBuilder, x: Value, *weights: Value) -> Value:
        total = _block(builder, x, *weights)
        double = builder.add(Binary("add"), total, total)
        looks = [
            builder.add(AcrossRows(1, log=False), value) for value in (total, double, builder.add(Unary("exp"), total))
        ]
        return builder.add(Binary("add"), builder.add(Binary("add"), *looks[:2]), looks[2])

    assert _divided(across, 256)[ReduceScatter] == 0


def test_a_sum_alone_stays_one_meeting() -> None:
    def alone(builder: GraphBuilder, x: Value, scale: Value, up: Value, beside: Value, down: Value) -> Value:
        hidden = builder.add(Linear(F32), builder.add(Linear(BF16), x, up), down)
        return builder.add(AcrossRows(1, log=False), hidden)

    assert _divided(alone, 256)[ReduceScatter] == 0
