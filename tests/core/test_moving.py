"""Copies move every element to its place, with any strides, and convert it; gathers follow row numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, contiguous
from nxpipe.emulator.isa.program import Program, Role
from nxpipe.emulator.numerics import Array
from tests.core.hands import NARROW, Layout, as_stored, in_order, layouts, table, values, wide
from tests.tiers import examples

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
types = st.sampled_from(NARROW)
sizes = st.tuples(*[st.integers(1, 4)] * 4)
F32, U32 = DType.FLOAT32, DType.UINT32
LENGTH = 4096


def copied(src: Place, dst: Far, x: Array, before: Array, through: Tile | None = None) -> Array:
    buffers = table((Role.INPUT, "x", src.dtype, x.shape), (Role.STATE, "y", dst.dtype, before.shape))
    steps = [DmaCopy(engine=Engine.DMA3, dst=through or dst, src=src)]
    if through:
        steps.append(DmaCopy(engine=Engine.DMA4, dst=dst, src=through))
    machine = Machine(Program("v2", 1, buffers, in_order(steps)))
    machine.write("x", x)
    machine.write("y", before)
    machine.execute()
    return machine.read("y")


def far(buffer: int, dtype: DType, layout: Layout, shape: tuple[int, ...]) -> Far:
    """A pattern of elements in HBM without overlap."""
    tile = layout.tile(Memory.SBUF, dtype, 0, (1, *shape), 0)
    return Far(buffer, dtype, Affine(tile.offset.base // dtype.itemsize), tile.axes)


def picked(flat: Array, place: Far) -> Array:
    """The elements of a row in the pattern, in its order."""
    where: Array = np.array(place.offset.base)
    for axis in place.axes:
        where = np.add.outer(where, np.arange(axis.size) * axis.stride)
    return np.asarray(where.ravel())


@settings(max_examples=examples(60))
@given(seeds, types, types, sizes, layouts(4), layouts(4))
def test_a_copy_in_hbm(
    random: np.random.Generator, dtype: DType, out: DType, shape: tuple[int, ...], one: Layout, other: Layout
) -> None:
    x, before = values(random, dtype, (LENGTH,)), values(random, out, (LENGTH,))
    src, dst = far(0, dtype, one, shape), far(1, out, other, shape)
    expected = wide(before)
    expected[picked(before, dst)] = as_stored(wide(x[picked(x, src)]), out)
    np.testing.assert_array_equal(copied(src, dst, x, before), expected)


@settings(max_examples=examples(60))
@given(seeds, types, types, sizes, layouts(4), layouts(3))
def test_a_copy_by_way_of_sbuf_with_the_partitions_first(
    random: np.random.Generator, dtype: DType, out: DType, shape: tuple[int, ...], one: Layout, other: Layout
) -> None:
    x, before = values(random, dtype, (LENGTH,)), values(random, out, (LENGTH,))
    src, dst = far(0, dtype, one, shape), Far(1, out, Affine(7), contiguous(*shape))
    through = other.tile(Memory.SBUF, dtype, 5, shape, 64)
    expected = wide(before)
    expected[picked(before, dst)] = as_stored(wide(x[picked(x, src)]), out)
    np.testing.assert_array_equal(copied(src, dst, x, before, through), expected)


def test_one_row_is_broadcast_to_every_partition() -> None:
    x = np.arange(16, dtype=np.float32)
    src = Far(0, F32, Affine(4), (Axis(128, 0), Axis(8, 1)))
    through = Tile(Memory.SBUF, F32, 0, 128, Affine(), contiguous(8))
    found = copied(src, Far(1, F32, Affine(), contiguous(128, 8)), x, np.zeros((128, 8), np.float32), through)
    np.testing.assert_array_equal(found, np.broadcast_to(x[4:12], (128, 8)))


@pytest.mark.parametrize("dtype", [DType.INT32, DType.UINT32])
def test_integers_of_32_bits_are_copied_bit_by_bit(dtype: DType) -> None:
    x = np.array([np.iinfo(dtype.value).max - 1, 2**24 + 1], dtype.stored)
    place = Far(1, dtype, Affine(), contiguous(2))
    np.testing.assert_array_equal(copied(Far(0, dtype, Affine(), contiguous(2)), place, x, np.zeros_like(x)), x)


def test_a_float_keeps_all_its_bits_on_the_way() -> None:
    words = np.array([0x7FC12345, 0xFF812345, 0x00000001, 0x80000000], np.uint32)
    x = words.view(np.float32)
    through = Tile(Memory.SBUF, F32, 0, 4, Affine(), contiguous(1))
    place = Far(1, F32, Affine(), contiguous(4))
    found = copied(Far(0, F32, Affine(), contiguous(4)), place, x, np.zeros(4, np.float32), through)
    np.testing.assert_array_equal(found.view(np.uint32), words)


def by_rows(numbers: Array, table_: Array, update: Array | None = None, offset: int = 0) -> Array:
    """Rows of a table, or a table with replaced rows."""
    count, width = len(numbers), table_.shape[1]
    ids = Tile(Memory.SBUF, U32, 0, count, Affine(), contiguous(1))
    rows = Tile(Memory.SBUF, F32, 0, count, Affine(64), contiguous(width - offset))
    whole = Far(1, F32, Affine(offset), (Axis(count, width), Axis(width - offset, 1)), ids)
    out = Far(2, F32, Affine(), contiguous(count, width - offset))
    buffers = table(
        (Role.INPUT, "ids", U32, numbers.shape),
        (Role.STATE, "table", F32, table_.shape),
        (Role.STATE, "rows", F32, (count, width - offset)),
    )
    moves = [DmaCopy(engine=Engine.DMA0, dst=ids, src=Far(0, U32, Affine(), contiguous(count)))]
    if update is None:
        moves += [DmaCopy(engine=Engine.DMA1, dst=rows, src=whole), DmaCopy(engine=Engine.DMA2, dst=out, src=rows)]
    else:
        moves += [DmaCopy(engine=Engine.DMA1, dst=rows, src=out), DmaCopy(engine=Engine.DMA2, dst=whole, src=rows)]
    machine = Machine(Program("v2", 1, buffers, in_order(moves)))
    for name, array in (("ids", numbers), ("table", table_), ("rows", update)):
        if array is not None:
            machine.write(name, array)
    machine.execute()
    return machine.read("rows" if update is None else "table")


@settings(max_examples=30)
@given(seeds, st.integers(1, 128), st.integers(1, 9), st.integers(2, 6), st.integers(0, 1))
def test_rows_are_gathered_and_scattered_by_number(
    random: np.random.Generator, count: int, height: int, width: int, offset: int
) -> None:
    held = random.normal(0, 1, (height, width)).astype(np.float32)
    numbers = random.integers(0, height, count, np.uint32)
    np.testing.assert_array_equal(by_rows(numbers, held, offset=offset), held[numbers, offset:])
    places = random.permutation(height)[:count].astype(np.uint32)
    update = random.normal(0, 1, (len(places), width - offset)).astype(np.float32)
    expected = held.copy()
    expected[places, offset:] = update
    np.testing.assert_array_equal(by_rows(places, held, update, offset), expected)


def test_a_row_number_outside_of_the_table_is_an_error_that_names_it() -> None:
    with pytest.raises(IndexOutOfRange, match=r"index 9 is outside of an axis of size 4 at dma1 +dma_copy"):
        by_rows(np.array([0, 9, 1], np.uint32), np.zeros((4, 5), np.float32))


def test_a_row_number_below_zero_is_named_as_such() -> None:
    with pytest.raises(IndexOutOfRange, match="index -3 is outside of an axis of size 4"):
        by_rows(np.array([0, -3, 1]).astype(np.uint32), np.zeros((4, 5), np.float32))


@settings(max_examples=20)
@given(seeds, st.integers(1, 20), st.integers(1, 20), st.sampled_from((DType.BFLOAT16, F32)))
def test_a_transposing_copy(random: np.random.Generator, height: int, width: int, dtype: DType) -> None:
    x = values(random, dtype, (height, width))
    tile = Tile(Memory.SBUF, dtype, 0, width, Affine(), contiguous(height))
    moves = [
        DmaTranspose(engine=Engine.DMA0, dst=tile, src=Far(0, dtype, Affine(), contiguous(height, width))),
        DmaCopy(engine=Engine.DMA1, dst=Far(1, dtype, Affine(), contiguous(width, height)), src=tile),
    ]
    buffers = table((Role.INPUT, "x", dtype, x.shape), (Role.OUTPUT, "y", dtype, (width, height)))
    machine = Machine(Program("v3", 1, buffers, in_order(moves)))
    machine.write("x", x)
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), wide(x.T))
