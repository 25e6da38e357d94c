"""The oracle: the same model in PyTorch, eager, in float32."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emulator.capture.model import build_model, quiet_libraries, tensor_type
from emulator.capture.request import CaptureRequest
from emulator.errors import MissingTensor
from emulator.numerics import Array


def run_eagerly(
    request: CaptureRequest, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """The model's outputs by name."""
    model = build_model(replace(request, dtype="float32"))
    weights = {name: _tensor(array) for name, array in parameters.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise MissingTensor("parameter", name, str(tensor_type(tensor)))
    with quiet_libraries(), torch.no_grad():
        outputs = model(**{name: torch.from_numpy(np.array(array)) for name, array in inputs.items()})
    return {name: output.numpy() for name, output in outputs.items() if isinstance(output, torch.Tensor)}


def _tensor(array: Array) -> Any:
    """As float32, because numpy knows bfloat16 only by courtesy of an extension that torch does not share."""
    floating = not np.issubdtype(array.dtype, np.integer) and array.dtype != np.bool_
    return torch.from_numpy(np.ascontiguousarray(array, np.float32 if floating else array.dtype))
