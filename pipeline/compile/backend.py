"""Backend interface: a backend compiles one program of a specification at a time, and stores its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.pipeline.compile.spec import BuildSpec

# The compiled program among the files of its step result; the other files go by their paths in an artifact.
PROGRAM: Final = "program"


@dataclass(frozen=True)
class BackendOutput:
    """The content of a step result: stored blobs by path, and metadata."""

    files: Mapping[str, "Blob"]
    facts: Mapping[str, object]


class Backend(Protocol):
    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> Any:
        """The graph that the program, and its verification, are made from."""
        ...

    def program(
        self, spec: "BuildSpec", shape: Shape, front: Any, store: "Store", step: Step, *, force: bool
    ) -> BackendOutput:
        """Compile what `frontend` returned. The metadata has at least `degree`, `graph_key` and `outputs`. `force`
        ignores results in the store."""
        ...
