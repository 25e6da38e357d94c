"""Build specification: a resolved model, its weights, target and options, and the cache keys that follow from them.

A key is the SHA-256 of canonical JSON over every input that can change the result's bytes, and over nothing else: no
path, user, host, time or dictionary order. The inputs are stored beside the key. Computing one needs no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.evidence import EMULATED
from nxpipe.emulator.hardware import Instance
from nxpipe.pipeline.compile.backend import Toolchain, toolchain_of
from nxpipe.pipeline.models.configuration import Shape, cache_capacity
from nxpipe.pipeline.models.source import Companions, ModelSource
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.versions import comparison_digest, digest_of
from nxpipe.pipeline.models.weights import Arrays, NoWeights, Tensors, Weights
from nxpipe.pipeline.util.errors import BuildRefused

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.types import TensorType

_RESOLVED: Final = 64  # cached specifications: a model is resolved once, not for each cell


@dataclass(frozen=True)
class BuildSpec:
    """Resolved specification of one artifact. Its programs share the weights and, if they have one, the KV cache."""

    source: ModelSource
    weights: Weights
    shapes: tuple[Shape, ...]
    target: Instance
    autocast: str = "matmult"
    autocast_type: str = "bf16"
    tensor_parallel: int = 1
    verified: bool = True  # compared with the reference; the artifact's bytes do not depend on it
    backend: str = "emulator"
    companions: Companions = field(default_factory=Companions)  # part of the artifact, and of no program

    @classmethod
    def of(cls, spec: ModelSpec) -> "BuildSpec":
        """Resolve a specification: its model, weights and shapes. The default phases are those of a build."""
        return _resolved(replace(spec, name=None))

    @classmethod
    def without_weights(cls, spec: ModelSpec) -> "BuildSpec":
        """Resolve a specification that is only compiled, for its first target."""
        return _build_spec(spec, spec.look_up(weights=False), NoWeights())

    @property
    def toolchain(self) -> Toolchain:
        return toolchain_of(self.backend)

    # Keys

    @property
    def request_key(self) -> str:
        """The key of the artifact."""
        return digest_of(self.key_inputs())

    def key_inputs(self) -> dict[str, object]:
        """Everything that can change a byte of the artifact."""
        return {
            "format": "nxpipe.request/3",
            **self.program_inputs(self.shapes),
            **({"files": files} if (files := self.companions.digests()) else {}),
            "weights": self.weights.identity(),
            "target": self.target.compiler_target,
            "options": self._options(),
        }

    def program_key(self, shape: Shape) -> str:
        """The key of one program: it covers everything that can change the program, and no other program of the
        artifact."""
        return digest_of(self.program_key_inputs(shape))

    def program_key_inputs(self, shape: Shape) -> dict[str, object]:
        return {
            "format": "nxpipe.program/2",
            **self.program_inputs((shape,)),
            "cache": cache_capacity(shape, self.shapes),
            "target": self.target.compiler_target,
            "options": self._options(),
        }

    def evidence_key(self, shape: Shape, program_key: str | None = None, kind: str = EMULATED) -> str:
        """The key of one program's evidence: its outputs with these weights, compared with this reference by this
        code."""
        return digest_of(
            {
                "format": "nxpipe.observation/1",
                "program": program_key or self.program_key(shape),
                "weights": self.weights.identity(),
                "yardstick": self.reference,
                "comparison": comparison_digest(),
                **({} if kind == EMULATED else {"kind": kind}),
            }
        )

    def cell_keys(self, shape: Shape) -> tuple[str, ...]:
        """The keys of a cell's steps: its program, then each kind of evidence. The last one is the cell's."""
        program = self.program_key(shape)
        return (program, *(self.evidence_key(shape, program, kind) for kind in self.evidence_kinds))

    @property
    def evidence_kinds(self) -> tuple[str, ...]:
        """The kinds of evidence that the build collects; none without verification."""
        return self.toolchain.evidence if self.verified else ()

    def program_inputs(self, shapes: Iterable[Shape]) -> dict[str, object]:
        """Everything that can change the captured graphs of these shapes, and the compiler."""
        return {**self.source.key_inputs(shapes), "compiler": self.toolchain.key_inputs(self)}

    def _options(self) -> dict[str, object]:
        return {
            "autocast": self.autocast,
            "autocast_type": self.autocast_type,
            "tensor_parallel": self.tensor_parallel,
        }

    # Model

    @property
    def reference(self) -> str:
        """The implementation that computes the reference outputs."""
        return self.source.reference

    def capture_request(self, shape: Shape) -> "CaptureRequest | None":
        return self.source.capture_request(shape, self.shapes)

    def capture(self, shape: Shape) -> "Graph":
        return self.source.capture(shape, self.shapes)

    def parameters(self, shape: Shape | None = None) -> "Mapping[str, TensorType]":
        """The names and types of the weights; all programs of a model have the same."""
        return self.source.parameters(shape or self.shapes[0], self.shapes)

    def tensors(self) -> Tensors:
        """The model's weights, each loaded when it is read."""
        return Tensors(self.weights, self.parameters())

    def outputs(self, shape: Shape, weights: Arrays, inputs: Arrays) -> Arrays:
        """The outputs of the reference."""
        return self.source.outputs(shape, self.shapes, weights, inputs)

    # Checks

    def check(self) -> None:
        """Raise a BuildRefused or MissingSoftware, before any work, if the artifact cannot be built."""
        self.toolchain.require_installed()
        self._require_degree()
        self.source.check_shapes(self.shapes)
        self.toolchain.check(self)

    def _require_degree(self) -> None:
        if self.tensor_parallel not in self.target.degrees:
            raise BuildRefused(
                f"{self.source.id}: {self.target.name} has no tensor-parallel degree {self.tensor_parallel}; it offers "
                f"{self._nearest_degree(self.target.degrees)}"
            )

    def degree_refused(self, reason: str, possible: Iterable[int]) -> BuildRefused:
        """The error for a model that does not have the degree; its remedy is a degree that suits model and target."""
        common = sorted(set(possible).intersection(self.target.degrees))
        return BuildRefused(
            f"{self.source.id}: {reason}; on {self.target.name} it can have {self._nearest_degree(common)}"
        )

    def _nearest_degree(self, possible: Sequence[int]) -> str:
        nearest = min(possible, key=lambda degree: (abs(degree - self.tensor_parallel), degree))
        return f"{', '.join(map(str, possible))}; the nearest is --tp {nearest}"


@lru_cache(_RESOLVED)
def _resolved(spec: ModelSpec) -> BuildSpec:
    source = spec.look_up(weights=True)
    build_spec = _build_spec(spec, source, source.open_weights(spec.weights))
    return replace(build_spec, companions=spec.companions(source))


def _build_spec(spec: ModelSpec, source: ModelSource, weights: Weights) -> BuildSpec:
    return BuildSpec(
        source=source,
        weights=weights,
        shapes=spec.shapes(source),
        target=spec.targets()[0],
        autocast=spec.autocast,
        autocast_type=spec.autocast_type,
        tensor_parallel=spec.tp or 1,
        verified=spec.verified,
        backend=spec.backend,
    )
