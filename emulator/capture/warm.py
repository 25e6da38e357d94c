"""Modules of PyTorch and transformers that every capture needs, imported once by the process that forks for each
model.
"""

import contextlib
from functools import cache

import torch
import transformers

import nxpipe.emulator.passes  # noqa: F401
from nxpipe.emulator.capture.export import capture_module


def warm(kind: str) -> None:
    """Trace the smallest model there is, and import the code of the kind of model that comes."""
    _trace()
    if kind in transformers.CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # what is wrong with it, the capture says
            _ = transformers.AutoModel._model_mapping.get(transformers.CONFIG_MAPPING[kind])


@cache
def _trace() -> None:
    capture_module(torch.nn.Linear(1, 1), {"input": torch.ones(1, 1)})
