"""Products of the same rows, and computed rows: read once, and never stored in HBM."""

from collections import Counter
from collections.abc import Mapping

import pytest

from nxpipe.emulator.analysis.utilization import HBM, totals
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.legality import check
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Loop, Program, Role, Step
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Binary, Cast, LayerNorm, Linear, MatMul, Reshape, RmsNorm, Transpose, Unary
from tests.lower.harness import Given, case, floats, require_equal, wholes

BF16, F32 = DType.BFLOAT16, DType.FLOAT32


def _read(program: Program) -> Mapping[str, int]:
    """The bytes read from each buffer."""
    found: Counter[str] = Counter()

    def add(steps: tuple[Step, ...], times: int) -> None:
        for step in steps:
            if isinstance(step, Loop):
                add(step.body, times * step.count)
            else:
                for place in _far(step):
                    found[program.buffers[place.buffer].names[0]] += times * moved(place)

    add(program.body, 1)
    return found


def _far(instruction: Instruction) -> list[Far]:
    return [place for place in instruction.read() if isinstance(place, Far)]


def _scratch(program: Program) -> list[str]:
    return [buffer.names[0] for buffer in program.buffers if buffer.role is Role.SCRATCH]


def _weights(inner: int, *columns: int) -> list[Given]:
    return [
        wholes(width, inner, dtype=BF16, most=1, seed=1 + number, role=Role.PARAMETER)
        for number, width in enumerate(columns)
    ]


def _each(builder: GraphBuilder, x: Value, *weights: Value) -> dict[str, Value]:
    return {f"y{number}": builder.add(Linear(BF16), x, weight) for number, weight in enumerate(weights)}


@pytest.mark.parametrize("rows", [1, 70, 300])
def test_three_products_of_the_same_rows_read_them_once(rows: int) -> None:
    made = case(_each, wholes(rows, 200, dtype=BF16, most=1), *_weights(200, 130, 70, 640))
    require_equal(made)
    program = lower(made.graph, "v2")
    assert totals(program).read[HBM] == (rows * 200 + 200 * (130 + 70 + 640)) * BF16.itemsize


def test_a_product_that_needs_another_of_the_same_rows_comes_after_it() -> None:
    def build(builder: GraphBuilder, x: Value, weight: Value) -> Value:
        return builder.add(MatMul(BF16), x, builder.add(Linear(BF16), x, weight))

    require_equal(case(build, wholes(90, 90, dtype=BF16, most=1), *_weights(90, 90)), cores=("v2",))


def _gated(builder: GraphBuilder, x: Value, gate: Value, up: Value) -> Value:
    opened = builder.add(Unary("relu"), builder.add(Linear(BF16), x, gate))
    return builder.add(Binary("multiply"), opened, builder.add(Linear(BF16), x, up))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 3000, 1100), (300, 200, 700), (20, 9000, 130)])
def test_of_two_products_that_meet_only_what_becomes_of_them_is_stored(rows: int, inner: int, columns: int) -> None:
    made = case(_gated, wholes(rows, inner, dtype=BF16, most=1), *_weights(inner, columns, columns))
    require_equal(made)
    program = lower(made.graph, "v2")
    assert not _scratch(program)
    assert totals(program).written[HBM] == rows * columns * BF16.itemsize


def test_products_of_which_one_is_turned_before_they_meet_are_stored() -> None:
    def build(builder: GraphBuilder, x: Value, one: Value, two: Value) -> Value:
        first = builder.add(Linear(BF16), x, one)
        second = builder.add(Linear(BF16), x, two)
        return builder.add(Binary("add"), first, builder.add(Transpose((1, 0)), second))

    require_equal(case(build, wholes(130, 65, dtype=BF16, most=1), *_weights(65, 130, 130)), cores=("v2",))


def _normed(builder: GraphBuilder, x: Value, scale: Value, *weights: Value) -> dict[str, Value]:
    normal = builder.add(Cast(BF16), builder.add(RmsNorm(1, 1e-5), builder.add(Cast(F32), x)))
    return _each(builder, builder.add(Binary("multiply"), scale, normal), *weights)


@pytest.mark.parametrize(("rows", "width"), [(1, 300), (3, 2200), (300, 200), (200, 1030)])
def test_a_norm_that_only_products_read_never_lies_in_hbm(rows: int, width: int) -> None:
    given = floats(rows, width, dtype=BF16), floats(width, dtype=BF16, seed=9), *_weights(width, 130, 70)
    made = case(_normed, *given)
    require_equal(made, units=2, noise=0.01)
    program = lower(made.graph, "v2")
    assert not _scratch(program)
    assert _read(program)["input0"] == rows * width * BF16.itemsize
    assert totals(program).written[HBM] == rows * (130 + 70) * BF16.itemsize


def test_a_norm_that_others_read_as_well_is_stored_on_the_way_to_its_products() -> None:
    def build(builder: GraphBuilder, x: Value, scale: Value, shift: Value, weight: Value) -> Value:
        normal = builder.add(LayerNorm(1, 1e-5), x, scale, shift)
        flat = builder.add(Reshape((2, 100, 300)), normal)
        product = builder.add(Linear(F32), flat, weight)
        return builder.add(Binary("add"), builder.add(Reshape((200, 300)), product), normal)

    given = [floats(200, 300), floats(300, seed=1), floats(300, seed=2)]
    made = case(build, *given, floats(300, 300, seed=3, role=Role.PARAMETER))
    require_equal(made, units=4, noise=1e-4)
    assert _read(lower(made.graph, "v2"))["input0"] == 200 * 300 * F32.itemsize


def test_what_follows_a_product_of_some_rows_may_need_all_of_them() -> None:
    def build(builder: GraphBuilder, x: Value, weight: Value) -> Value:
        normal = builder.add(RmsNorm(1, 1e-5), x)
        product = builder.add(Reshape((200, 200, 8)), builder.add(Linear(F32), normal, weight))
        return builder.add(Binary("add"), product, normal)

    made = case(build, floats(200, 8), floats(200 * 8, 8, seed=1, role=Role.PARAMETER))
    require_equal(made, units=4, noise=1e-4, cores=("v2",))


def test_rows_that_are_too_wide_for_products_beside_them_are_stored_first() -> None:
    width = 30000
    given = floats(2, width, dtype=BF16), floats(width, dtype=BF16, seed=9), *_weights(width, 20)
    require_equal(case(_normed, *given), units=2, noise=0.1, cores=("v2",), orders=("hostile",))


def _linear(rows: int, inner: int, columns: int) -> Program:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((rows, inner), BF16))
    weight = builder.parameter("w", TensorType((columns, inner), BF16))
    builder.output("y", builder.add(Linear(BF16), x, weight))
    return lower(builder.build(), "v2")


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(2048, 512, 2048), (2048, 1792, 4096), (2048, 4096, 768), (1, 4096, 14336)]
)
def test_weights_and_rows_are_read_once_where_there_is_room(rows: int, inner: int, columns: int) -> None:
    read = _read(_linear(rows, inner, columns))
    assert read["x"] == rows * inner * BF16.itemsize
    assert read["w"] == inner * columns * BF16.itemsize


@pytest.mark.parametrize(("rows", "inner", "columns"), [(8192, 8192, 8192), (4096, 14336, 4096), (128, 28672, 8192)])
def test_no_product_takes_more_room_than_there_is(rows: int, inner: int, columns: int) -> None:
    check(_linear(rows, inner, columns))
