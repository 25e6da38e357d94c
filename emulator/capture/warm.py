"""Preloading of PyTorch and transformers in the zygote, so that no confined process imports them again."""

import contextlib
from functools import cache

import torch
import transformers

import nxpipe.emulator.passes  # noqa: F401
from nxpipe.emulator.capture.export import capture_module


def warm(kind: str) -> None:
    """Trace a minimal model, and import the code of models of type `kind`."""
    _trace()
    if kind in transformers.CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # the capture reports the error
            _ = transformers.AutoModel._model_mapping.get(transformers.CONFIG_MAPPING[kind])


@cache
def _trace() -> None:
    capture_module(torch.nn.Linear(1, 1), {"input": torch.ones(1, 1)})
