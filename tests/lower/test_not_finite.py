"""Infinities on the tensor engine: before v3 it turns a matrix by multiplying it, and infinity times 0 is no number."""

import numpy as np
import pytest

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Attention, Linear
from nxpipe.emulator.run.fast import execute
from tests.lower.harness import CORES, Given, floats, of, require_equal, run

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def _mask(kind: DType, rows: int, keys: int) -> Given:
    """The last keys are hidden from all rows, and everything from the third."""
    seen = np.tile(np.arange(keys) < keys - 5, (rows, 1))
    seen[2] = False
    return Given(seen if kind is DType.BOOL else np.where(seen, 0, -np.inf).astype(np.float32), kind)


@pytest.mark.parametrize("keys", [40, 200])
@pytest.mark.parametrize("kind", [DType.BOOL, F32, BF16])
def test_a_mask_s_infinities_hide_keys_and_spoil_nothing(kind: DType, keys: int) -> None:
    heads = [floats(2, size, 64, dtype=BF16, seed=number) for number, size in enumerate((140, keys, keys))]
    attention = of(Attention(0.125, False, BF16, F32), *heads, _mask(kind, 140, keys))
    expected = execute(attention.graph, {}, attention.inputs)["result"]
    assert np.isfinite(expected).all()
    assert not expected[:, 2].any()
    require_equal(attention, units=1, noise=2.0**-9)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_never_makes_another_one_wrong_without_a_sign(core: str, odd: float) -> None:
    """On v2 the rows that are turned together with it are no numbers either; from v3 on it is alone."""
    x = floats(300, 96)
    x.data[140, 7] = odd
    product = of(Linear(F32), x, floats(40, 96, seed=1))
    expected = execute(product.graph, {}, product.inputs)["result"]
    found = run(lower(product.graph, core), product)["result"]
    clean = np.isfinite(found).all(axis=1)
    np.testing.assert_allclose(found[clean], expected[clean], rtol=1e-4, atol=1e-4)
    assert not np.isfinite(found[140]).any()
    assert clean.sum() == 299 if core != "v2" else clean.sum() >= 300 - 128
