"""Each rule of the hostile core, with a program that violates it."""

from dataclasses import replace

import numpy as np
import pytest

from nxpipe.emulator.core.faults import Deadlock, MalformedInstruction, OutOfBounds, Race, SumNotBegun, Unwritten
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Alu, Engine, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Loop, Program, Role, Step
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.vector import Memset, TensorCopy, TensorTensor
from tests.core.hands import in_order, table

F32 = DType.FLOAT32
X = Far(0, F32, Affine(), contiguous(4, 8))
Y = Far(1, F32, Affine(), contiguous(4, 8))
ORDERS = ("hostile", "program", "random:5")


def sbuf(offset: Affine | int = 0, size: int = 8, lanes: int = 4) -> Tile:
    return Tile(Memory.SBUF, F32, 0, lanes, Affine() + offset, contiguous(size))


def psum(offset: int = 0, lanes: int = 8) -> Tile:
    return replace(sbuf(offset, lanes=lanes), memory=Memory.PSUM)


def load(offset: int = 0) -> DmaCopy:
    return DmaCopy(engine=Engine.DMA0, dst=sbuf(offset), src=X)


def store(offset: int = 0) -> DmaCopy:
    return DmaCopy(engine=Engine.DMA1, dst=Y, src=sbuf(offset))


def machine(*body: Step, order: str = "hostile", check: bool = True) -> Machine:
    buffers = table((Role.INPUT, "x", F32, (4, 8)), (Role.OUTPUT, "y", F32, (4, 8)))
    built = Machine(Program("v2", 1, buffers, body), order=order, check=check)
    built.write("x", np.arange(32, dtype=np.float32).reshape(4, 8))
    return built


@pytest.mark.parametrize("order", ORDERS)
def test_reading_what_nobody_has_written_is_an_error_that_names_instruction_place_and_element(order: str) -> None:
    half = Memset(engine=Engine.VECTOR, dst=sbuf(size=4), value=1.0)
    twice = TensorTensor(engine=Engine.VECTOR, dst=sbuf(64), left=sbuf(), right=sbuf(), op=Alu.ADD)
    message = r"vector tensor_tensor .*: reads sbuf\[0:4, bytes 0:32\], where element 4 of 32 was never written"
    with pytest.raises(Unwritten, match=message):
        machine(half, twice, order=order).execute()


def test_what_one_run_has_written_is_not_there_in_the_next() -> None:
    both = machine(*in_order([load(), store()]))
    both.execute()
    np.testing.assert_array_equal(both.read("y"), both.read("x"))
    both.execute()
    first = machine(*in_order([store(), load()]))
    for _ in range(2):
        with pytest.raises(Unwritten):
            first.execute()


def test_an_output_that_no_instruction_wrote_cannot_be_read() -> None:
    some = machine(load())
    some.execute()
    with pytest.raises(Unwritten, match=r"output 'y' is read, but its element \[0, 0\] was never written"):
        some.read("y")


@pytest.mark.parametrize(
    "place",
    [sbuf(Affine(192 * 1024 - 28)), sbuf(Affine(-4)), psum(16 * 1024), sbuf(index(0) * (192 * 1024 - 32))],
)
def test_an_access_outside_of_a_partition_is_an_error(place: Tile) -> None:
    body = Loop(3, (Memset(engine=Engine.VECTOR, dst=place, value=0.0),))
    with pytest.raises(OutOfBounds, match=r"vector memset .*reaches from byte -?\d+ up to -?\d+ of a partition of"):
        machine(body).execute()


def test_an_access_outside_of_a_buffer_is_an_error_although_another_buffer_lies_there() -> None:
    beyond = DmaCopy(engine=Engine.DMA0, dst=sbuf(), src=replace(X, offset=Affine(1)))
    with pytest.raises(OutOfBounds, match=r"reaches from byte 4 up to 132 of x, which has 128"):
        machine(beyond).execute()


def test_partitions_that_do_not_exist_are_an_error() -> None:
    with pytest.raises(OutOfBounds, match="partitions 0 up to 129 of 128"):
        machine(Memset(engine=Engine.VECTOR, dst=sbuf(lanes=129), value=0.0))


def product(accumulate: int) -> Matmul:
    return Matmul(engine=Engine.TENSOR, dst=psum(), stationary=sbuf(), moving=sbuf(), accumulate=Affine(accumulate))


def test_a_sum_begins_with_a_matmul_that_does_not_accumulate() -> None:
    machine(*in_order([load(), product(0), product(1), product(1)])).execute()
    with pytest.raises(SumNotBegun, match=r"nc_matmul .*: accumulates to psum\[0:8, bytes 0:32\]"):
        machine(*in_order([load(), product(1)])).execute()


def test_sums_are_read_as_often_as_something_is_added_to_them() -> None:
    adding = Loop(3, (Loop(5, (replace(product(0), accumulate=index(1)),)),))
    body = in_order([load(), adding, product(1)])
    done = machine(*body)
    assert done.execute().read["psum"] == (3 * 4 + 1) * 8 * 8 * 4


def test_whatever_else_writes_to_a_sum_ends_it() -> None:
    cleared = Memset(engine=Engine.VECTOR, dst=replace(psum(), axes=(Axis(1, 1),)), value=0.0)
    with pytest.raises(SumNotBegun):
        machine(*in_order([load(), product(0), cleared, product(1)])).execute()
    copied = TensorCopy(engine=Engine.VECTOR, dst=psum(), src=psum())
    with pytest.raises(SumNotBegun):
        machine(*in_order([load(), product(0), copied, product(1)])).execute()


@pytest.mark.parametrize("order", ORDERS)
def test_a_race_names_both_instructions_and_the_place(order: str) -> None:
    # Each waits for the load, neither for the other.
    body = [
        load(),
        Memset(engine=Engine.VECTOR, dst=sbuf(16), value=1.0).after(Wait(Engine.DMA0, Affine(1))),
        TensorCopy(engine=Engine.GPSIMD, dst=sbuf(256), src=sbuf()).after(Wait(Engine.DMA0, Affine(1))),
    ]
    with pytest.raises(Race) as caught:
        machine(*body, order=order).execute()
    assert "vector memset" in str(caught.value)
    assert "gpsimd tensor_copy" in str(caught.value)
    assert "sbuf[0:4, bytes " in str(caught.value)
    machine(*body, order=order, check=False).execute()  # where nobody looks, the order decides what is copied


def test_a_race_names_the_turn_of_the_loops() -> None:
    behind = Wait(Engine.VECTOR, index(0))  # one turn too few
    body = Loop(
        4,
        (
            Memset(engine=Engine.VECTOR, dst=sbuf(index(0) * 32), value=1.0),
            TensorCopy(engine=Engine.SCALAR, dst=sbuf(index(0) * 32 + 1024), src=sbuf()).after(behind),
        ),
    )
    fixed = Memset(engine=Engine.VECTOR, dst=sbuf(), value=1.0)
    with pytest.raises(Race, match=r"scalar tensor_copy .* with i0=0: reads .* by \(vector memset"):
        machine(fixed, body, order="program").execute()


@pytest.mark.parametrize("order", ORDERS)
def test_places_that_only_interlock_are_no_race(order: str) -> None:
    even, odd = (replace(sbuf(4 * start), axes=(Axis(8, 2),)) for start in (0, 1))
    body = [
        Memset(engine=Engine.VECTOR, dst=even, value=1.0),
        Memset(engine=Engine.GPSIMD, dst=odd, value=2.0),
        store().after(Wait(Engine.VECTOR, Affine(1)), Wait(Engine.GPSIMD, Affine(1))),
    ]
    done = machine(*body, order=order)
    done.execute()
    np.testing.assert_array_equal(done.read("y"), [[1, 2] * 4] * 4)


def test_what_one_waited_for_another_learns_by_waiting_for_the_one() -> None:
    body = [
        load(),
        Memset(engine=Engine.VECTOR, dst=sbuf(512), value=1.0).after(Wait(Engine.DMA0, Affine(1))),
        TensorCopy(engine=Engine.GPSIMD, dst=sbuf(256), src=sbuf()).after(Wait(Engine.VECTOR, Affine(1))),
    ]
    for order in ORDERS:
        machine(*body, order=order).execute()


def test_a_copy_reads_its_source_as_late_as_it_may() -> None:
    first, second = (Memset(engine=Engine.VECTOR, dst=sbuf(), value=value) for value in (1.0, 2.0))
    late = machine(first, store().after(Wait(Engine.VECTOR, Affine(1))), second, check=False)
    late.execute()
    np.testing.assert_array_equal(late.read("y"), np.full((4, 8), 2))
    early = machine(first, store().after(Wait(Engine.VECTOR, Affine(1))), second, check=False, order="program")
    early.execute()
    np.testing.assert_array_equal(early.read("y"), np.full((4, 8), 1))


def test_a_copy_that_nobody_waits_for_lands_last() -> None:
    early = TensorCopy(engine=Engine.VECTOR, dst=sbuf(256), src=sbuf())
    with pytest.raises(Unwritten):
        machine(load(), early, check=False).execute()
    machine(load(), early, check=False, order="program").execute()


def test_a_copy_that_nobody_waits_for_stays_behind_one_that_somebody_waits_for() -> None:
    first, second = (Memset(engine=Engine.VECTOR, dst=sbuf(), value=value) for value in (1.0, 2.0))
    other = load(64)
    for queue in (Engine.DMA2, Engine.DMA7):
        late = replace(store(), engine=queue).after(Wait(Engine.VECTOR, Affine(1)))
        body = (first, late, other, second.after(Wait(Engine.DMA0, Affine(1))))
        done = machine(*body, check=False)
        done.execute()
        np.testing.assert_array_equal(done.read("y"), np.full((4, 8), 2))


@pytest.mark.parametrize("order", ORDERS)
def test_engines_that_wait_for_each_other_are_all_listed(order: str) -> None:
    body = [
        Memset(engine=Engine.VECTOR, dst=sbuf(), value=1.0).after(Wait(Engine.GPSIMD, Affine(1))),
        Memset(engine=Engine.GPSIMD, dst=sbuf(64), value=1.0).after(Wait(Engine.VECTOR, Affine(1))),
        store().after(Wait(Engine.GPSIMD, Affine(3))),
    ]
    with pytest.raises(Deadlock) as caught:
        machine(*body, order=order).execute()
    engines = ("vector>=1", "gpsimd>=1", "gpsimd>=3")
    assert all(f"waits for {engine}, which has completed 0" in str(caught.value) for engine in engines)
    assert len(caught.value.waiting) == 3


def test_operands_that_do_not_go_together_are_an_error() -> None:
    wrong = DmaCopy(engine=Engine.DMA0, dst=sbuf(size=4), src=X)
    with pytest.raises(MalformedInstruction, match="32 elements are written to sbuf"):
        machine(wrong).execute()


def test_weights_are_not_written_to() -> None:
    buffers = table(
        (Role.PARAMETER, "w", F32, (4, 8)),
    )
    with pytest.raises(MalformedInstruction, match="writes to the parameter 'w'"):
        Machine(Program("v2", 1, buffers, (DmaCopy(engine=Engine.DMA0, dst=X, src=sbuf()),)))
