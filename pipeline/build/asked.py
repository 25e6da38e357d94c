"""One artifact that is asked for, in words alone: what travels to whoever builds it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from nxpipe.pipeline.models.source import looks_like_folder
from nxpipe.pipeline.order import Order
from nxpipe.pipeline.request import BuildRequest
from nxpipe.pipeline.saved import SavedProgram, is_saved
from nxpipe.pipeline.util.files import expanded

Backend: TypeAlias = Literal["emulator", "neuronx"]
_AT_ONCE = 64  # requests that a process remembers: a model is looked up once, not once a cell


@dataclass(frozen=True)
class Asked:
    """`name` is the model's in nxpipe.toml, if it came from there; `axes` are those of an ONNX file."""

    order: Order
    name: str | None = None
    axes: tuple[tuple[str, int], ...] = ()
    backend: Backend = "emulator"
    verified: bool = True

    def request(self) -> BuildRequest:
        """Look the model up: its configuration, and what its weights are."""
        return _request(replace(self, name=None))

    def anywhere(self) -> "Asked":
        """The same for a process that stands in another folder than this one."""
        model, weights = self.order.model_id, self.order.weights
        if looks_like_folder(model) or is_saved(model):
            model = _absolute(model)
        if weights and weights != "hub" and not weights.startswith("random:"):
            weights = _absolute(weights)
        return replace(self, order=replace(self.order, model_id=model, weights=weights))

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Asked":
        words = {name: _tuples(value) for name, value in document["order"].items()}
        rest = {name: _tuples(value) for name, value in document.items() if name != "order"}
        return cls(Order(**words), **rest)


@lru_cache(_AT_ONCE)
def _request(asked: Asked) -> BuildRequest:
    if is_saved(asked.order.model_id):
        from nxpipe.pipeline.saved_request import SavedRequest

        path = expanded(asked.order.model_id)
        request: BuildRequest = SavedRequest.of(SavedProgram(path, dict(asked.axes)), asked.order)
    else:
        request = asked.order.request()
    request = replace(request, verified=asked.verified)
    if asked.backend == "neuronx":
        from nxpipe.pipeline.compile.neuronx.request import NeuronxRequest

        return NeuronxRequest.of(request)
    return request


def _absolute(path: str) -> str:
    return str(expanded(path).absolute())


def _tuples(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
