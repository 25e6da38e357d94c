"""PyTorch's operator database: whatever the compiler takes, it computes as PyTorch does."""

import pytest
import torch

from tests.conformance.opinfo import Verdict, judge, judged, operators

PARTS = 8


@pytest.mark.sample(2 * PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_that_compile_agree_with_pytorch(part: int) -> None:
    """In parts, since the names of the operators are in a module that each worker would import to list the cases."""
    failed = []
    for name, entry in list(operators().items())[part::PARTS]:
        verdict = Verdict()
        judge(entry, torch.float32, 1, verdict)
        failed += [f"{name}: {failure}" for failure in verdict.failed]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_of_every_type_agrees_with_pytorch() -> None:
    failed = [f"{name}: {failure}" for name, verdict in judged(None) for failure in verdict.failed]
    assert not failed, "\n".join(failed)
