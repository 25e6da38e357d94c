"""A request to AWS's compiler: another key, since another toolchain makes the program."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from nxpipe.pipeline.compile.neuronx.flags import TARGETS, compiler_flags, wrapper_words
from nxpipe.pipeline.compile.neuronx.toolchain import toolchain
from nxpipe.pipeline.request import BuildRequest, Shape, compiler_digest, source_digest
from nxpipe.pipeline.util.errors import BuildRefused


@dataclass(frozen=True)
class NeuronxRequest(BuildRequest):
    @classmethod
    def of(cls, request: BuildRequest) -> "NeuronxRequest":
        """The same for AWS's compiler. A NEFF runs nowhere but on the device, so nothing is verified."""
        if type(request) is not BuildRequest:
            raise BuildRefused(
                f"{request.source.id}: a saved program cannot be built by AWS's compiler; pass the model's folder or "
                "id, or --backend emulator"
            )
        values = {field.name: getattr(request, field.name) for field in fields(BuildRequest)}
        return cls(**values | {"verified": False})

    @property
    def backend(self) -> str:
        return "neuronx"

    def check(self) -> None:
        toolchain()
        super().check()
        if self.tensor_parallel != 1:
            raise BuildRefused(
                f"{self.source.id}: it is to be divided among {self.tensor_parallel} cores, and torch_neuronx.trace "
                f"compiles for one; pass --tp 1 where the model fits one core of {self.target.name} (nxpipe check "
                "tells), or --backend emulator"
            )
        if self.target.compiler_target not in TARGETS:
            raise BuildRefused(
                f"{self.source.id}: {self.target.name} was asked for, and neuronx-cc's reference lists the targets "
                f"{', '.join(TARGETS)}; choose an instance of those, or --backend emulator"
            )
        wrapper_words(os.environ)

    def program_question(self, shape: Shape) -> dict[str, object]:
        """Its weights are inside of a NEFF."""
        return super().program_question(shape) | {"weights": self.weights.identity()}

    def _program_inputs(self) -> dict[str, object]:
        compiler = {
            "backend": self.backend,
            "source": compiler_digest(),  # nxpipe's own, whose capture gives the program its name
            "driver": source_digest(Path(__file__).parent),
            "flags": list(compiler_flags(self)),
            "toolchain": toolchain(),
        }
        return super()._program_inputs() | {"compiler": compiler}
