"""Reference: the model in PyTorch eager mode, in float32 or a narrower type."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nxpipe.emulator.capture.decoder import make_stepwise
from nxpipe.emulator.capture.model import build_model, quiet_libraries, tensor_type
from nxpipe.emulator.capture.request import CaptureRequest, ModelOutputs
from nxpipe.emulator.errors import MissingTensor
from nxpipe.emulator.numerics import Array


def run_eagerly(
    request: CaptureRequest, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """The model's outputs in float32, by name."""
    return dict(Reference(request, parameters).run(inputs).outputs)


class Reference:
    """A PyTorch model with its weights, for any number of forward passes."""

    def __init__(self, request: CaptureRequest, parameters: Mapping[str, Array], dtype: str = "float32") -> None:
        self.model = build_model(replace(request, dtype=dtype))
        self._dtype = getattr(torch, dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # weights are never written
            weights = {name: self._tensor(array) for name, array in parameters.items()}
        self.model.load_state_dict(weights, strict=False, assign=True)
        self.model.tie_weights()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if tensor.is_meta:
                raise MissingTensor("parameter", name, str(tensor_type(tensor)))
        self._layers = dict(_repeated_layers(self.model))
        if request.has_cache:
            make_stepwise(self.model, request)

    def run(self, inputs: Mapping[str, Array]) -> ModelOutputs:
        """One forward pass: the model's outputs and those of its repeated layers."""
        seen: dict[str, Array] = {}
        with quiet_libraries(), torch.no_grad(), self._recording(seen):
            outputs = self.model(**self.tensors(inputs))
        return ModelOutputs(
            {name: _array(value) for name, value in outputs.items() if isinstance(value, torch.Tensor)}, seen
        )

    def tensors(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """The inputs as tensors; copies, because the model may write to them."""
        return {name: self._tensor(np.array(array)) for name, array in inputs.items()}

    def _tensor(self, array: Array) -> Any:
        """An array as a tensor. Narrow floats are converted from float32, because torch reads no bfloat16 from
        numpy."""
        if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
            return torch.from_numpy(np.ascontiguousarray(array))
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self._dtype)

    @contextmanager
    def _recording(self, seen: dict[str, Array]) -> Iterator[None]:
        def watch(name: str) -> Any:
            def record(_: Any, __: Any, result: Any) -> None:
                first = result if isinstance(result, torch.Tensor) else next(iter(_tensors(result)), None)
                if first is not None:
                    seen[name] = _array(first)

            return record

        hooks = [layer.register_forward_hook(watch(name)) for name, layer in self._layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _repeated_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The members of the outermost module lists: encoder layers, decoder layers, stages."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(outer + ".") for outer in lists):
            lists.append(name)
            yield from ((f"{name}.{number}", layer) for number, layer in enumerate(module))


def _tensors(result: Any) -> Iterator[Any]:
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else ()
    return (value for value in values if isinstance(value, torch.Tensor))


def _array(tensor: Any) -> Array:
    exact: Array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return exact
