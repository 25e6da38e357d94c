"""What somebody who was asked gave back."""

from collections.abc import Mapping
from dataclasses import dataclass

from nxpipe.emulator.numerics import Array


@dataclass(frozen=True)
class Answer:
    """Outputs by name, and what each layer gave, by the layer's module path, where that was watched."""

    outputs: Mapping[str, Array]
    layers: Mapping[str, Array]
