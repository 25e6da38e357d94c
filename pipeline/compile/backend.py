"""Backends: the interface of code generation, and the toolchain that each needs: its keys and its checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.versions import compiler_digest
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


class Toolchain(Protocol):
    verifies: bool
    """Its programs can be run here, and compared with the reference."""

    def require_source(self, source: ModelSource) -> None:
        """BuildRefused for a model that it cannot compile."""
        ...

    def require_installed(self) -> None:
        """MissingSoftware where the compiler is not installed."""
        ...

    def check(self, spec: "BuildSpec") -> None:
        """BuildRefused for options that the compiler does not have."""
        ...

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        """The compiler, as a part of every key: its source or release, and its flags."""
        ...

    def weights_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        """The weights, as a part of a program's key, where a program contains them."""
        ...


class EmulatorToolchain:
    """nxpipe's own compiler: it is always installed, and its front end refuses options that it does not have."""

    verifies = True

    def require_source(self, source: ModelSource) -> None: ...

    def require_installed(self) -> None: ...

    def check(self, spec: "BuildSpec") -> None: ...

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {"backend": "emulator", "source": compiler_digest()}

    def weights_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {}  # a program is the same for all weights


def toolchain_of(backend: str) -> Toolchain:
    if backend == "neuronx":
        from nxpipe.pipeline.compile.neuronx.toolchain import NeuronxToolchain

        return NeuronxToolchain()
    return EmulatorToolchain()
