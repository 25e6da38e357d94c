"""Operators that only move elements give the very bits that `fast` gives, whatever lies how."""

import numpy as np
import pytest

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.lower.lowering import NotLowered
from nxpipe.emulator.ops import Binary, Bitcast, Broadcast, Concat, Flip, Pad, Reshape, Slice, SliceUpdate, Transpose
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.roll import roll
from tests.lower.harness import Case, require_equal, run
from tests.lower.sweep import BYTES, FLOATS, INTEGERS, Draw, Row, sweep

ANY = (*FLOATS, *BYTES, *INTEGERS, DType.BOOL)


def _reshape(draw: Draw) -> Value:
    shape, dtype = draw.shape(), draw.one_of(ANY)
    size = int(np.prod(shape))
    parts = [1]
    for factor in range(2, 8):
        if size % factor == 0 and draw.integer(0, 1):
            parts.append(factor)
            size //= factor
    return draw.builder.add(Reshape((size, *parts)), draw.tensor(shape, dtype))


def _transpose(draw: Draw) -> Value:
    shape = draw.shape(most=5, largest=5)
    order = tuple(draw.random.permutation(len(shape)).tolist())
    return draw.builder.add(Transpose(order), draw.tensor(shape, draw.one_of(ANY)))


def _broadcast(draw: Draw) -> Value:
    shape = draw.shape(most=3)
    thin = tuple(1 if draw.integer(0, 1) else size for size in shape)[draw.integer(0, 1) :]
    return draw.builder.add(Broadcast(shape), draw.tensor(thin, draw.one_of(ANY)))


def _window(draw: Draw, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    starts = tuple(draw.integer(0, size) for size in shape)
    stops = tuple(draw.integer(start, size) for start, size in zip(starts, shape, strict=True))
    return starts, stops, tuple(draw.integer(1, 3) for _ in shape)


def _slice(draw: Draw) -> Value:
    shape = draw.shape()
    return draw.builder.add(Slice(*_window(draw, shape)), draw.tensor(shape, draw.one_of(ANY)))


def _slice_update(draw: Draw) -> Value:
    shape, dtype = draw.shape(), draw.one_of(ANY)
    op = SliceUpdate(*_window(draw, shape))
    hole = op.window_shape(op, TensorType(shape, dtype))
    return draw.builder.add(op, draw.tensor(shape, dtype), draw.tensor(hole, dtype))


def _flip(draw: Draw) -> Value:
    shape = draw.shape()
    axes = tuple(axis for axis in range(len(shape)) if draw.integer(0, 1))
    return draw.builder.add(Flip(axes), draw.tensor(shape, draw.one_of(ANY)))


def _concat(draw: Draw) -> Value:
    shape, dtype = draw.shape(), draw.one_of(ANY)
    axis = draw.integer(0, len(shape) - 1)
    parts = []
    for _ in range(draw.integer(1, 3)):
        parts.append(draw.tensor((*shape[:axis], draw.integer(1, 6), *shape[axis + 1 :]), dtype))
    return draw.builder.add(Concat(axis), *parts)


def _pad(draw: Draw) -> Value:
    shape, dtype = draw.shape(), draw.one_of(ANY)
    before, after = (tuple(draw.integer(0, 3) for _ in shape) for _ in range(2))
    filling = draw.builder.scalar(1, dtype) if draw.integer(0, 1) else draw.tensor((), dtype)
    return draw.builder.add(Pad(before, after), draw.tensor(shape, dtype), filling)


def _bitcast(draw: Draw) -> Value:
    source, target = draw.one_of(
        [
            (DType.FLOAT32, DType.INT32),
            (DType.BFLOAT16, DType.INT16),
            (DType.INT32, DType.FLOAT16),
            (DType.UINT8, DType.INT16),
            (DType.FLOAT32, DType.UINT8),
        ]
    )
    shape = (*draw.shape(most=2), 4)
    return draw.builder.add(Bitcast(source, target), draw.tensor(shape, source))


TABLE = (
    Row("reshape", Reshape, _reshape),
    Row("transpose", Transpose, _transpose),
    Row("broadcast", Broadcast, _broadcast),
    Row("slice", Slice, _slice),
    Row("slice_update", SliceUpdate, _slice_update),
    Row("flip", Flip, _flip),
    Row("concat", Concat, _concat),
    Row("pad", Pad, _pad),
    Row("bitcast", Bitcast, _bitcast),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_moving_elements_changes_none_of_them(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_moving_elements_changes_none_of_them_in_many_forms(row: Row) -> None:
    sweep(row, 200)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_tensors_without_axes_or_elements_are_moved_too(shape: tuple[int, ...]) -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType(shape, DType.FLOAT32))
    builder.output("flipped", builder.add(Flip(()), x))
    builder.output("flat", builder.add(Reshape((int(np.prod(shape)),)), x))
    builder.output("wide", builder.add(Broadcast((2, *shape)), x))
    builder.output("sum", builder.add(Binary("add"), x, x))
    require_equal(Case(builder.build(), {}, {"x": np.ones(shape, np.float32)}))


def _cache(*, read_again: bool) -> Case:
    """A state of which one row is replaced; and, if somebody reads the old one later, its sum with the new one."""
    builder = GraphBuilder()
    cache = builder.input("cache", TensorType((6, 40), DType.FLOAT32))
    row = builder.input("row", TensorType((1, 40), DType.FLOAT32))
    made = builder.add(SliceUpdate((2, 0), (3, 40), (1, 1)), cache, row)
    made = builder.add(SliceUpdate((4, 0), (5, 40), (1, 1)), made, row)
    builder.output("cache", made)
    if read_again:
        old = builder.add(Transpose((1, 0)), cache)
        builder.output("both", builder.add(Binary("add"), old, builder.add(Transpose((1, 0)), made)))
    arrays = {"cache": np.arange(240, dtype=np.float32).reshape(6, 40), "row": np.full((1, 40), -1, np.float32)}
    return Case(builder.build(), {}, arrays)


def test_a_state_is_updated_where_it_lies() -> None:
    case = _cache(read_again=False)
    require_equal(case)
    program = lower(case.graph, "v2")
    assert {buffer.role for buffer in program.buffers} == {Role.STATE, Role.INPUT}
    copies = [each for each in instructions(program.body) if isinstance(each, DmaCopy)]
    assert [each.dst.elements for each in copies] == [40, 40]


def test_a_state_that_is_read_again_keeps_its_old_value_until_then() -> None:
    require_equal(_cache(read_again=True))


def test_a_state_that_no_update_makes_is_replaced_at_the_end() -> None:
    builder = GraphBuilder()
    state = builder.input("state", TensorType((5, 7), DType.FLOAT32))
    turned = builder.add(Reshape((5, 7)), builder.add(Transpose((1, 0)), state))
    builder.output("state", builder.add(Binary("add"), state, turned))
    case = Case(builder.build(), {}, {"state": np.arange(35, dtype=np.float32).reshape(5, 7)})
    require_equal(case)
    assert run(lower(case.graph, "v2"), case)["state"].shape == (5, 7)


def test_bytes_of_64_bit_integers_are_refused() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((4,), DType.INT64))
    builder.output("y", builder.add(Bitcast(DType.INT64, DType.INT32), x))
    with pytest.raises(NotLowered, match="no 64-bit integers"):
        lower(builder.build(), "v2")


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT32, DType.UINT8])
@pytest.mark.parametrize("shape", [(30, 40, 17), (600, 129), (20, 2, 513)])
def test_a_whole_matrix_is_turned_bit_by_bit_in_blocks(shape: tuple[int, ...], dtype: DType) -> None:
    numbers = np.random.default_rng(5).integers(0, 200, shape).astype(dtype.held)
    if dtype.is_float:
        numbers.flat[::7] = np.nan
        numbers.flat[::5] = np.inf
    builder = GraphBuilder()
    x = builder.input("x", TensorType(shape, dtype))
    order = (*range(1, len(shape)), 0)
    builder.output("turned", builder.add(Transpose(order), x))
    case = Case(builder.build(), {}, {"x": numbers})
    require_equal(case)
    for core in ("v2", "v3"):
        copies = [each for each in instructions(lower(case.graph, core).body) if isinstance(each, DmaCopy)]
        assert all(place.axes[-1].stride == 1 for each in copies for place in (each.dst, each.src))


def test_a_transpose_of_a_rolled_loop_is_read_after_the_loop_as_of_the_last_iteration() -> None:
    """A transpose is a view of the loop-carried buffer, of which each iteration reads the other half."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), DType.FLOAT32))
    values = [builder.add(Binary("add"), x, x)]
    for _ in range(4):
        values.append(builder.add(Transpose((1, 0)), values[-1]))
    builder.output("inside", builder.add(Binary("add"), values[3], values[3]))
    builder.output("last", builder.add(Binary("multiply"), values[4], values[4]))
    graph = roll(builder.build(), PassOptions())
    assert [repeat.count for repeat in graph.repeats] == [2]
    require_equal(Case(graph, {}, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}))
