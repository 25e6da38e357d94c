"""PyTorch's operator database: whatever the compiler takes, it computes as PyTorch does."""

import pytest
import torch

from tests.conformance.opinfo import Verdict, judge, judged, operators

OPERATORS = operators()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_compiles_agrees_with_pytorch(name: str) -> None:
    verdict = Verdict()
    judge(OPERATORS[name], torch.float32, 1, verdict)
    assert not verdict.failed, "\n".join(verdict.failed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_of_every_type_agrees_with_pytorch() -> None:
    failed = [f"{name}: {failure}" for name, verdict in judged(None) for failure in verdict.failed]
    assert not failed, "\n".join(failed)
