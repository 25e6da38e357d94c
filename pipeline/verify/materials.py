"""The tensors of a model, looked up and loaded once for all of its programs that one process makes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nxpipe.pipeline.request import BuildRequest, digest_of
from nxpipe.pipeline.verify.evidence import Step

if TYPE_CHECKING:
    from nxpipe.pipeline.models.weights import Tensors
    from nxpipe.pipeline.verify.verify import Arrays


@dataclass
class Materials:
    """`tensors` loads each when it is asked for; `loaded` has all in memory, and keeps them there."""

    tensors: "Tensors"
    _loaded: "Arrays | None" = field(default=None, init=False)

    @property
    def are_loaded(self) -> bool:
        return self._loaded is not None

    def loaded(self, step: Step) -> "Arrays":
        if self._loaded is None:
            with step("load weights"):
                self._loaded = dict(self.tensors)
        return self._loaded


class Shelf:
    """Holds the materials of one model, the last that was asked for: two would take twice the memory."""

    def __init__(self) -> None:
        self._name = ""
        self._materials: Materials | None = None

    def of(self, request: BuildRequest, step: Step) -> Materials:
        name = digest_of({"model": request.model_question(), "weights": request.weights.identity()})
        if self._materials is None or self._name != name:
            self._materials = None  # before the next is made
            with step(f"read the configuration of {request.source.id}"):
                self._name, self._materials = name, Materials(request.tensors())
        return self._materials
