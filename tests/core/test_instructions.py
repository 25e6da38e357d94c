"""Each instruction agrees with a plain numpy definition, for any layout and type of its operands."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.core.engines import EXCHANGES, HANDLERS
from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.gpsimd import AffineSelect, GatherFree, IotaPattern, PartitionReduce
from nxpipe.emulator.isa.instruction import Alu, Engine
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import (
    BnAggregate,
    BnStats,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
)
from nxpipe.emulator.numerics import Array
from tests.core.hands import FLOATS, NARROW, Bench, Layout, as_stored, layouts, values, wide
from tests.tiers import examples

EXAMPLES = 25
quick = settings(max_examples=EXAMPLES)
F32, I32, U32 = DType.FLOAT32, DType.INT32, DType.UINT32

PLAIN: dict[Alu, Callable[[Array, Array], Array]] = {
    Alu.ADD: lambda a, b: a + b,
    Alu.SUBTRACT: lambda a, b: a - b,
    Alu.MULTIPLY: lambda a, b: a * b,
    Alu.MAXIMUM: np.maximum,
    Alu.MINIMUM: np.minimum,
    Alu.EQUAL: lambda a, b: a == b,
    Alu.NOT_EQUAL: lambda a, b: a != b,
    Alu.GREATER_EQUAL: lambda a, b: a >= b,
    Alu.GREATER: lambda a, b: a > b,
    Alu.LESS_EQUAL: lambda a, b: a <= b,
    Alu.LESS: lambda a, b: a < b,
    Alu.LOGICAL_AND: lambda a, b: (a != 0) & (b != 0),
    Alu.LOGICAL_OR: lambda a, b: (a != 0) | (b != 0),
    Alu.LOGICAL_XOR: lambda a, b: (a != 0) ^ (b != 0),
    Alu.ABS: lambda a, _: abs(a),
    Alu.SQUARE: lambda a, _: a * a,
    Alu.RELU: lambda a, _: np.where(a > 0, a, 0),
    Alu.RECIPROCAL: lambda a, _: np.float32(1) / a,
}
TWO = [op for op in PLAIN if op not in (Alu.ABS, Alu.SQUARE, Alu.RELU, Alu.RECIPROCAL)]
BITS: dict[Alu, Callable[[Array, Array], Array]] = {
    Alu.BITWISE_AND: lambda a, b: a & b,
    Alu.BITWISE_OR: lambda a, b: a | b,
    Alu.BITWISE_XOR: lambda a, b: a ^ b,
    Alu.LEFT_SHIFT: lambda a, b: np.where(b < 8 * a.itemsize, a << (b % (8 * a.itemsize)), 0),
    Alu.RIGHT_SHIFT: lambda a, b: np.where(b < 8 * a.itemsize, a >> (b % (8 * a.itemsize)), 0),
}

shapes = st.tuples(st.sampled_from((1, 3, 32, 128)), *[st.integers(1, 4)] * 3)
lanes = st.sampled_from((1, 5, 32))
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
cores = st.sampled_from(("v2", "v3", "v4"))
memories = st.sampled_from((Memory.SBUF, Memory.PSUM))
three = st.fixed_dictionaries(dict.fromkeys(("dst", "src", "left", "right", "predicate"), layouts(3)))
flat = st.fixed_dictionaries(dict.fromkeys(("dst", "src", "left", "right", "values", "indices"), layouts(1)))
all_types = st.sampled_from((*NARROW, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3, DType.TFLOAT32))
wide_types, narrow_types = st.sampled_from(FLOATS), st.sampled_from(NARROW)
Laid = dict[str, Layout]


def test_every_kind_of_instruction_has_a_meaning() -> None:
    assert {*HANDLERS, *EXCHANGES} == set(INSTRUCTIONS.values())


@pytest.mark.parametrize("op", TWO)
@settings(max_examples=8)
@given(seeds, shapes, narrow_types, narrow_types, narrow_types, three, cores, memories)
def test_tensor_tensor(
    op: Alu,
    random: np.random.Generator,
    shape: tuple[int, ...],
    left: DType,
    right: DType,
    out: DType,
    laid: Laid,
    core: str,
    memory: Memory,
) -> None:
    a, b = values(random, left, shape), values(random, right, shape)
    make = partial(TensorTensor, engine=Engine.VECTOR, op=op)
    found = Bench(core, {"dst": memory, "left": memory}, laid)(
        make, {"left": (a, left), "right": (b, right)}, (out, shape)
    )
    with np.errstate(all="ignore"):
        expected = as_stored(PLAIN[op](wide(a), wide(b)).astype(np.float32), out)
    np.testing.assert_array_equal(found["dst"], expected)


@pytest.mark.parametrize("op", BITS)
@settings(max_examples=8)
@given(seeds, shapes, st.sampled_from((DType.UINT8, DType.UINT16, U32)), three)
def test_bits_are_combined_as_they_are(
    op: Alu, random: np.random.Generator, shape: tuple[int, ...], dtype: DType, laid: Laid
) -> None:
    a = random.integers(0, np.iinfo(dtype.value).max, shape, dtype.stored, endpoint=True)
    b = random.integers(0, 40, shape, dtype.stored)
    make = partial(TensorTensor, engine=Engine.VECTOR, op=op)
    found = Bench(layouts=laid)(make, {"left": (a, dtype), "right": (b, dtype)}, (dtype, shape))
    np.testing.assert_array_equal(found["dst"], BITS[op](a, b))


@quick
@given(seeds, shapes, st.sampled_from((I32, U32)), st.sampled_from((Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY)))
def test_gpsimd_calculates_with_32_bits_exactly(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, op: Alu
) -> None:
    limits = np.iinfo(dtype.value)
    a, b = (random.integers(limits.min, limits.max, shape, dtype.stored, endpoint=True) for _ in range(2))
    make = partial(TensorTensor, engine=Engine.GPSIMD, op=op)
    found = Bench()(make, {"left": (a, dtype), "right": (b, dtype)}, (dtype, shape))
    np.testing.assert_array_equal(found["dst"], PLAIN[op](a, b))


def test_the_vector_engine_calculates_with_32_bits_in_float32() -> None:
    a = np.array([[2**24 + 1]], np.int32)
    make = partial(TensorTensor, engine=Engine.VECTOR, op=Alu.ADD)
    found = Bench()(make, {"left": (a, I32), "right": (np.zeros_like(a), I32)}, (I32, (1, 1)))
    assert found["dst"] == 2**24


@settings(max_examples=examples(80))
@given(
    seeds,
    shapes,
    wide_types,
    narrow_types,
    st.sampled_from(sorted(PLAIN)),
    st.sampled_from([None, *TWO]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    three,
)
def test_tensor_scalar(
    random: np.random.Generator,
    shape: tuple[int, ...],
    dtype: DType,
    out: DType,
    op0: Alu,
    op1: Alu | None,
    reverse0: bool,
    reverse1: bool,
    by_column: bool,
    laid: Laid,
) -> None:
    x, column = values(random, dtype, shape), values(random, F32, (shape[0], 1))
    number = 1.5
    given_ = {"src": (x, dtype), **({"operand0": (column, F32)} if by_column else {})}
    options: dict[str, Any] = {"op0": op0, "op1": op1, "reverse0": reverse0, "reverse1": reverse1, "operand1": -0.5}
    if not by_column:
        options["operand0"] = number
    make = partial(TensorScalar, engine=Engine.VECTOR, **options)
    found = Bench(layouts=laid)(make, given_, (out, shape))
    with np.errstate(all="ignore"):
        operand: Array = np.broadcast_to(column.reshape(-1, 1, 1, 1) if by_column else np.float32(number), shape)
        expected = _ordered(op0, wide(x), operand, reverse0)
        if op1 is not None:
            expected = _ordered(op1, expected, np.full(shape, -0.5, np.float32), reverse1)
        np.testing.assert_array_equal(found["dst"], as_stored(expected, out))


def _ordered(op: Alu, values_: Array, operand: Array, reverse: bool) -> Array:
    reverse = reverse and op in TWO
    return np.asarray(PLAIN[op](operand, values_) if reverse else PLAIN[op](values_, operand)).astype(np.float32)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_operator_of_one_operand_ignores_the_other_on_either_side(reverse: bool) -> None:
    x = np.array([[-2.0, 0.5, 4.0]], np.float32)
    for op, expected in ((Alu.ABS, abs(x)), (Alu.SQUARE, x * x), (Alu.RELU, [[0, 0.5, 4]]), (Alu.RECIPROCAL, 1 / x)):
        make = partial(TensorScalar, engine=Engine.VECTOR, op0=op, operand0=9.0, reverse0=reverse)
        np.testing.assert_array_equal(Bench()(make, {"src": (x, F32)}, (F32, (1, 3)))["dst"], expected)
    root = partial(TensorScalar, engine=Engine.GPSIMD, op0=Alu.RSQRT, operand0=9.0, reverse0=reverse)
    found = Bench()(root, {"src": (abs(x), F32)}, (F32, (1, 3)))["dst"]
    np.testing.assert_allclose(found, abs(x) ** -0.5, rtol=1e-6)


def test_bits_are_masked_by_a_number() -> None:
    x = np.arange(256, dtype=np.uint8).reshape(1, 256)
    make = partial(TensorScalar, engine=Engine.VECTOR, op0=Alu.BITWISE_AND, operand0=15.0, op1=Alu.INVERT)
    found = Bench()(make, {"src": (x, DType.UINT8)}, (DType.UINT8, (1, 256)))
    np.testing.assert_array_equal(found["dst"], ~(x & 15))


@quick
@given(seeds, shapes, wide_types, wide_types, st.sampled_from(TWO), st.sampled_from(TWO), three)
def test_scalar_tensor_tensor(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, out: DType, op0: Alu, op1: Alu, laid: Laid
) -> None:
    x, y = values(random, dtype, shape), values(random, F32, shape)
    make = partial(ScalarTensorTensor, engine=Engine.VECTOR, op0=op0, operand0=0.75, op1=op1, reverse1=True)
    found = Bench(layouts=laid)(make, {"src": (x, dtype), "right": (y, F32)}, (out, shape))
    with np.errstate(all="ignore"):
        first = _ordered(op0, wide(x), np.full(shape, 0.75, np.float32), reverse=False)
        expected = as_stored(_ordered(op1, first, y, reverse=True), out)
    np.testing.assert_array_equal(found["dst"], expected)


@quick
@given(seeds, shapes, narrow_types, st.integers(1, 3), st.booleans(), three)
def test_tensor_reduce(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, axes: int, negate: bool, laid: Laid
) -> None:
    x, kept = values(random, dtype, shape), shape[: 4 - axes]
    x = (x / 64).astype(dtype.stored)  # so that no product overflows
    for op, plain in ((Alu.MAXIMUM, np.max), (Alu.MINIMUM, np.min), (Alu.ADD, np.sum), (Alu.MULTIPLY, np.prod)):
        make = partial(TensorReduce, engine=Engine.VECTOR, op=op, axes=axes, negate=negate)
        own = {**laid, "dst": Layout((0,), (1,), (True,))}
        found = Bench(layouts=own)(make, {"src": (x, dtype)}, (F32, (shape[0], prod(kept[1:]))))
        expected = plain(x.astype(np.float64).reshape(*kept, -1), axis=-1) * (-1 if negate else 1)
        np.testing.assert_allclose(found["dst"], expected.reshape(shape[0], -1), rtol=1e-4, atol=1e-4)


@quick
@given(seeds, shapes, all_types, all_types, three, st.sampled_from((Engine.VECTOR, Engine.GPSIMD)))
def test_tensor_copy_converts(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, out: DType, laid: Laid, engine: Engine
) -> None:
    x = values(random, dtype, shape)
    found = Bench(layouts=laid)(partial(TensorCopy, engine=engine), {"src": (x, dtype)}, (out, shape))
    np.testing.assert_array_equal(found["dst"], as_stored(wide(x), out))


@quick
@given(seeds, shapes, narrow_types, st.booleans(), three)
def test_tensor_copy_predicated(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, reverse: bool, laid: Laid
) -> None:
    x, before = values(random, dtype, shape), values(random, dtype, shape)
    chosen = random.integers(0, 2, shape, np.uint8)
    make = partial(CopyPredicated, engine=Engine.VECTOR, reverse=reverse)
    operands = {"src": (x, dtype), "predicate": (chosen, DType.UINT8)}
    found = Bench(layouts=laid)(make, operands, (dtype, shape), start=before)
    np.testing.assert_array_equal(found["dst"], wide(np.where((chosen != 0) != reverse, x, before)))


@quick
@given(seeds, lanes, st.integers(1, 20), st.sampled_from(TWO[:5]), st.sampled_from(TWO[:5]), flat)
def test_tensor_tensor_scan(random: np.random.Generator, count: int, size: int, op0: Alu, op1: Alu, laid: Laid) -> None:
    a, b = (random.normal(0, 1, (count, size)).astype(np.float32) for _ in range(2))
    make = partial(TensorTensorScan, engine=Engine.VECTOR, op0=op0, op1=op1, initial=0.5)
    found = Bench(layouts=laid)(make, {"left": (a, F32), "right": (b, F32)}, (F32, (count, size)))
    state = np.full(count, 0.5, np.float32)
    for at in range(size):
        state = PLAIN[op1](PLAIN[op0](a[:, at], state), b[:, at])
        np.testing.assert_array_equal(found["dst"][:, at], state)


@quick
@given(shapes, narrow_types, st.integers(0, 100), layouts(3), memories)
def test_memset(shape: tuple[int, ...], dtype: DType, value: int, layout: Layout, memory: Memory) -> None:
    make = partial(Memset, engine=Engine.VECTOR, value=float(value))
    found = Bench(memories={"dst": memory}, layouts={"dst": layout})(make, {}, (dtype, shape))
    np.testing.assert_array_equal(found["dst"], np.full(shape, value))


@quick
@given(seeds, shapes, wide_types, three)
def test_reciprocal(random: np.random.Generator, shape: tuple[int, ...], dtype: DType, laid: Laid) -> None:
    x = values(random, dtype, shape)
    found = Bench(layouts=laid)(partial(Reciprocal, engine=Engine.VECTOR), {"src": (x, dtype)}, (F32, shape))
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(found["dst"], np.float32(1) / wide(x))


@quick
@given(seeds, lanes, st.integers(1, 4), st.integers(1, 30))
def test_statistics_of_pieces_are_those_of_the_whole(
    random: np.random.Generator, count: int, pieces: int, width: int
) -> None:
    x = random.normal(3, 2, (count, pieces, width)).astype(np.float32)
    stats = [
        Bench()(partial(BnStats, engine=Engine.VECTOR), {"src": (x[:, at], F32)}, (F32, (count, 6)))["dst"]
        for at in range(pieces)
    ]
    joined = np.concatenate(stats, axis=1)
    make = partial(BnAggregate, engine=Engine.VECTOR)
    found = Bench()(make, {"src": (joined, F32)}, (F32, (count, 2)))["dst"]
    whole = x.reshape(count, -1).astype(np.float64)
    np.testing.assert_allclose(found, np.stack([whole.mean(axis=1), whole.var(axis=1)], axis=1), rtol=1e-4, atol=1e-5)
    even = x[:, 0, 0::2]
    np.testing.assert_allclose(stats[0][:, 0], even.shape[1])
    np.testing.assert_allclose(stats[0][:, 2], even.var(axis=1) * even.shape[1], rtol=1e-4, atol=1e-4)


@quick
@given(seeds, lanes, st.integers(8, 40), flat)
def test_the_eight_largest_are_found_and_replaced(
    random: np.random.Generator, count: int, size: int, laid: Laid
) -> None:
    x = random.integers(-5, 6, (count, size)).astype(np.float32)  # many of them equal
    operands = {"src": (x, F32)}
    largest = Bench(layouts=laid)(partial(Max8, engine=Engine.VECTOR), operands, (F32, (count, 8)))["dst"]
    np.testing.assert_array_equal(largest, -np.sort(-x, axis=1)[:, :8])
    operands |= {"values": (largest, F32)}
    find = partial(FindIndex8, engine=Engine.VECTOR)
    places = Bench(layouts=laid)(find, operands, (U32, (count, 8)))["dst"]
    np.testing.assert_array_equal(places, np.argsort(-x, axis=1, kind="stable")[:, :8])
    replace = partial(MatchReplace8, engine=Engine.VECTOR, number=-9.0)
    left = Bench(layouts=laid)(replace, operands, (F32, (count, size)))["dst"]
    expected = x.copy()
    np.put_along_axis(expected, places.astype(np.int64), -9, axis=1)
    np.testing.assert_array_equal(left, expected)


def test_a_value_that_is_absent_has_a_place_with_all_bits_set() -> None:
    x, absent = np.arange(8, dtype=np.float32).reshape(1, 8), np.full((1, 8), 9, np.float32)
    make = partial(FindIndex8, engine=Engine.VECTOR)
    found = Bench()(make, {"src": (x, F32), "values": (absent, F32)}, (DType.UINT16, (1, 8)))
    np.testing.assert_array_equal(found["dst"], np.full((1, 8), 0xFFFF))


@quick
@given(
    shapes,
    st.sampled_from((F32, I32, DType.INT16, DType.UINT8)),
    st.integers(-50, 50),
    st.integers(-9, 9),
    st.tuples(*[st.integers(-9, 9)] * 3),
    layouts(3),
)
def test_iota(
    shape: tuple[int, ...], dtype: DType, start: int, by_partition: int, steps: tuple[int, ...], layout: Layout
) -> None:
    make = partial(IotaPattern, engine=Engine.GPSIMD, start=Affine(start), by_partition=by_partition, steps=steps)
    found = Bench(layouts={"dst": layout})(make, {}, (dtype, shape))
    np.testing.assert_array_equal(found["dst"], as_stored(wide(_counted(shape, start, (by_partition, *steps))), dtype))


def _counted(shape: tuple[int, ...], start: int, steps: tuple[int, ...]) -> Array:
    places = np.indices(shape)
    return np.asarray(start + sum(step * place for step, place in zip(steps, places, strict=True)))


@quick
@given(seeds, shapes, narrow_types, st.integers(-5, 5), st.sampled_from(TWO[5:11]), three)
def test_affine_select(
    random: np.random.Generator, shape: tuple[int, ...], dtype: DType, start: int, compare: Alu, laid: Laid
) -> None:
    x, steps = values(random, dtype, shape), (1, -2, 3, -1)
    make = partial(
        AffineSelect,
        engine=Engine.GPSIMD,
        start=Affine(start),
        by_partition=steps[0],
        steps=steps[1:],
        compare=compare,
        otherwise=7.0,
    )
    found = Bench(layouts=laid)(make, {"src": (x, dtype)}, (dtype, shape))
    chosen = PLAIN[compare](_counted(shape, start, steps), np.zeros(shape))
    np.testing.assert_array_equal(found["dst"], np.where(chosen, wide(x), 7))


@quick
@given(seeds, lanes, st.integers(1, 20), narrow_types, flat)
def test_gather_in_partitions(random: np.random.Generator, count: int, size: int, dtype: DType, laid: Laid) -> None:
    x, indices = values(random, dtype, (count, size)), random.integers(0, size, (count, 13), np.uint32)
    make = partial(GatherFree, engine=Engine.GPSIMD)
    found = Bench(layouts=laid)(make, {"src": (x, dtype), "indices": (indices, U32)}, (dtype, (count, 13)))
    np.testing.assert_array_equal(found["dst"], wide(np.take_along_axis(x, indices.astype(np.int64), 1)))


@quick
@given(seeds, lanes, st.integers(1, 20), flat)
def test_reduction_over_partitions(random: np.random.Generator, count: int, size: int, laid: Laid) -> None:
    x = random.normal(0, 1, (count, size)).astype(np.float32)
    for op, plain in ((Alu.ADD, np.sum), (Alu.MAXIMUM, np.max)):
        make = partial(PartitionReduce, engine=Engine.GPSIMD, op=op)
        found = Bench(layouts=laid)(make, {"src": (x, F32)}, (F32, (1, size)))
        np.testing.assert_allclose(found["dst"], plain(x, axis=0, keepdims=True), rtol=1e-4, atol=1e-5)


REFERENCE: dict[Function, Callable[[Array], Array]] = {
    Function.COPY: lambda x: x,
    Function.SQUARE: np.square,
    Function.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Function.RELU: lambda x: np.maximum(x, 0),
    Function.GELU_TANH: lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    Function.GELU_SIGMOID: lambda x: x / (1 + np.exp(-1.702 * x)),
    Function.SILU: lambda x: x / (1 + np.exp(-x)),
    Function.TANH: np.tanh,
    Function.SOFTPLUS: lambda x: np.log1p(np.exp(x)),
    Function.MISH: lambda x: x * np.tanh(np.log1p(np.exp(x))),
    Function.EXP: np.exp,
    Function.SIGN: np.sign,
    Function.ABS: np.abs,
    Function.LOG: np.log,
    Function.SIN: np.sin,
    Function.ARCTAN: np.arctan,
    Function.SQRT: np.sqrt,
    Function.RSQRT: lambda x: 1 / np.sqrt(x),
    Function.RECIPROCAL: lambda x: 1 / x,
}


@pytest.mark.parametrize("function", REFERENCE)
@settings(max_examples=6)
@given(seeds, shapes, wide_types, three, memories, st.booleans())
def test_activation(
    function: Function,
    random: np.random.Generator,
    shape: tuple[int, ...],
    dtype: DType,
    laid: Laid,
    memory: Memory,
    by_column: bool,
) -> None:
    x = random.uniform(0.1, 0.9, shape).astype(dtype.stored)
    bias = random.uniform(0.1, 0.5, (shape[0], 1)).astype(np.float32)
    make = partial(Activation, engine=Engine.SCALAR, function=function, scale=0.5)
    operands = {"src": (x, dtype), **({"bias": (bias, F32)} if by_column else {})}
    bench = Bench("v3", {"src": memory}, laid)
    found = bench(make, operands, (F32, shape), {"total": (F32, (shape[0], 1))})
    into = x.astype(np.float64) * 0.5 + (bias.reshape(-1, 1, 1, 1) if by_column else 0)
    expected = REFERENCE[function](into)
    np.testing.assert_allclose(found["dst"], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["total"][:, 0], expected.reshape(shape[0], -1).sum(axis=1), rtol=1e-4)


@pytest.mark.parametrize(("function", "most"), [(Function.SIN, np.pi), (Function.ARCTAN, np.pi / 2)])
def test_functions_are_invalid_where_their_tables_end(function: Function, most: float) -> None:
    x = np.array([[most * 0.99, -most * 0.99, most * 1.01, -most * 1.01]], np.float32)
    make = partial(Activation, engine=Engine.SCALAR, function=function)
    found = Bench()(make, {"src": (x, F32)}, (F32, (1, 4)))["dst"]
    np.testing.assert_array_equal(np.isnan(found[0]), [False, False, True, True])


TENSOR_TYPES = (F32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)


@quick
@given(
    seeds,
    st.sampled_from((1, 7, 128)),
    st.sampled_from((1, 5, 128)),
    st.sampled_from((1, 9, 64, 100)),
    st.sampled_from(TENSOR_TYPES),
    cores,
)
def test_matmul_sums_exact_products(
    random: np.random.Generator, k: int, m: int, n: int, dtype: DType, core: str
) -> None:
    a, b = values(random, dtype, (k, m)), values(random, dtype, (k, n))
    make = partial(Matmul, engine=Engine.TENSOR)
    found = Bench(core, {"dst": Memory.PSUM})(make, {"stationary": (a, dtype), "moving": (b, dtype)}, (F32, (m, n)))[
        "dst"
    ]
    exact = a.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


@quick
@given(
    seeds,
    st.integers(1, 32),
    st.integers(1, 32),
    st.sampled_from(FLOATS),
    st.sampled_from((Engine.TENSOR, Engine.VECTOR)),
    cores,
)
def test_transpose(random: np.random.Generator, count: int, size: int, dtype: DType, engine: Engine, core: str) -> None:
    x = values(random, dtype, (count, size))
    memory = Memory.PSUM if engine is Engine.TENSOR else Memory.SBUF
    found = Bench(core, {"dst": memory})(
        partial(NcTranspose, engine=engine), {"src": (x, dtype)}, (dtype, (size, count))
    )
    np.testing.assert_array_equal(found["dst"], wide(x.T))


@pytest.mark.parametrize(("core", "spoiled"), [("v2", True), ("v3", False), ("v4", False)])
def test_an_infinity_spoils_the_sums_of_a_transpose_before_v3(core: str, spoiled: bool) -> None:
    x = np.zeros((4, 3), np.float32)
    x[1, 2] = -np.inf
    make = partial(NcTranspose, engine=Engine.TENSOR)
    found = Bench(core, {"dst": Memory.PSUM})(make, {"src": (x, F32)}, (F32, (3, 4)))["dst"]
    np.testing.assert_array_equal(found[:2], 0)
    np.testing.assert_array_equal(found[2], [np.nan] * 4 if spoiled else x[:, 2])
