"""Gather and scatter at computed indices, bit by bit; an index out of range is an error."""

from collections.abc import Callable

import numpy as np
import pytest

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.errors import IndexOutOfRange
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Loop, Role, instructions
from nxpipe.emulator.isa.vector import TensorScalar, TensorTensor
from nxpipe.emulator.lower import lower
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Binary, Gather, Index, IndexUpdate, Iota, ScatterAlong, TakeAlong, Unary
from nxpipe.emulator.ops.base import Operator
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.roll import roll
from tests.lower.harness import Case, Given, floats, of, require_equal
from tests.lower.sweep import BYTES, FLOATS, INTEGERS, Draw, Row, sweep

ANY = (*FLOATS, *BYTES, *INTEGERS, DType.BOOL)
COMBINATIONS = ("", "add", "maximum", "minimum", "multiply")


def _indices(draw: Draw, shape: tuple[int, ...], size: int, *, negative: bool = False) -> Value:
    numbers = draw.random.integers(-size if negative else 0, size, shape)
    dtype = draw.one_of((DType.INT64, DType.INT32))
    return draw.tensor(shape, dtype, numbers=numbers.astype(dtype.held))


def _iota(draw: Draw) -> Value:
    dtype = draw.one_of((DType.INT64, DType.INT32, DType.INT8))
    return draw.builder.add(Iota(draw.integer(0, 700), draw.integer(-20, 20), draw.integer(-3, 3), dtype))


def _gather(draw: Draw) -> Value:
    shape = draw.shape()
    axis = draw.integer(0, len(shape) - 1)
    indices = _indices(draw, draw.shape(least=0, most=2), shape[axis])
    return draw.builder.add(Gather(axis), draw.tensor(shape, draw.one_of(ANY)), indices)


def _along(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = draw.shape(most=3)
    axis = draw.integer(0, len(shape) - 1)
    inner = tuple(draw.integer(1, 12) if value == axis else draw.integer(1, size) for value, size in enumerate(shape))
    return shape, inner, axis


def _take_along(draw: Draw) -> Value:
    shape, inner, axis = _along(draw)
    x = draw.tensor(shape, draw.one_of(ANY))
    return draw.builder.add(TakeAlong(axis), x, _indices(draw, inner, shape[axis]))


def _scatter_along(draw: Draw) -> Value:
    shape, inner, axis = _along(draw)
    combine, dtype = draw.one_of(COMBINATIONS), draw.one_of((*FLOATS, *INTEGERS))
    x, update = (draw.tensor(entry, dtype, most=3) for entry in (shape, inner))
    return draw.builder.add(ScatterAlong(axis, combine), x, update, _indices(draw, inner, shape[axis]))


def _addressed(draw: Draw, most: int = 4, largest: int = 6) -> tuple[tuple[int, ...], tuple[int, ...], list[Value]]:
    shape = draw.shape(most=most, largest=largest)
    axes = tuple(axis for axis in range(len(shape)) if draw.integer(0, 1)) or (0,)
    common = draw.shape(least=1, most=2, largest=4)
    indices = []
    for axis in axes:
        own = tuple(1 if draw.integer(0, 2) == 0 else size for size in common)[draw.integer(0, 1) :]
        indices.append(_indices(draw, own, shape[axis], negative=True))
    return shape, axes, indices


def _index(draw: Draw) -> Value:
    shape, axes, indices = _addressed(draw)
    return draw.builder.add(Index(axes), draw.tensor(shape, draw.one_of(ANY)), *indices)


def _index_update(draw: Draw) -> Value:
    shape, axes, indices = _addressed(draw, most=3, largest=4)  # places that may meet are changed one after the other
    combine, dtype = draw.one_of(COMBINATIONS), draw.one_of((*FLOATS, *INTEGERS))
    op = IndexUpdate(axes, combine)
    hole = op.addressed_shape(op, TensorType(shape, dtype), tuple(index.type for index in indices))
    thin = tuple(1 if draw.integer(0, 2) == 0 else size for size in hole)
    most = (
        1 if (combine, dtype) == ("multiply", DType.INT64) else 3
    )  # any number of updates, and the core holds 32 bits
    x, update = (draw.tensor(entry, dtype, most=most) for entry in (shape, thin))
    return draw.builder.add(op, x, update, *indices)


TABLE = (
    Row("iota", Iota, _iota),
    Row("gather", Gather, _gather),
    Row("take_along", TakeAlong, _take_along),
    Row("scatter_along", ScatterAlong, _scatter_along),
    Row("index", Index, _index),
    Row("index_update", IndexUpdate, _index_update),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_computed_places_are_those_of_fast(row: Row) -> None:
    sweep(row, 10)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_computed_places_are_those_of_fast_in_many_forms(row: Row) -> None:
    sweep(row, 200)


def _integers(*numbers: int) -> Given:
    return Given(np.asarray(numbers, np.int64), DType.INT64)


def _zeros(*shape: int) -> Given:
    return Given(np.zeros(shape, np.float32), DType.FLOAT32)


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (Gather(0), (_zeros(5, 40), _integers(2, 5))),
        (Gather(1), (_zeros(3, 5), _integers(-1))),
        (Gather(1), (_zeros(3, 5, 40), _integers(5, 0))),
        (Index((0, 1)), (_zeros(5, 4, 3), _integers(0), _integers(4))),
        (IndexUpdate((1,), ""), (_zeros(2, 5, 3), _zeros(2, 1, 3), _integers(-6))),
        (TakeAlong(0), (_zeros(5), _integers(5))),
        (ScatterAlong(0, ""), (_zeros(5), _zeros(1), _integers(5))),
    ],
)
def test_an_index_outside_of_its_axis_is_an_error(op: Operator, given: tuple[Given, ...]) -> None:
    case = of(op, *given)
    machine = Machine(lower(case.graph, "v2"))
    for name, array in case.inputs.items():
        machine.write(name, array)
    with pytest.raises(IndexOutOfRange):
        machine.execute()


def test_a_row_of_a_cache_is_written_where_the_cache_lies() -> None:
    """Every head's row goes in one copy, and nothing else of the cache moves."""
    builder = GraphBuilder()
    cache = builder.input("cache", TensorType((2, 4, 32, 16), DType.BFLOAT16))
    row = builder.input("row", TensorType((2, 4, 1, 16), DType.BFLOAT16))
    place = builder.input("place", TensorType((1,), DType.INT64))
    builder.output("cache", builder.add(IndexUpdate((2,), ""), cache, row, place))
    arrays = {"cache": np.zeros((2, 4, 32, 16), np.float32), "row": np.ones((2, 4, 1, 16), np.float32)}
    case = Case(builder.build(), {}, {**arrays, "place": np.asarray([7])})
    require_equal(case)
    program = lower(case.graph, "v2")
    states = {number for number, buffer in enumerate(program.buffers) if buffer.role is Role.STATE}
    written = [
        instruction.dst.elements
        for instruction in instructions(program.body)
        if isinstance(instruction, DmaCopy) and isinstance(instruction.dst, Far) and instruction.dst.buffer in states
    ]
    assert written == [2 * 4 * 16]


@pytest.mark.parametrize("shape", [(6, 5), (6, 1), (5,)])
@pytest.mark.parametrize("view", [np.asfortranarray, np.flipud])
def test_of_several_updates_of_an_element_the_last_in_row_major_order_wins(
    view: Callable[[Array], Array], shape: tuple[int, ...]
) -> None:
    chance = np.random.default_rng(5)
    indices = view(chance.integers(0, 3, (6, 5)))
    update = np.asfortranarray(chance.standard_normal(shape))
    expected = np.zeros(3)
    for place, number in zip(indices.ravel(), np.broadcast_to(update, (6, 5)).ravel(), strict=True):
        expected[place] = number
    np.testing.assert_array_equal(IndexUpdate((0,), "").compute(np.zeros(3), update, indices), expected)


def _layers_with_a_cache(layers: int, batch: int, places: int, extra: int) -> Graph:
    """Layers that each write a row of two caches at a position, which is the same for all of them."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((batch, 2, 8), DType.FLOAT32))
    position = builder.input("position", TensorType((batch,), DType.INT64))
    place = builder.add(Binary("add"), position, builder.constant(np.array([extra]), DType.INT64))
    rows = builder.constant(np.arange(batch), DType.INT64)
    for number in range(layers):
        for name in ("key", "value"):
            cache = builder.input(f"cache.{number}.{name}", TensorType((batch, 2, places, 8), DType.FLOAT32))
            builder.output(f"cache.{number}.{name}", builder.add(IndexUpdate((0, 2), ""), cache, x, rows, place))
        x = builder.add(Unary("relu"), builder.add(Binary("add"), x, builder.scalar(1.0)))
    builder.output("y", x)
    return run_passes(builder.build(), PassOptions(), (roll,))


@pytest.mark.parametrize(("batch", "places", "extra"), [(3, 9, 0), (1, 16, 2), (130, 5, 1), (2, 2**24, 0)])
def test_row_numbers_that_no_layer_changes_are_computed_once(batch: int, places: int, extra: int) -> None:
    """Also where float32 does not hold them; and each of the batch has a position of its own."""
    graph = _layers_with_a_cache(3, batch, places, extra)
    assert graph.repeats
    program = lower(graph, "v2")
    (loop,) = (step for step in program.body if isinstance(step, Loop) and step.count == 3)
    inside = [step for step in instructions(loop.body) if isinstance(step, TensorTensor | TensorScalar)]
    assert len(inside) <= 4  # x + 1 and relu, in up to two tile sizes
    if places < 2**20:
        numbers = np.random.default_rng(0).integers(-places, places - extra, batch)
        caches = {name: np.zeros(value.type.shape, np.float32) for name, value in graph.inputs.items() if "c" in name}
        inputs = {**caches, "x": floats(batch, 2, 8).data, "position": numbers}
        require_equal(Case(graph, {}, inputs))


@pytest.mark.parametrize("position", [-10, 9, 2**24 + 1, -(2**31)])
def test_a_place_out_of_range_writes_no_row(position: int) -> None:
    graph = _layers_with_a_cache(2, 1, 9, 0)
    machine = Machine(lower(graph, "v2"))
    for name, value in graph.inputs.items():
        machine.write(name, np.zeros(value.type.shape, value.type.dtype.held))
    machine.write("position", np.array([position]))
    with pytest.raises(IndexOutOfRange):
        machine.execute()
