"""An executable, written, read and loaded, gives the graph's outputs on emulated cores."""

from dataclasses import replace

import numpy as np
import pytest

from nxpipe.emulator import compile as compiled
from nxpipe.emulator.compile import emit, ports_of
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.executable.executable import Executable, from_bytes, to_bytes
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.collective import CollectiveAllGather
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Wait
from nxpipe.emulator.isa.operands import Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Program, Role
from nxpipe.emulator.numerics import Draws, stochastic_rounding
from nxpipe.emulator.ops import Binary, Linear, Operator, RankSlice, Slice, Unary
from nxpipe.emulator.passes.shard import Sharding
from nxpipe.emulator.run.isa import Isa
from nxpipe.emulator.run.model import Fast
from nxpipe.emulator.run.runtime import Runtime
from nxpipe.emulator.run.status import BadInput, ExecutionFailed, InvalidLoad, WrongGeneration
from tests.emulator.models import relative_error
from tests.runtime.models import running_sum, whole

INF2 = instance("inf2.xlarge")
F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64


def perceptron(batch: int) -> Fast:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((batch, 24), F32))
    up, down = builder.parameter("up", TensorType((40, 24), F32)), builder.parameter("down", TensorType((24, 40), F32))
    hidden = builder.add(Unary("tanh"), builder.add(Linear(F32), x, up))
    builder.output("y", builder.add(Linear(F32), hidden, down))
    program = whole(builder.build())
    return Fast(program, ports_of(program, {"x": ("batch", ""), "y": ("batch", "")}))


def doubled() -> Fast:
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((6,), I64))
    builder.output("twice", builder.add(Binary("add"), ids, ids))
    program = whole(builder.build())
    return Fast(program, ports_of(program))


def stored(code: Fast, core: str = "v2") -> Isa:
    """The program from its file format, as stored in an artifact."""
    sizes = {port.name: port.sizes for port in code.ports}
    return Isa(from_bytes(to_bytes(emit(code.program, core, sizes))))


@pytest.mark.parametrize("order", ["hostile", "program", "random:3"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_stored_program_answers_as_its_graph_does_in_every_bucket(rows: int, order: str) -> None:
    chance = np.random.default_rng(0)
    weights = {
        name: chance.standard_normal(shape).astype(np.float32) for name, shape in (("up", (40, 24)), ("down", (24, 40)))
    }
    request = {"x": chance.standard_normal((rows, 24)).astype(np.float32)}
    fast = [perceptron(batch) for batch in (2, 5)]
    with Runtime(INF2) as runtime:
        expected = runtime.load(fast, weights).execute(request)["y"]
        found = runtime.load([replace(stored(code), order=order) for code in fast], weights).execute(request)["y"]
    assert found.shape == expected.shape == (rows, 24)
    assert relative_error(found, expected) < 1e-5


def test_what_is_rounded_by_chance_is_the_same_in_every_order() -> None:
    """Each of several pieces is rounded by one engine, then by another, which has no need to hurry."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((900, 2000), BF16))
    builder.output("y", builder.add(Binary("multiply"), builder.add(Unary("tanh"), x), x))
    program = emit(whole(builder.build()), "v2").program
    numbers = np.random.default_rng(0).standard_normal((900, 2000)).astype(np.float32)

    def drawn(order: str, seed: int) -> list[bytes]:
        machine = Machine(program, order=order)
        machine.write("x", numbers)
        answers = []
        with stochastic_rounding(Draws(seed)):
            for _ in range(2):
                machine.execute()
                answers.append(machine.read("y").tobytes())
        return answers

    one = drawn("hostile", 5)
    assert one == drawn("program", 5) == drawn("random:1", 5)
    assert len({*one, *drawn("hostile", 6)}) == 4  # another run draws anew, and so does another seed


def test_states_go_from_request_to_request() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([stored(running_sum(300))], {})
        one, other = model.allocate(), model.allocate()
        x = np.arange(300, dtype=np.float32)
        for turn in range(1, 4):
            np.testing.assert_array_equal(model.execute({"x": x}, one)["y"], turn * x)
        np.testing.assert_array_equal(model.execute({"x": x}, other)["y"], x)


def test_a_caller_s_64_bits_are_kept_where_they_fit_the_machine_and_refused_where_not() -> None:
    with Runtime(INF2) as runtime:
        model = runtime.load([stored(doubled())], {})
        twice = model.execute({"ids": np.arange(6)})["twice"]
        assert twice.dtype == np.int64
        np.testing.assert_array_equal(twice, 2 * np.arange(6))
        with pytest.raises(BadInput, match="4294967296"):
            model.execute({"ids": np.full(6, 2**32)})


def gathering() -> Executable:
    """A program on two ranks that gathers a weight, of which each has half of the rows, transposed."""
    buffers = (
        Buffer(Role.PARAMETER, ("w",), F32, (3, 2), (1, 0)),
        Buffer(Role.OUTPUT, ("y",), F32, (2, 3, 2), (), 4096),
    )
    w = Far(0, F32, Affine(), contiguous(3, 2))
    body = (CollectiveAllGather(engine=Engine.COLLECTIVE, dst=Far(1, F32, Affine(), contiguous(2, 3, 2)), src=w),)
    port = Port("y", Role.OUTPUT, TensorType((2, 3, 2), F32))
    return Executable(Program("v2", 2, buffers, body), (port,), {0: Sharding(0, (4,), (2,))})


def test_each_rank_has_its_piece_in_the_order_in_which_its_program_wants_it() -> None:
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    with Runtime(INF2) as runtime:
        model = runtime.load([Isa(from_bytes(to_bytes(gathering())))], {"w": w})
        assert model.cores == range(2)
        np.testing.assert_array_equal(model.execute({})["y"], [w[:2].T, w[2:].T])


def test_a_weight_that_ranks_share_is_divided_when_it_is_loaded() -> None:
    """As the compiler divides it: the first rank answers with the first half."""
    piece = Sharding(0, (10,), (2,))
    graphs = []
    cuts: tuple[Operator, ...] = (Slice((0, 0), (5, 8), (1, 1)), RankSlice(piece.axis, 1, piece.sizes, piece.parts, 2))
    for op in cuts:
        builder = GraphBuilder()
        x, w = builder.input("x", TensorType((3, 8), F32)), builder.parameter("w", TensorType((10, 8), F32))
        builder.output("y", builder.add(Linear(F32), x, builder.add(op, w)))
        graphs.append(builder.build())
    executable = emit(compiled.CompiledGraph(graphs[0], graphs[1], 2, {"w": piece}, {}), "v2")
    assert list(executable.divisions.values()) == [piece]
    weight, rows = np.arange(80, dtype=np.float32).reshape(10, 8), np.ones((3, 8), np.float32)
    with Runtime(INF2) as runtime:
        model = runtime.load([Isa(from_bytes(to_bytes(executable)))], {"w": weight})
        np.testing.assert_array_equal(model.execute({"x": rows})["y"], rows @ weight[:5].T)


def copying(*, waits: bool = True, partitions: int = 4) -> Executable:
    tile = Tile(Memory.SBUF, F32, 0, partitions, Affine(), contiguous(8))
    near, far = (Far(number, F32, Affine(), contiguous(partitions, 8)) for number in (0, 1))
    buffers = (
        Buffer(Role.INPUT, ("x",), F32, (4, 8)),
        Buffer(Role.OUTPUT, ("y",), F32, (4, 8), (), 4096),
    )
    done = (Wait(Engine.DMA0, Affine(1)),) if waits else ()
    body = (
        DmaCopy(engine=Engine.DMA0, dst=tile, src=near),
        DmaCopy(engine=Engine.DMA1, dst=far, src=tile, waits=done),
    )
    ports = tuple(Port(name, role, TensorType((4, 8), F32)) for name, role in (("x", Role.INPUT), ("y", Role.OUTPUT)))
    return Executable(Program("v2", 1, buffers, body), ports)


def test_a_program_that_goes_wrong_is_a_failed_execution() -> None:
    x = np.ones((4, 8), np.float32)
    with Runtime(INF2) as runtime:
        np.testing.assert_array_equal(runtime.load([Isa(copying())], {}).execute({"x": x})["y"], x)
        with pytest.raises(ExecutionFailed):
            runtime.load([Isa(copying(waits=False))], {}).execute({"x": x})


def test_an_illegal_program_is_not_loaded() -> None:
    with Runtime(INF2) as runtime, pytest.raises(InvalidLoad, match="129"):
        runtime.load([Isa(copying(partitions=129))], {})


def test_a_program_without_its_large_constants_or_weights_is_not_loaded() -> None:
    with Runtime(INF2) as runtime:
        with pytest.raises(InvalidLoad, match="'w' is missing"):
            runtime.load([Isa(gathering())], {})
        constant = Buffer(Role.CONSTANT, ("0" * 64,), F32, (4,), (), 8192)
        program = copying().program
        lacking = replace(copying(), program=replace(program, buffers=(*program.buffers, constant)))
        with pytest.raises(InvalidLoad, match="constant"):
            runtime.load([Isa(lacking)], {})


def test_a_program_runs_on_its_generation_only() -> None:
    with Runtime(instance("trn2.48xlarge")) as runtime:
        with pytest.raises(WrongGeneration):
            runtime.load([stored(running_sum(3))], {})
        runtime.load([stored(running_sum(3), "v3")], {})


def test_a_program_takes_its_weights_and_all_else_that_it_has_in_hbm() -> None:
    code = Isa(gathering())
    assert list(code.weights.values()) == [24]
    assert code.scratch == 4096 + 48 - 24
