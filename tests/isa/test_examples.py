"""The programs of docs/reference/isa.md run, and give the results in the page."""

from collections.abc import Callable
from math import erf

import numpy as np
import pytest

from nxpipe.emulator.analysis.utilization import totals
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from tests.isa.assembler import program
from tests.isa.page import EXAMPLES

BFLOAT = DType.BFLOAT16.stored


def linear_and_gelu(xt: Array, w: Array, b: Array) -> Array:
    sums = w.astype(np.float64).T @ xt + b[:, None]
    return np.asarray(0.5 * sums * (1 + np.vectorize(erf)(sums / np.sqrt(2))))


def softmax(x: Array) -> Array:
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def rows(ids: Array, table: Array) -> Array:
    return table[ids]


@pytest.mark.parametrize("order", ["hostile", "program", "random:1", "random:2"])
@pytest.mark.parametrize(("written", "meaning"), list(zip(EXAMPLES, (linear_and_gelu, softmax, rows), strict=True)))
def test_a_program_of_the_page_gives_what_the_page_says(
    written: str, meaning: Callable[..., Array], order: str
) -> None:
    one = program(written)
    machine = Machine(one, order=order)
    random = np.random.default_rng(7)
    given: dict[str, Array] = {}
    for buffer in one.buffers:
        (name,) = buffer.names
        if buffer.role is not Role.OUTPUT:
            given[name] = _some(random, buffer.dtype, buffer.shape)
            machine.write(name, given[name])
    statistics = machine.execute()
    (result,) = (buffer for buffer in one.buffers if buffer.role is Role.OUTPUT)
    found, expected = machine.read(result.names[0]), meaning(*given.values())
    np.testing.assert_allclose(found, expected, rtol=2**-7 if result.dtype is DType.BFLOAT16 else 1e-5, atol=1e-3)
    total = totals(one)
    assert (statistics.instructions, statistics.read, statistics.written) == (total.kinds, total.read, total.written)


def _some(random: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    if dtype.is_float:
        values = random.normal(0, 0.1, shape).astype(np.float32)
        return values.astype(BFLOAT).astype(np.float32) if dtype is DType.BFLOAT16 else values
    return random.integers(0, 1000, shape).astype(dtype.held)
