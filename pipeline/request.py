"""What a build is asked for, and the key that names exactly that: cheap to compute, without torch.

The key is the SHA-256 of canonical JSON over every input that can change the artifact's bytes, and over nothing
else: no path, user, host, time or order of a dictionary. The inputs are stored beside the key.
"""

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emulator.hardware import Instance
from pipeline.errors import BuildRefused, MissingSoftware
from pipeline.models.source import ModelSource
from pipeline.models.weights import Weights

if TYPE_CHECKING:
    from emulator.capture import CaptureRequest

# Releases of these can change a captured graph, so they are part of what is asked for.
LIBRARIES: Final = ("torch", "transformers", "numpy")

AUTOCAST_TYPES: Final = ("bf16", "fp16", "tf32")

_PHASES: Final = {"text-generation": ("prefill", "decode")}


@dataclass(frozen=True, order=True)
class Shape:
    """One program: its phase and its fixed shapes."""

    phase: str
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        return f"{self.phase}-b{self.batch}-s{self.sequence}"


@dataclass(frozen=True)
class BuildRequest:
    source: ModelSource
    weights: Weights
    shapes: tuple[Shape, ...]
    target: Instance
    autocast: str = "matmult"
    autocast_type: str = "bf16"
    tensor_parallel: int = 1

    def key_inputs(self) -> dict[str, object]:
        """Everything that can change a byte of the artifact."""
        return {
            "format": "nxpipe.request/1",
            "config": self.source.relevant_config(),
            "task": self.source.task,
            "weights": self.weights.identity(),
            "shapes": [[shape.phase, shape.batch, shape.sequence] for shape in sorted(self.shapes)],
            "target": self.target.compiler_target,
            "options": {
                "autocast": self.autocast,
                "autocast_type": self.autocast_type,
                "tensor_parallel": self.tensor_parallel,
            },
            "compiler": {"backend": "emulator", "source": compiler_digest()},
            "libraries": {name: library_version(name) for name in LIBRARIES},
        }

    def capture(self, shape: Shape) -> "CaptureRequest":
        """What the compiler's front end is asked for, for one program."""
        from emulator.capture import CaptureRequest

        source = self.source
        return CaptureRequest(source.config, source.task, shape.phase, shape.batch, shape.sequence, source.dtype)

    def check(self) -> None:
        """Refuse, before any work, what this version cannot build as asked."""
        if self.tensor_parallel != 1:
            raise BuildRefused(
                f"{self.source.id}: tensor parallelism of {self.tensor_parallel} was asked for, and this version "
                "builds unsharded programs only; pass --tp 1"
            )
        if self.autocast_type not in AUTOCAST_TYPES:
            raise BuildRefused(
                f"{self.source.id}: autocast to {self.autocast_type} was asked for, and this version casts to "
                f"{', '.join(AUTOCAST_TYPES)} only"
            )
        allowed = [phase for phase in _PHASES.get(self.source.task, ("forward",)) if phase != "decode"]
        longest = longest_sequence(self.source)
        for shape in self.shapes:
            if shape.phase not in allowed:
                raise BuildRefused(
                    f"{self.source.id}: phase {shape.phase!r} cannot be built for task {self.source.task}; "
                    f"this version builds {' and '.join(allowed)}"
                )
            if longest is not None and shape.sequence > longest:
                raise BuildRefused(
                    f"{self.source.id}: a bucket of {shape.sequence} tokens was asked for, but the model knows "
                    f"positions up to {longest}; pass --buckets of at most {longest}"
                )


def default_phases(task: str) -> tuple[str, ...]:
    return _PHASES.get(task, ("forward",))[:1]


def longest_sequence(source: ModelSource) -> int | None:
    """The most tokens that the model's learned positions allow, where its configuration says so."""
    for key in ("max_position_embeddings", "n_positions"):
        value = source.config.get(key)
        if isinstance(value, int):
            return value
    return None


def library_version(name: str) -> str:
    """The installed release of a library, without importing it; its builds for CPU and CUDA capture alike."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError as error:
        raise MissingSoftware(name, "Building a model", "pip install 'nxpipe[compile]'") from error


def compiler_digest() -> str:
    """The SHA-256 of the emulator's own source: a changed compiler never serves what an older one made."""
    import emulator

    room = Path(emulator.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*.py"), key=lambda path: path.relative_to(room).as_posix()):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(room).as_posix()}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()
