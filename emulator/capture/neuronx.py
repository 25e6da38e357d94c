"""Tracing for neuronx-cc: the PyTorch model with its weights and positional inputs and outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_neuronx

from nxpipe.emulator.capture.reference import Reference
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.numerics import Array


class _ByPosition(torch.nn.Module):
    """A module whose inputs and outputs are tuples, as torch_neuronx.trace needs."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._outputs = outputs

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        outputs = self.model(**dict(zip(self._inputs, tensors, strict=True)))
        return tuple(outputs[name] for name in self._outputs)


def trace_for_neuron(
    request: CaptureRequest,
    parameters: Mapping[str, Array],
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    workdir: Path,
    arguments: str,
) -> None:
    """Write a NEFF that contains the weights into `workdir`. Traces on the CPU; needs no Neuron device."""
    reference = Reference(request, parameters, request.dtype)
    module = _ByPosition(reference.model, tuple(inputs), outputs).eval()
    example = tuple(reference.tensors(inputs).values())
    workdir.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        torch_neuronx.trace(module, example, compiler_workdir=str(workdir), compiler_args=arguments, cpu_backend=True)
