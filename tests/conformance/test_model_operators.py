"""The operators that models are made of: traces of well-known models, and of every type in transformers."""

from pathlib import Path

import torch

from nxpipe.emulator.capture.aten import is_known

NAMES = (Path(__file__).parent / "model_operators.txt").read_text().split()

# `.item()` hands a tensor's value to Python, which is a finding wherever it stands.
_FINDINGS = {"aten._local_scalar_dense.default"}


def _is_taken(name: str) -> bool:
    """As it is; or the exporter writes it without side effects, or by simpler operators, before it gets here."""
    _, packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    return is_known(operator) or operator._schema.is_mutable or operator._can_decompose()


def test_every_operator_that_models_use_is_taken() -> None:
    assert len(NAMES) > 150
    assert [name for name in NAMES if not _is_taken(name) and name not in _FINDINGS] == []
