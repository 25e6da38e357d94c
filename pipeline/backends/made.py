"""What makes programs of a request: nxpipe's own compiler, or AWS's. Each makes one program at a time, and keeps the
bytes in the store as it goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from pipeline.request import BuildRequest, Shape
from pipeline.verification.evidence import Step

if TYPE_CHECKING:
    from artifact_store import Store
    from artifact_store.documents import Blob
    from pipeline.verification.materials import Materials
    from pipeline.verification.verify import Thresholds

PROGRAM: Final = "program"  # among the files of a part; all others go by their paths in an artifact


@dataclass(frozen=True)
class Made:
    """What becomes a part: blobs that are stored, by path, and facts."""

    files: Mapping[str, "Blob"]
    facts: Mapping[str, object]


class Backend(Protocol):
    def front(self, request: Any, shape: Shape, step: Step) -> Any:
        """As far as a program comes before it is one: what both of the others begin with."""
        ...

    def program(self, request: Any, shape: Shape, front: Any, store: "Store", step: Step, *, force: bool) -> Made:
        """Facts are at least `degree` and `graph_key`. With `force`, nothing that the store holds is taken for it."""
        ...

    def evidence(
        self,
        request: Any,
        shape: Shape,
        front: Any,
        materials: "Materials",
        store: "Store",
        step: Step,
        thresholds: "Thresholds",
    ) -> Made:
        """The fact is `report`: how far each output is from the yardstick's."""
        ...


def backend_of(request: BuildRequest) -> Backend:
    if request.backend == "neuronx":
        from pipeline.backends.neuronx.compile import Neuronx

        return Neuronx()
    from pipeline.backends.emulator import Emulator

    return Emulator()
