"""In-place writes: the same numbers as in PyTorch, whoever else sees the memory, and no detour where nobody does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.run.fast import execute
from tests.emulator.test_breadth import Of

X = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def added_up(x: Any) -> Any:
    y = x * 2
    y += x
    y.add_(1).mul_(x)
    return y - y.div_(3)  # both are what the division left


def put(x: Any) -> Any:
    y = torch.zeros_like(x)
    y[torch.tensor([2, 0])] = x[:2]
    return y.masked_fill_(x > 9, 5.0)


def in_its_own_type(x: Any) -> Any:
    return (x * 1.01).bfloat16().add_(x / 3)


def read_before(x: Any) -> Any:
    y = x + 1
    before = y * 2
    return y.neg_() + before


def a_view_taken_afterwards(x: Any) -> Any:
    y = x + 1
    y.mul_(3)
    return y[0, :3] + y.t()[1]


def a_view_taken_before(x: Any) -> Any:
    y = x + 1
    row = y[0]
    y.mul_(3)
    return row


def a_part(x: Any) -> Any:
    y = x + 1
    y[:, 1] = 0
    y[1].add_(x[0])
    return y


def a_view_in_disguise(x: Any) -> Any:
    y = x + 1
    same = torch.nn.functional.dropout(y.reshape(3, 4).contiguous(), training=False)
    y.mul_(3)
    return same


def through_another_view(x: Any) -> Any:
    y = x + 1
    a, b = y.view(12), y.view(4, 3)
    a.sub_(5)
    return b.abs_()


def an_argument(x: Any) -> Any:
    y = x[0]
    x.add_(1)
    return x * y


def under_no_grad(x: Any) -> Any:
    y = x + 1
    with torch.no_grad():
        z = y.mul_(2)
    return y - z


SEEN_BY_NOBODY = [added_up, put, in_its_own_type, read_before, a_view_taken_afterwards]
SEEN_BY_OTHERS = [a_view_taken_before, a_part, a_view_in_disguise, through_another_view, an_argument, under_no_grad]


@pytest.mark.sample(2)
@pytest.mark.parametrize("function", SEEN_BY_NOBODY + SEEN_BY_OTHERS)
def test_what_is_written_in_place_is_seen_by_all_that_share_the_memory(function: Callable[[Any], Any]) -> None:
    graph = capture_module(Of(function), {"x": torch.from_numpy(X)})
    expected = function(torch.from_numpy(X.copy())).float().numpy()
    np.testing.assert_allclose(execute(graph, {}, {"x": X})["output"], expected, rtol=1e-6)


@pytest.mark.parametrize("function", SEEN_BY_NOBODY)
def test_a_write_that_nobody_else_sees_needs_no_second_trace(
    function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        pytest.fail("PyTorch took the program apart")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    capture_module(Of(function), {"x": torch.from_numpy(X)})
