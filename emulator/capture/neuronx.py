"""Module for AWS's compiler: the PyTorch model with its weights, called by position."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_neuronx

from nxpipe.emulator.capture.reference import Reference
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.numerics import Array


class _ByPosition(torch.nn.Module):
    """A traced program has a tuple of inputs and a tuple of outputs, and no names."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._outputs = outputs

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        answer = self.model(**dict(zip(self._inputs, tensors, strict=True)))
        return tuple(answer[name] for name in self._outputs)


def trace_for_neuron(
    request: CaptureRequest,
    parameters: Mapping[str, Array],
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    workdir: Path,
    arguments: str,
) -> None:
    """Leave a NEFF in `workdir`, with the weights in it. The CPU traces; no Neuron device is asked for."""
    reference = Reference(request, parameters, request.dtype)
    module = _ByPosition(reference.model, tuple(inputs), outputs).eval()
    example = tuple(reference.tensors(inputs).values())
    workdir.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        torch_neuronx.trace(module, example, compiler_workdir=str(workdir), compiler_args=arguments, cpu_backend=True)
