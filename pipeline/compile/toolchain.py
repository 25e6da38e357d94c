"""Toolchains: the compiler of a backend as a part of cache keys, and the specifications that it accepts.

Planning a build needs these only. What a toolchain compiles with is its backend (backend.py).
"""

from typing import TYPE_CHECKING, Protocol

from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.versions import compiler_digest

if TYPE_CHECKING:
    from nxpipe.pipeline.compile.spec import BuildSpec


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
