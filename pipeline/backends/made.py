"""What a backend hands to the walk of a build: all that is published, but for the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.request import Shape

if TYPE_CHECKING:
    from pipeline.evidence import Step
    from pipeline.models.weights import Tensors
    from pipeline.verify import Thresholds


@dataclass(frozen=True)
class MadeProgram:
    shape: Shape
    degree: int
    graph_key: str
    code: bytes


@dataclass(frozen=True)
class Made:
    programs: tuple[MadeProgram, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    report: Mapping[str, object] = field(default_factory=dict)


# Of a request of its own kind, and the weights that the model asks for.
Backend: TypeAlias = Callable[[Any, "Tensors", "Step", "Thresholds"], Made]
