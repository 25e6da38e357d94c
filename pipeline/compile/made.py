"""What makes programs of a request: nxpipe's own compiler, or AWS's. Each makes one program at a time, and keeps the
bytes in the store as it goes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from nxpipe.artifact_store.documents import parse_document
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.evidence import Compared
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.verify.evidence import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.builds import StepResult
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.pipeline.verify.materials import Materials
    from nxpipe.pipeline.verify.verify import Deviation, Thresholds

# Among the files of a program's part; all others go by their paths in an artifact.
PROGRAM: Final = "program"
# The files of evidence: what the program was fed, and what it answered.
INPUTS: Final = "inputs"
ANSWERS: Final = "answers"


@dataclass(frozen=True)
class Made:
    """What becomes a part: blobs that are stored, by path, and facts."""

    files: Mapping[str, "Blob"]
    facts: Mapping[str, object]


def observed(deviations: "Sequence[Deviation]", yardstick: str, surroundings: Mapping[str, str]) -> dict[str, object]:
    """The facts of evidence: how far each output is from the yardstick's, and where that was found out."""
    outputs = [{name: _told(value) for name, value in asdict(each).items()} for each in deviations]
    return {"yardstick": yardstick, "outputs": outputs, "surroundings": dict(surroundings)}


def compared(shape: Shape, part: "StepResult") -> Compared:
    """A part of evidence, read back."""
    blobs = {"inputs": part.blob(INPUTS).model_dump(), "answers": part.blob(ANSWERS).model_dump()}
    try:
        return parse_document(Compared, {"program": shape.name, **part.facts, **blobs})
    except InvalidDocument as fault:
        raise Corrupt(f"part {part.key}", str(fault), "read it with the version of nxpipe that wrote it") from fault


def _told(value: object) -> object:
    """A divergence may be NaN where none is asked for, and says nothing then."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Backend(Protocol):
    def front(self, request: Any, shape: Shape, step: Step) -> Any:
        """As far as a program comes before it is one: what both of the others begin with."""
        ...

    def program(self, request: Any, shape: Shape, front: Any, store: "Store", step: Step, *, force: bool) -> Made:
        """Facts are at least `degree`, `graph_key` and `outputs`. With `force`, nothing that the store holds is
        taken for it."""
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
        """Files are `INPUTS` and `ANSWERS`, facts those of `observed`."""
        ...


def backend_of(request: BuildRequest) -> Backend:
    if request.backend == "neuronx":
        from nxpipe.pipeline.compile.neuronx.compile import Neuronx

        return Neuronx()
    from nxpipe.pipeline.compile.emulator import Emulator

    return Emulator()
