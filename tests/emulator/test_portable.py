"""Constants have the same bits on every processor: not those of the kernel that numpy or PyTorch chose for this one."""

import numpy as np
import pytest
import torch

from nxpipe.emulator.capture.constants import Portable
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops.elementwise import _SMOOTH, Binary, Unary
from nxpipe.emulator.ops.linalg import MatMul, Reduce, Softmax
from nxpipe.emulator.ops.portable import WIDE, compute

CHANCE = np.random.default_rng(0)
NUMBERS = np.abs(CHANCE.standard_normal((300, 70))).astype(np.float32)
UFUNCS = {name: function for name, function in _SMOOTH.items() if isinstance(function, np.ufunc) and name != "sqrt"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(UFUNCS))
@pytest.mark.parametrize("times", [1, 40])  # 40: more than is computed in one piece
def test_a_function_of_constants_is_the_exact_one_rounded_once(name: str, times: int) -> None:
    numbers = np.tile(NUMBERS, (times, 1))
    with np.errstate(invalid="ignore"):
        found = compute(Unary(name), numbers)
        exact = UFUNCS[name](numbers.astype(WIDE)).astype(np.float32)
    assert type(found) is np.ndarray
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, exact)


def test_so_are_powers_products_of_matrices_and_sums() -> None:
    wide = NUMBERS.astype(WIDE)
    found = compute(Binary("power"), NUMBERS, NUMBERS)
    np.testing.assert_array_equal(found, np.power(wide, wide).astype(np.float32))
    found = compute(MatMul(DType.FLOAT32), NUMBERS, NUMBERS.T)
    np.testing.assert_array_equal(found, (wide @ wide.T).astype(np.float32))
    found = compute(Reduce("sum", (0,), False), NUMBERS)
    np.testing.assert_array_equal(found, wide.sum(axis=0).astype(np.float32))


def test_every_function_of_an_operator_goes_through_it() -> None:
    """Softmax: the exponentials and their sum are exact; the quotient is one of two floats."""
    found = compute(Softmax(1, False), NUMBERS)
    powers = np.exp((NUMBERS - NUMBERS.max(axis=1, keepdims=True)).astype(WIDE)).astype(np.float32)
    total = powers.astype(WIDE).sum(axis=1, keepdims=True).astype(np.float32)
    np.testing.assert_array_equal(found, powers / total)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tanh", "rsqrt", "sigmoid", "log2"])
def test_pytorch_fills_a_table_with_the_same_bits(name: str) -> None:
    numbers = torch.from_numpy(NUMBERS)
    with Portable():
        found, in_place = getattr(torch, name)(numbers), getattr(numbers.clone(), f"{name}_")()
    wide = NUMBERS.astype(WIDE)
    exact = {"rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}.get(name)
    expected = (exact or getattr(np, name))(wide).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(in_place.numpy(), expected)


def test_rotary_frequencies_are_rounded_once_a_step() -> None:
    with Portable():
        found = 1.0 / (10000.0 ** (torch.arange(0, 256, 2, dtype=torch.int64).to(torch.float32) / 256))
    powers = np.power(WIDE(10000), (np.arange(0, 256, 2).astype(np.float32) / np.float32(256)).astype(WIDE))
    np.testing.assert_array_equal(found.numpy(), np.float32(1) / powers.astype(np.float32))


def test_what_has_no_numbers_is_left_alone() -> None:
    with Portable():
        assert torch.empty(3, device="meta").exp().is_meta
        assert torch.arange(5).dtype is torch.int64
        assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
        assert torch.ones(2, 3).mean().item() == 1
        assert torch.ones(2, 3).sum(1, keepdim=True).shape == (2, 1)
