"""A program as its host sees it: inputs, outputs, state, and collectives between ranks."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.core.faults import Unwritten
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.errors import ExecutionError, MissingTensor, WrongTensor
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.collective import CollectiveAllGather, CollectiveAllReduce, CollectiveReduceScatter
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.vector import TensorTensor
from nxpipe.emulator.numerics import Array, round_to
from tests.core.hands import in_order, table

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def whole(buffer: int, dtype: DType, *shape: int) -> Far:
    return Far(buffer, dtype, Affine(), contiguous(*shape))


def copying(role: Role, dtype: DType, shape: tuple[int, ...]) -> Machine:
    buffers = table((role, "x", dtype, shape), (Role.OUTPUT, "y", dtype, shape))
    copy = DmaCopy(engine=Engine.DMA0, dst=whole(1, dtype, *shape), src=whole(0, dtype, *shape))
    return Machine(Program("v2", 1, buffers, (copy,)))


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_float])
def test_floats_are_rounded_to_their_type_on_the_way_in_and_come_back_as_float32(dtype: DType) -> None:
    x = np.random.default_rng(0).normal(0, 1, (3, 5)).astype(np.float32)
    machine = copying(Role.PARAMETER, dtype, (3, 5))
    machine.write("x", x)
    machine.execute()
    assert machine.read("y").dtype == np.float32
    np.testing.assert_array_equal(machine.read("y"), round_to(x, dtype))
    machine.execute()  # parameters stay
    np.testing.assert_array_equal(machine.read("y"), round_to(x, dtype))


def test_integers_of_64_bits_are_narrowed_where_they_fit() -> None:
    machine = copying(Role.INPUT, DType.INT32, (2,))
    machine.write("x", np.array([-5, 2**31 - 1], np.int64))
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), [-5, 2**31 - 1])
    with pytest.raises(WrongTensor, match=r"input 'x' is from 0 to 2147483648"):
        machine.write("x", np.array([0, 2**31], np.int64))


@pytest.mark.parametrize("wrong", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.int32)])
def test_a_tensor_of_another_shape_or_kind_is_refused(wrong: Array) -> None:
    with pytest.raises(WrongTensor, match=r"parameter 'x' is \w+\[\d, \d\], but the graph declares f32\[3,2\]"):
        copying(Role.PARAMETER, F32, (3, 2)).write("x", wrong)


def test_a_name_that_the_program_does_not_know_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"no input or state or parameter 'z'; it has x"):
        copying(Role.INPUT, F32, (2,)).write("z", np.zeros(2, np.float32))


def test_a_parameter_that_was_not_loaded_cannot_be_used() -> None:
    with pytest.raises(Unwritten, match=r"reads x\[bytes 0:8\]"):
        copying(Role.PARAMETER, F32, (2,)).execute()


def test_a_parameter_may_lie_with_its_axes_in_another_order() -> None:
    w = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    buffers = (
        Buffer(Role.PARAMETER, ("w",), F32, (4, 2, 3), order=(2, 0, 1)),
        Buffer(Role.OUTPUT, ("y",), F32, (4, 2, 3), address=128),
    )
    copy = DmaCopy(engine=Engine.DMA0, dst=whole(1, F32, 4, 2, 3), src=whole(0, F32, 4, 2, 3))
    machine = Machine(Program("v2", 1, buffers, (copy,)))
    machine.write("w", w)
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), w.transpose(2, 0, 1))
    np.testing.assert_array_equal(machine.read("w"), w)


@given(rows=st.integers(1, 400), columns=st.integers(1, 40), tile=st.integers(1, 50), transposed=st.booleans())
def test_a_partition_has_its_rows_of_a_tile_of_a_parameter_side_by_side(
    rows: int, columns: int, tile: int, *, transposed: bool
) -> None:
    """The layout of docs/reference/nxe.md, element by element."""
    matrix = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    order = (1, 0) if transposed else ()
    buffers = (
        Buffer(Role.PARAMETER, ("w",), F32, (rows, columns), order, tile=tile),
        Buffer(Role.OUTPUT, ("y",), F32, (rows * columns,), address=4 * rows * columns),
    )
    copy = DmaCopy(engine=Engine.DMA0, dst=whole(1, F32, rows * columns), src=whole(0, F32, rows * columns))
    machine = Machine(Program("v2", 1, buffers, (copy,)))
    machine.write("w", matrix.T if transposed else matrix)
    machine.execute()
    chunks, found = rows // 128, iter(machine.read("y").tolist())
    for partition in range(128):
        for first in range(0, columns, tile):
            for chunk in range(chunks):
                for column in range(first, min(first + tile, columns)):
                    assert next(found) == matrix[128 * chunk + partition, column]
    assert list(found) == matrix[128 * chunks :].reshape(-1).tolist()
    np.testing.assert_array_equal(machine.read("w"), matrix.T if transposed else matrix)


def test_each_matrix_of_a_parameter_is_in_tiles_of_its_own() -> None:
    experts = np.arange(3 * 300 * 20, dtype=np.float32).reshape(3, 20, 300)
    kept = []
    for shape, order in (((3, 300, 20), (0, 2, 1)), ((300, 20), (1, 0))):
        size = 300 * 20 * (3 if len(shape) == 3 else 1)
        buffers = (
            Buffer(Role.PARAMETER, ("w",), F32, shape, order, tile=8),
            Buffer(Role.OUTPUT, ("y",), F32, (size,), address=4 * size),
        )
        copy = DmaCopy(engine=Engine.DMA0, dst=whole(1, F32, size), src=whole(0, F32, size))
        for tensor in [experts] if len(shape) == 3 else experts:
            machine = Machine(Program("v2", 1, buffers, (copy,)))
            machine.write("w", tensor)
            machine.execute()
            np.testing.assert_array_equal(machine.read("w"), tensor)
            kept.append(machine.read("y"))
    together, *alone = kept
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_a_loop_finds_each_layers_weight_by_its_index() -> None:
    buffers = (
        Buffer(Role.PARAMETER, ("layers.0", "layers.1", "layers.2"), BF16, (2, 2)),
        Buffer(Role.OUTPUT, ("y",), BF16, (3, 2, 2), address=64),
    )
    each = [Far(buffer, BF16, index(0) * 4, contiguous(4)) for buffer in (0, 1)]
    machine = Machine(Program("v2", 1, buffers, (Loop(3, (DmaCopy(engine=Engine.DMA0, dst=each[1], src=each[0]),)),)))
    for layer in range(3):
        if layer == 2:
            with pytest.raises(Unwritten, match="with i0=2"):
                machine.execute()
        machine.write(f"layers.{layer}", np.full((2, 2), layer, np.float32))
    machine.execute()
    np.testing.assert_array_equal(machine.read("y")[:, 0, 0], [0, 1, 2])


def test_states_are_kept_from_run_to_run() -> None:
    shape = (4, 2)
    tile, more = (Tile(Memory.SBUF, F32, 0, 4, Affine(at), contiguous(2)) for at in (0, 64))
    buffers = table((Role.STATE, "count", F32, shape), (Role.INPUT, "x", F32, shape))
    body: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=tile, src=whole(0, F32, *shape)),
        DmaCopy(engine=Engine.DMA1, dst=more, src=whole(1, F32, *shape)),
        TensorTensor(engine=Engine.VECTOR, dst=tile, left=tile, right=more, op=Alu.ADD),
        DmaCopy(engine=Engine.DMA0, dst=whole(0, F32, *shape), src=tile),
    ]
    machine = Machine(Program("v2", 1, buffers, in_order(body)))
    machine.write("count", np.zeros(shape, np.float32))
    machine.write("x", np.full(shape, 2, np.float32))
    for turn in range(1, 4):
        machine.execute()
        np.testing.assert_array_equal(machine.read("count"), np.full(shape, 2 * turn))


@pytest.mark.parametrize("role", [Role.OUTPUT, Role.SCRATCH])
def test_what_is_not_kept_is_fresh_in_each_run(role: Role) -> None:
    """What a run writes depends on row numbers; what it leaves out nobody has written, although an earlier run did."""
    ids, rows = Tile(Memory.SBUF, DType.UINT32, 0, 4, Affine(), contiguous(1)), whole(2, F32, 4, 2)
    buffers = table(
        (Role.INPUT, "ids", DType.UINT32, (4,)),
        (Role.INPUT, "x", F32, (4, 2)),
        (role, "t", F32, (4, 2)),
        (Role.OUTPUT, "y", F32, (4, 2)),
    )
    body: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=ids, src=whole(0, DType.UINT32, 4)),
        DmaCopy(engine=Engine.DMA1, dst=replace(rows, rows=ids), src=whole(1, F32, 4, 2)),
        DmaCopy(engine=Engine.DMA2, dst=whole(3, F32, 4, 2), src=rows),
    ]
    machine = Machine(Program("v2", 1, buffers, in_order(body)))
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    machine.write("x", x)
    machine.write("ids", np.array([3, 2, 1, 0], np.uint32))
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), x[::-1])
    machine.write("ids", np.array([0, 1, 0, 3], np.uint32))
    with pytest.raises(Unwritten, match=r"reads t\[bytes \d+:\d+\], where element 4 of 8 was never written"):
        machine.execute()


def test_constants_come_with_the_program() -> None:
    table_ = np.arange(6, dtype=np.float32)
    buffers = table((Role.CONSTANT, "digest", F32, (6,)), (Role.OUTPUT, "y", F32, (6,)))
    copy = DmaCopy(engine=Engine.DMA0, dst=whole(1, F32, 6), src=whole(0, F32, 6))
    machine = Machine(Program("v2", 1, buffers, (copy,), constants={"digest": table_.tobytes()}))
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), table_)
    with pytest.raises(MissingTensor, match="constant 'digest' is missing"):
        Machine(Program("v2", 1, buffers, (copy,)))
    with pytest.raises(WrongTensor, match="24 bytes"):
        Machine(Program("v2", 1, buffers, (copy,), constants={"digest": b"short"}))


def meeting(ranks: int, dtype: DType, order: str, make: type[Instruction], shares: list[Array]) -> list[Array]:
    """The data of each rank after a collective between copies through SBUF."""
    shape = shares[0].shape
    out = shape if make is CollectiveAllReduce else (ranks, *shape)
    buffers = table(
        (Role.INPUT, "x", dtype, shape),
        (Role.SCRATCH, "t", dtype, shape),
        (Role.SCRATCH, "u", dtype, out),
        (Role.OUTPUT, "y", dtype, out),
    )
    far = [whole(number, dtype, *buffer.shape) for number, buffer in enumerate(buffers)]
    body: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=far[1], src=far[0]),
        make(engine=Engine.COLLECTIVE, dst=far[2], src=far[1]),  # type: ignore[call-arg]
        DmaCopy(engine=Engine.DMA2, dst=far[3], src=far[2]),
    ]
    machine = Machine(Program("v3", ranks, buffers, in_order(body)), order=order)
    for rank, share in enumerate(shares):
        machine.write("x", share, rank)
    machine.execute()
    return [machine.read("y", rank) for rank in range(ranks)]


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1).map(np.random.default_rng),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((F32, BF16)),
    st.sampled_from(("hostile", "program", "random:9")),
)
def test_ranks_add_in_their_order_and_round_once(
    random: np.random.Generator, ranks: int, dtype: DType, order: str
) -> None:
    shares = [round_to(random.normal(0, 1, (3, 4)).astype(np.float32), dtype) for _ in range(ranks)]
    expected = round_to(reduce(lambda sums, share: sums + share, shares), dtype)
    for found in meeting(ranks, dtype, order, CollectiveAllReduce, shares):
        np.testing.assert_array_equal(found, expected)
    for found in meeting(ranks, dtype, order, CollectiveAllGather, shares):
        np.testing.assert_array_equal(found, np.stack(shares))


@pytest.mark.parametrize("order", ["hostile", "random:9"])
def test_ranks_take_their_parts_of_tiles_and_put_them_together_again(order: str) -> None:
    """Parts lie one behind the other in each partition."""
    shares = [np.random.default_rng(rank).normal(0, 1, (6, 40)).astype(np.float32) for rank in range(4)]
    buffers = table((Role.INPUT, "x", F32, (6, 40)), (Role.OUTPUT, "y", F32, (6, 10)), (Role.OUTPUT, "z", F32, (6, 40)))
    wide, own = (Tile(Memory.SBUF, F32, 32, 6, Affine(at), contiguous(size)) for at, size in ((128, 40), (512, 10)))
    body: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=wide, src=whole(0, F32, 6, 40)),
        CollectiveReduceScatter(engine=Engine.COLLECTIVE, dst=own, src=wide),
        DmaCopy(engine=Engine.DMA1, dst=whole(1, F32, 6, 10), src=own),
        CollectiveAllGather(engine=Engine.COLLECTIVE, dst=wide, src=own),
        DmaCopy(engine=Engine.DMA1, dst=whole(2, F32, 6, 40), src=wide),
    ]
    machine = Machine(Program("v2", 4, buffers, in_order(body)), order=order)
    for rank, share in enumerate(shares):
        machine.write("x", share, rank)
    machine.execute()
    total = reduce(lambda sums, share: sums + share, shares)
    for rank in range(4):
        np.testing.assert_array_equal(machine.read("y", rank), total[:, 10 * rank : 10 * rank + 10])
        np.testing.assert_array_equal(machine.read("z", rank), total)


@pytest.mark.parametrize("order", ["hostile", "program", "random:9"])
def test_ranks_add_up_tiles_where_they_lie(order: str) -> None:
    shares = [np.random.default_rng(rank).normal(0, 1, (6, 10)).astype(np.float32) for rank in range(4)]
    buffers = table((Role.INPUT, "x", F32, (6, 10)), (Role.OUTPUT, "y", F32, (6, 10)))
    tile = Tile(Memory.SBUF, F32, 32, 6, Affine(128), contiguous(10))
    body: list[Step] = [
        DmaCopy(engine=Engine.DMA0, dst=tile, src=whole(0, F32, 6, 10)),
        CollectiveAllReduce(engine=Engine.COLLECTIVE, dst=tile, src=tile),
        DmaCopy(engine=Engine.DMA1, dst=whole(1, F32, 6, 10), src=tile),
    ]
    machine = Machine(Program("v2", 4, buffers, in_order(body)), order=order)
    for rank, share in enumerate(shares):
        machine.write("x", share, rank)
    machine.execute()
    for rank in range(4):
        np.testing.assert_array_equal(machine.read("y", rank), reduce(lambda sums, share: sums + share, shares))
