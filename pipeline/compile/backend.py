"""Backends: the interface of code generation, and the toolchain that each needs: its keys and its checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from nxpipe.artifact_store.evidence import EMULATED
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.versions import compiler_digest
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.pipeline.compile.spec import BuildSpec


# The compiled program among the files of its step result; other files have the paths that they have in an artifact.
PROGRAM: Final = "program"


@dataclass(frozen=True)
class BackendOutput:
    """The content of a step result: stored blobs by path, and metadata."""

    files: Mapping[str, "Blob"]
    facts: Mapping[str, object]


class Backend(Protocol):
    """A code generator."""

    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> Any:
        """Capture the graph from which the program is compiled and verified."""
        ...

    def program(
        self, spec: "BuildSpec", shape: Shape, frontend_output: Any, store: "Store", step: Step, *, force: bool
    ) -> BackendOutput:
        """Compile the output of `frontend`. The metadata has at least `degree`, `graph_key` and `outputs`. `force`
        ignores results in the store."""
        ...


class Toolchain(Protocol):
    """The installation that a backend needs: its checks, and its part of the cache keys. Weights are arguments of
    programs, and in no key."""

    evidence: tuple[str, ...]
    """Kinds of evidence that a build collects: comparisons of each program with the reference, on this machine."""

    def require_installed(self) -> None:
        """Raise MissingSoftware if the compiler is not installed."""
        ...

    def check(self, spec: "BuildSpec") -> None:
        """Raise BuildRefused for options that the compiler does not have."""
        ...

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        """Key inputs of the compiler: its source or release, and its flags."""
        ...


class EmulatorToolchain:
    """nxpipe's own compiler: it is always installed, and its front end refuses options that it does not have."""

    evidence: tuple[str, ...] = (EMULATED,)

    def require_installed(self) -> None: ...

    def check(self, spec: "BuildSpec") -> None: ...

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {"backend": "emulator", "source": compiler_digest()}


def toolchain_of(backend: str) -> Toolchain:
    if backend == "neuronx":
        from nxpipe.pipeline.compile.neuronx.toolchain import NeuronxToolchain

        return NeuronxToolchain()
    return EmulatorToolchain()
