"""Elementwise operators give the bits that `fast` gives, but for those that no engine has: the table says how far those
may be off, in units of the last place of float32, and absolutely where a result near zero is a difference of large
numbers. In narrower types it is one unit at most."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.operands import Far, Memory, Tile
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.lower import elementwise, epilogue, lower
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.numerics import round_to
from nxpipe.emulator.ops import Binary, Cast, Concat, Linear, Reshape, Slice, Transpose, Unary, Where
from nxpipe.emulator.ops.elementwise import _ARITHMETIC, _BITWISE, _COMPARISONS, _KEEPING, _PREDICATES, _SMOOTH
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute
from tests.lower.harness import Case, Given, case, floats, of, require_equal
from tests.lower.sweep import BYTES, FLOATS, INTEGERS, Draw, Row, sweep
from tests.tiers import examples

ANY = (*FLOATS, *BYTES, *INTEGERS, DType.BOOL)

# What is composed of several instructions: units of the last place, and an absolute bound. Those of cosh, expm1, log1p,
# log2 and sinh are the maxima over all float32 numbers with a result of normal size: numpy's exp and log are off by up
# to 2.5 and 3.8 units, and its cosh, log2, ... by others.
COMPOSED = {
    "acos": (4, 0),
    "asin": (4, 0),
    "atan": (3, 0),
    "cos": (2, 2e-7),
    "cosh": (6, 0),
    "expm1": (5, 0),
    "log1p": (5, 0),
    "log2": (5, 0),
    "sin": (2, 2e-7),
    "sinh": (8, 0),
    "tan": (6, 2e-6),
}
_IN_RANGE = {"acos": 1.0, "asin": 1.0, "tan": 1.4}  # beyond, results are NaN, or their digits those of the argument


def _smooth(function: str, dtype: DType) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        shape = draw.shape()
        most = _IN_RANGE.get(function, draw.one_of((1.0, 30.0, 3000.0, 100000.0)))
        numbers = (draw.random.random(shape) * 2 - 1).astype(np.float32) * np.float32(most)
        x = draw.tensor(shape, dtype, numbers=round_to(numbers, dtype))
        return draw.builder.add(Unary(function), x)

    return draw


def _unary(function: str) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        types: tuple[DType, ...] = ANY if function in _PREDICATES else (*FLOATS, *INTEGERS)
        types = (*INTEGERS, DType.BOOL) if function == "invert" else types
        return draw.builder.add(Unary(function), draw.tensor(draw.shape(), draw.one_of(types), most=100))

    return draw


def _binary(function: str) -> Callable[[Draw], Value]:
    def draw(draw: Draw) -> Value:
        one = draw.one_of((*INTEGERS, DType.BOOL) if function in _BITWISE else ANY)
        other = draw.one_of((one, DType.INT64, one))
        closed = function in ("add", "multiply", "maximum", "minimum", *_BITWISE, *_COMPARISONS)
        if {one, other} & {DType.BOOL} and not closed:
            one = other = DType.INT32
        shape = draw.shape()
        thin = tuple(1 if draw.integer(0, 2) == 0 else size for size in shape)[draw.integer(0, 1) :]
        numbers = None
        if function == "power" and other.is_integer:
            numbers = draw.random.integers(0, 5, thin).astype(other.held)
        if function == "power" and one.is_float:
            other = one
            numbers = draw.random.integers(0, 4, thin).astype(np.float32)
        left = draw.tensor(shape, one, most=20)
        if draw.integer(0, 3) == 0:
            number = numbers if numbers is not None else draw.numbers(thin, other, 20)
            return draw.builder.add(Binary(function), left, draw.builder.constant(np.asarray(number.flat[0]), other))
        return draw.builder.add(Binary(function), left, draw.tensor(thin, other, 20, numbers))

    return draw


def _where(draw: Draw) -> Value:
    shape, one = draw.shape(), draw.one_of(ANY)
    other = draw.one_of((one, one, DType.FLOAT32, DType.INT64))
    left = draw.tensor(shape, one) if draw.integer(0, 2) else draw.builder.scalar(1, one)
    right = draw.tensor(shape[-1:], other) if draw.integer(0, 2) else draw.builder.scalar(1, other)
    return draw.builder.add(Where(), draw.tensor((*shape[:-1], 1), DType.BOOL), left, right)


def _cast(draw: Draw) -> Value:
    more = (DType.INT16, DType.UINT16, DType.UINT32, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
    source, target = draw.one_of(ANY), draw.one_of((*ANY, *more))
    return draw.builder.add(Cast(target), draw.tensor(draw.shape(), source, most=120))


# There is no divide, but a reciprocal and a multiplication; and numpy's powers depend on how its operands lie.
_UNITS = {"divide": 2.0, "power": 1.0}
TABLE = (
    *(Row(name, Unary, _smooth(name, DType.FLOAT32), *COMPOSED.get(name, (0, 0))) for name in _SMOOTH),
    *(Row(f"{name} in bfloat16", Unary, _smooth(name, DType.BFLOAT16), 1, 3e-7) for name in COMPOSED),
    *(Row(name, Unary, _unary(name)) for name in (*_KEEPING, *_PREDICATES)),
    *(Row(name, Binary, _binary(name), _UNITS.get(name, 0)) for name in (*_ARITHMETIC, *_COMPARISONS, *_BITWISE)),
    Row("divide", Binary, _binary("divide"), _UNITS["divide"]),
    Row("where", Where, _where),
    Row("cast", Cast, _cast),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_element_is_what_fast_makes_of_it(row: Row) -> None:
    sweep(row, 5)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_element_is_what_fast_makes_of_it_in_many_forms(row: Row) -> None:
    sweep(row, 200)


ROLES = (Role.INPUT, Role.CONSTANT)
EXTREMES = np.array(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.3, 2.0**23 - 0.5, 2.0**24 + 2, -(2.0**31), 3e38, 1e-40],
    np.float32,
)


@pytest.mark.parametrize("function", [*_KEEPING, *_PREDICATES, "exp", "log", "rsqrt", "reciprocal", "log1p", "expm1"])
def test_functions_hold_at_the_ends_of_float32(function: str) -> None:
    if function != "invert":
        units, noise = COMPOSED.get(function, (0, 0))
        require_equal(of(Unary(function), Given(EXTREMES, DType.FLOAT32)), units=units, noise=noise, cores=("v2",))


@pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.INT16, DType.INT32])
def test_floats_become_integers_by_losing_their_fraction_and_saturate(dtype: DType) -> None:
    require_equal(of(Cast(dtype), Given(EXTREMES, DType.FLOAT32)), cores=("v2",))


@pytest.mark.parametrize("function", ["add", "multiply", "floor_divide", "remainder", "truncating_divide", "less"])
def test_integers_of_32_bits_are_exact(function: str) -> None:
    numbers = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 40, 30)).astype(np.int32)
    numbers[1, ::2] //= 2**20
    numbers[1][numbers[1] == 0] = 7
    require_equal(of(Binary(function), *(Given(number, DType.INT32) for number in numbers)), cores=("v2",))


@pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.UINT16, DType.UINT32])
def test_a_scalar_that_a_type_does_not_hold_wraps(dtype: DType) -> None:
    """Whether it is known while the program is written or not."""
    x = Given(np.array([0, 5, 12, 100, np.iinfo(dtype.stored).max], dtype.stored), dtype)
    scalars = [Given(np.asarray(number), DType.INT64, role) for number in (-19, 300, 70000) for role in ROLES]

    def build(builder: GraphBuilder, x: Value, *scalars: Value) -> dict[str, Value]:
        functions = ("maximum", "floor_divide", "remainder", "less", "and")
        numbered = list(enumerate(scalars))
        return {f"{name}{at}": builder.add(Binary(name), x, scalar) for name in functions for at, scalar in numbered}

    require_equal(case(build, x, *scalars), cores=("v2",))


def test_whole_numbers_raised_to_less_than_zero_are_zero_but_for_units() -> None:
    bases, exponents = np.array([[-3], [-1], [0], [1], [2]]), np.array([-(2**31), -3, -2, -1, 0, 1, 2, 5])
    require_equal(of(Binary("power"), Given(bases, DType.INT32), Given(exponents, DType.INT32)), cores=("v2",))


def test_the_limits_of_64_bit_integers_stay_limits() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((5,), DType.INT64))
    limit = builder.constant(np.asarray(np.iinfo(np.int64).max), DType.INT64)
    builder.output("y", builder.add(Binary("less"), x, limit))
    require_equal(Case(builder.build(), {}, {"x": np.arange(5)}))


def test_a_chain_passes_hbm_only_where_somebody_else_reads() -> None:
    """What a product makes is worked on where it is, whichever way the chain forks and joins."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3, 50, 64), DType.FLOAT32))
    weight = builder.parameter("weight", TensorType((40, 64), DType.FLOAT32))
    scale = builder.input("scale", TensorType((3, 50, 1), DType.FLOAT32))
    product = builder.add(Linear(DType.FLOAT32), x, weight)
    gated = builder.add(Binary("multiply"), product, builder.add(Unary("sigmoid"), product))
    scaled = builder.add(Binary("multiply"), gated, scale)
    flat = builder.add(Reshape((150, 40)), builder.add(Binary("add"), scaled, builder.scalar(1.5)))
    builder.output("gated", gated)
    builder.output("flat", builder.add(Unary("tanh"), flat))
    given = floats(3, 50, 64), floats(40, 64), floats(3, 50, 1)
    case = Case(builder.build(), {"weight": given[1].data}, {"x": given[0].data, "scale": given[2].data})
    require_equal(case, noise=1e-4)
    program = lower(case.graph, "v2")
    assert not any(buffer.role is Role.SCRATCH for buffer in program.buffers)


def test_elementwise_nodes_alone_are_a_chain_too() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((200, 300), DType.BFLOAT16))
    y = builder.input("y", TensorType((200, 1), DType.BFLOAT16))
    made = builder.add(Unary("exp"), builder.add(Binary("subtract"), x, y))
    builder.output("z", builder.add(Binary("multiply"), made, builder.add(Unary("relu"), made)))
    arrays = {name: floats(*shape, dtype=DType.BFLOAT16).data for name, shape in (("x", (200, 300)), ("y", (200, 1)))}
    case = Case(builder.build(), {}, {name: round_to(array, DType.BFLOAT16) for name, array in arrays.items()})
    require_equal(case)
    program = lower(case.graph, "v2")
    assert {buffer.role for buffer in program.buffers} == {Role.INPUT, Role.OUTPUT}
    loaded = [
        instruction.dst.elements for instruction in instructions(program.body) if isinstance(instruction, DmaCopy)
    ]
    assert 1 in loaded  # a column is not stretched before it is loaded


def test_every_function_finds_room_at_full_width() -> None:
    for function in (*_SMOOTH, *_KEEPING, *_PREDICATES):
        if function != "invert":
            builder = GraphBuilder()
            x = builder.input("x", TensorType((128, 4096), DType.FLOAT32))
            builder.output("y", builder.add(Unary(function), x))
            lower(builder.build(), "v2")
    for function in (*_ARITHMETIC, *_COMPARISONS, "divide"):
        for dtype in (DType.FLOAT32, DType.INT32):
            builder = GraphBuilder()
            x, y = (builder.input(name, TensorType((128, 4096), dtype)) for name in "xy")
            builder.output("z", builder.add(Binary(function), x, y))
            lower(builder.build(), "v2")


@pytest.mark.parametrize(
    "function", [*_ARITHMETIC, "divide", *_COMPARISONS, *_BITWISE, *_KEEPING, *_PREDICATES, *_SMOOTH]
)
def test_a_node_needs_no_more_sbuf_than_its_tiling_leaves_for_temporaries(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a tile as wide as the tiling allows would not fit."""
    needed: list[float] = []

    def measured(k: Kernel, node: Node, dst: Tile, operands: Sequence[Tile | float]) -> None:
        before, limit = k.free_bytes(Memory.SBUF), [k.free_bytes(Memory.SBUF)]

        def tile(*args: Any, **options: Any) -> Any:
            block = allocate(*args, **options)
            limit.append(k.free_bytes(Memory.SBUF))
            return block

        allocate = k.tile
        monkeypatch.setattr(k, "tile", tile)
        elementwise.apply(k, node, dst, operands)
        monkeypatch.setattr(k, "tile", allocate)
        needed.append((before - min(limit)) / DType.FLOAT32.itemsize / dst.elements - elementwise.temporaries(node))

    monkeypatch.setattr(epilogue, "apply", measured)
    is_unary = function in (*_KEEPING, *_PREDICATES, *_SMOOTH)
    for dtype in _types(function):
        operand = Given(np.ones((128, 2048), np.float32 if dtype.is_float else dtype.held), dtype)
        op, operands = (Unary(function), [operand]) if is_unary else (Binary(function), [operand] * 2)
        lower(case(lambda builder, *values, op=op: builder.add(op, *values), *operands).graph, "v2")
    assert needed
    assert max(needed) <= 0


def _types(function: str) -> tuple[DType, ...]:
    if function in _SMOOTH:
        return FLOATS
    if function in (*_BITWISE, "invert"):
        return INTEGERS
    return (*FLOATS, *INTEGERS)


ROTARY = st.tuples(
    st.integers(1, 3), st.integers(1, 5), st.sampled_from((1, 1, 7, 128, 130)), st.sampled_from((2, 6, 64, 128))
)


def _rotary(sizes: tuple[int, int, int, int], dtype: DType, signs: tuple[bool, bool]) -> Case:
    """x * c + concat(x[h:], x[:h]) * s by heads, with a sign for each half."""
    batch, heads, tokens, depth = sizes

    def build(builder: GraphBuilder, x: Value, cosine: Value, sine: Value) -> Value:
        x = builder.add(Transpose((0, 2, 1, 3)), builder.add(Reshape((batch, tokens, heads, depth)), x))
        straight, parts = builder.add(Binary("multiply"), x, cosine), []
        for (start, stop), negated in zip(((depth // 2, depth), (0, depth // 2)), signs, strict=True):
            shape = (batch, heads, tokens, stop)
            part = builder.add(Slice((0, 0, 0, start), shape, (1, 1, 1, 1)), x)
            parts.append(builder.add(Unary("negate"), part) if negated else part)
        turned = builder.add(Binary("multiply"), builder.add(Concat(3), *parts), sine)
        return builder.add(Binary("add"), straight, turned)

    shapes = ((batch, tokens, heads * depth), (batch, 1, tokens, depth), (1, 1, tokens, depth))
    return case(build, *(floats(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)))


@settings(max_examples=examples(30))
@given(ROTARY, st.sampled_from((DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)), st.tuples(st.booleans(), st.booleans()))
def test_rotary_halves_are_read_in_place(
    sizes: tuple[int, int, int, int], dtype: DType, signs: tuple[bool, bool]
) -> None:
    """No element is moved to exchange the halves, and the result is the same to the bit."""
    made = _rotary(sizes, dtype, signs)
    graph = run_passes(made.graph, PassOptions())
    assert not any(isinstance(node.op, Concat) for node in graph.nodes)
    (before,), (after,) = (execute(one, {}, made.inputs).values() for one in (made.graph, graph))
    assert np.array_equal(before, after)
    require_equal(replace(made, graph=graph), cores=("v2",))


def test_both_orders_of_the_halves_of_a_row_are_loaded_once() -> None:
    made = _rotary((1, 4, 128, 64), DType.BFLOAT16, (True, False))
    program = lower(run_passes(made.graph, PassOptions()), "v2")
    rows = next(number for number, buffer in enumerate(program.buffers) if buffer.names == ("input0",))
    reads = [step.src for step in instructions(program.body) if isinstance(step, DmaCopy) and isinstance(step.src, Far)]
    assert sum(far.elements for far in reads if far.buffer == rows) == 128 * 4 * 64
