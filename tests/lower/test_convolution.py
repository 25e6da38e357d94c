"""Windows on the core: convolutions of whole numbers, pooling and resampling agree with `fast` bit by bit."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.isa.scalar import Activation
from nxpipe.emulator.isa.tensor import Matmul, NcTranspose
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Binary, Cast, Convolution, Pool, Reduce, Resample, Unary
from tests.lower.harness import Given, case, floats, of, require_equal, wholes
from tests.lower.sweep import FLOATS, Draw, Row, sweep

BF16 = DType.BFLOAT16


def _axes(draw: Draw, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(draw.integer(low, high) for _ in range(count))


def _sizes(window: tuple[int, ...], dilation: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
    """Sizes that a window fits into."""
    return tuple((length - 1) * apart + draw.integer(1, 9) for length, apart in zip(window, dilation, strict=True))


def _convolution(draw: Draw, *, whole: bool = True) -> Value:
    rank, dtype = draw.integer(1, 3), draw.one_of((BF16, DType.FLOAT32, DType.FLOAT16, DType.FLOAT8_E4M3))
    window, dilation = _axes(draw, 1, 4, rank), _axes(draw, 1, 2, rank)
    before, after = _axes(draw, -1, 2, rank), _axes(draw, -1, 2, rank)
    places = tuple(size + 2 for size in _sizes(window, dilation, draw))
    groups = draw.integer(1, 3)
    inputs = draw.one_of([1, draw.integer(2, 5), draw.integer(100, 150)]) if rank < 3 else draw.integer(1, 4)
    outputs = draw.one_of([1, draw.integer(2, 5), draw.integer(100, 150)]) if rank < 3 else draw.integer(1, 4)
    x_shape, weight_shape = (draw.integer(1, 2), groups * inputs, *places), (groups * outputs, inputs, *window)
    x, weight = (draw.factors(shape, dtype, whole=whole) for shape in (x_shape, weight_shape))
    operands = [draw.tensor(x_shape, dtype, numbers=x)]
    stored = draw.integer(0, 1)
    operands.append(draw.parameter(weight, dtype) if stored else draw.tensor(weight_shape, dtype, numbers=weight))
    if draw.integer(0, 1):
        operands.append(draw.tensor((groups * outputs,), DType.FLOAT32, most=3))
    op = Convolution(_axes(draw, 1, 3, rank), before, after, dilation, groups, draw.one_of((BF16, DType.FLOAT32)))
    return draw.builder.add(op, *operands)


def _pool(function: str) -> Row:
    def draw(draw: Draw) -> Value:
        rank, dtype = draw.integer(1, 3), draw.one_of((*FLOATS, DType.INT64, DType.INT32, DType.INT8))
        window, dilation = _axes(draw, 1, 3, rank), _axes(draw, 1, 2, rank)
        places = _sizes(window, dilation, draw)
        x = draw.tensor((draw.integer(1, 2), draw.one_of([1, 3, 140]), *places), dtype, most=3)
        # Half a window at most, as in PyTorch: a window of nothing but margin has no number that 32 bits would hold.
        before, after = (
            tuple(draw.integer(0, (length - 1) * apart // 2) for length, apart in zip(window, dilation, strict=True))
            for _ in range(2)
        )
        op = Pool(function, window, _axes(draw, 1, 3, rank), before, after, dilation)
        return draw.builder.add(op, x)

    return Row(function, Pool, draw)


def _resample(function: str) -> Row:
    def draw(draw: Draw) -> Value:
        rank = draw.integer(1, 3)
        shape, sizes = draw.shape(rank, rank + 1), _axes(draw, 1, 12, rank)
        scales = tuple(draw.integer(1, 30) / 10 for _ in sizes)
        op = Resample(function, sizes, scales, bool(draw.integer(0, 1)))
        return draw.builder.add(op, draw.tensor(shape, draw.one_of(FLOATS)))

    return Row(f"resample_{function}", Resample, draw)


TABLE = (
    Row("convolution", Convolution, _convolution),
    Row("convolution of reals", Convolution, partial(_convolution, whole=False), 1, 5e-4),
    *(_pool(function) for function in ("max_pool", "sum_pool")),
    *(_resample(function) for function in ("nearest", "linear", "cubic")),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_windows_are_what_fast_makes_of_them(row: Row) -> None:
    sweep(row, 8)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_windows_are_what_fast_makes_of_them_in_many_forms(row: Row) -> None:
    sweep(row, 200)


@pytest.mark.parametrize(
    ("x", "weight", "stride", "margin", "groups"),
    [
        ((2, 3, 64, 64), (40, 3, 16, 16), 16, 0, 1),  # patches
        ((1, 3, 60, 60), (20, 3, 7, 7), 2, 3, 1),  # a stem
        ((1, 300, 14, 14), (260, 300, 3, 3), 1, 1, 1),
        ((2, 140, 20, 20), (140, 1, 3, 3), 1, 1, 140),  # channels by themselves
        ((1, 8, 200, 400), (4, 8, 3, 3), 1, 1, 1),
        ((1, 16, 300, 400), (4, 16, 3, 3), 2, 1, 1),  # more than SBUF holds at once
        ((1, 5, 3, 700), (4, 5, 3, 3), 1, 1, 1),  # rows wider than a bank of sums
    ],
)
def test_models_convolutions_are_exact(
    x: tuple[int, ...], weight: tuple[int, ...], stride: int, margin: int, groups: int
) -> None:
    op = Convolution((stride,) * 2, (margin,) * 2, (margin,) * 2, (1, 1), groups, BF16)
    numbers = wholes(*x, dtype=BF16, most=1), wholes(*weight, dtype=BF16, most=1, seed=1, role=Role.PARAMETER)
    require_equal(of(op, *numbers, wholes(weight[0], seed=2)), cores=("v2",), orders=("hostile",))


def _block(
    builder: GraphBuilder, x: Value, weight: Value, scale: Value, shift: Value, stride: int, margin: int
) -> Value:
    op = Convolution((stride,) * 2, (margin,) * 2, (margin,) * 2, (1, 1), 1, DType.FLOAT32)
    scaled = builder.add(Binary("multiply"), builder.add(op, x, weight), scale)
    return builder.add(Unary("relu"), builder.add(Binary("add"), scaled, shift))


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 64, 130]),
    outputs=st.sampled_from([5, 64, 128, 200, 256]),
    size=st.integers(3, 12),
    window=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
)
def test_a_residual_block_with_batch_norms_is_what_fast_makes_of_it(
    batch: int, channels: int, outputs: int, size: int, window: int, stride: int
) -> None:
    """Scales, shifts, functions and roundings on the way out of PSUM, a sum with an earlier feature map, the largest of
    windows and the mean of channels, for several images."""
    margin = window // 2

    def build(builder: GraphBuilder, x: Value, *values: Value) -> dict[str, Value]:
        first, second, scale, shift = values
        narrow = builder.add(Cast(BF16), _block(builder, x, first, scale, shift, stride, margin))
        left = _block(builder, x, first, scale, shift, stride, margin)
        total = builder.add(
            Unary("relu"), builder.add(Binary("add"), _block(builder, narrow, second, scale, shift, 1, 0), left)
        )
        pooled = builder.add(Pool("max_pool", (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), total)
        largest = builder.add(Reduce("max", (2, 3), True), total)
        return {"total": total, "pooled": pooled, "largest": builder.add(Cast(BF16), largest)}

    numbers = [
        wholes(batch, channels, size, size, dtype=BF16, most=1),
        wholes(outputs, channels, window, window, dtype=BF16, most=1, seed=1, role=Role.PARAMETER),
        wholes(outputs, outputs, 1, 1, dtype=BF16, most=1, seed=2, role=Role.PARAMETER),
        wholes(outputs, 1, 1, most=2, seed=3, role=Role.PARAMETER),
        wholes(outputs, 1, 1, most=2, seed=4, role=Role.PARAMETER),
    ]
    require_equal(case(build, *numbers), cores=("v2",), orders=("hostile",))


def test_a_batch_norm_takes_no_instruction_of_its_own() -> None:
    numbers = [
        wholes(1, 8, 6, 6, dtype=BF16),
        wholes(16, 8, 3, 3, dtype=BF16, seed=1, role=Role.PARAMETER),
        wholes(16, 1, 1, seed=2, role=Role.PARAMETER),
        wholes(16, 1, 1, seed=3, role=Role.PARAMETER),
    ]

    def build(builder: GraphBuilder, x: Value, weight: Value, scale: Value, shift: Value) -> Value:
        return _block(builder, x, weight, scale, shift, 1, 1)

    program = lower(case(build, *numbers).graph, "v2")
    kinds = {type(instruction) for instruction in instructions(program.body)}
    assert kinds <= {DmaCopy, Matmul, Activation, NcTranspose, Memset}


def test_padding_is_neither_copied_nor_multiplied() -> None:
    numbers = wholes(1, 64, 8, 8, dtype=BF16), wholes(64, 64, 3, 3, dtype=BF16, seed=1, role=Role.PARAMETER)
    program = lower(of(Convolution((1, 1), (1, 1), (1, 1), (1, 1), 1, BF16), *numbers).graph, "v2")
    columns = sum(step.moving.elements for step in instructions(program.body) if isinstance(step, Matmul))
    assert columns == 64 + 4 * 56 + 4 * 49
    assert not any(isinstance(step, Memset) for step in instructions(program.body))


def test_the_largest_of_more_places_than_sbuf_holds() -> None:
    op = Pool("max_pool", (3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
    require_equal(of(op, floats(1, 2, 300, 400)), cores=("v2",), orders=("hostile",))


def test_sums_of_integers_are_exact_beyond_what_float32_holds() -> None:
    numbers = np.random.default_rng(1).integers(-(2**26), 2**26, (1, 2, 9, 9)).astype(np.int32)
    op = Pool("sum_pool", (3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
    require_equal(of(op, Given(numbers, DType.INT32)))
