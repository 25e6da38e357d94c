"""From a model's configuration to a graph: torch.export on fake tensors, no weights, seconds.

Importing this package is light; torch and transformers are loaded by the first call that needs them.
"""

from collections.abc import Mapping

from emulator.capture.inputs import example_inputs
from emulator.capture.request import TASKS, CaptureRequest
from emulator.graph import Graph
from emulator.numerics import Array
from emulator.types import TensorType

__all__ = ["TASKS", "CaptureRequest", "capture", "example_inputs", "parameter_specs", "reference_outputs"]


def capture(request: CaptureRequest) -> Graph:
    """The graph of the model that `request` describes, traced in the model's own class."""
    from emulator.capture.export import capture_model

    return capture_model(request)


def parameter_specs(request: CaptureRequest) -> dict[str, TensorType]:
    """The types of the model's weights by their names in its checkpoint; tied weights appear once."""
    from emulator.capture.model import weight_types

    return weight_types(request)


def reference_outputs(
    request: CaptureRequest, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, Array]:
    """What PyTorch itself computes, eager and in float32, on these weights and inputs: the oracle of `verify`."""
    from emulator.capture.reference import run_eagerly

    return run_eagerly(request, parameters, inputs)
