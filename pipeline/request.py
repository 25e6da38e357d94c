"""What a build is asked for, and the key that names exactly that: cheap to compute, without torch.

The key is the SHA-256 of canonical JSON over every input that can change the artifact's bytes, and over nothing
else: no path, user, host, time or order of a dictionary. The inputs are stored beside the key.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.emulator.hardware import Instance
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.weights import Tensors, Weights
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware
from nxpipe.pipeline.verify.verify import USUAL_YARDSTICK, Arrays

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.passes import PassOptions

# Releases of these can change a captured graph, so they are part of what is asked for.
LIBRARIES: Final = ("torch", "transformers", "numpy")
# By these transformers chooses how a layer is computed, where they are installed.
_CHOOSING: Final = (
    *("apex", "causal-conv1d", "detectron2", "flash-attn", "flash-linear-attention", "kernels", "mamba-ssm"),
    *("mambapy", "natten", "timm", "xlstm"),
)
_EXTRAS: Final = {"diffusers": "diffusion", "onnx": "onnx"}  # all else comes with `compile`

_PHASES: Final = {"text-generation": ("prefill", "decode")}
_BY_DISTANCE: Final = "relative_attention_num_buckets"  # such a model knows how far tokens are apart, at any length
SAVED: Final = "program"  # the phase of what was saved in a file


@dataclass(frozen=True, order=True)
class Shape:
    """One program: its phase and its fixed shapes. One that was saved in a file has shapes of its own."""

    phase: str
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        return self.phase if self.phase == SAVED else f"{self.phase}-b{self.batch}-s{self.sequence}"


@dataclass(frozen=True)
class BuildRequest:
    source: ModelSource
    weights: Weights
    shapes: tuple[Shape, ...]
    target: Instance
    autocast: str = "matmult"
    autocast_type: str = "bf16"
    tensor_parallel: int = 1
    verified: bool = True  # compared with PyTorch; what was found lies beside the artifact, which is the same without

    def key_inputs(self) -> dict[str, object]:
        """Everything that can change a byte of the artifact."""
        return {
            "format": "nxpipe.request/3",
            **self._program_inputs(),
            "weights": self.weights.identity(),
            "target": self.target.compiler_target,
            "options": {
                "autocast": self.autocast,
                "autocast_type": self.autocast_type,
                "tensor_parallel": self.tensor_parallel,
            },
        }

    def program_key(self, shape: Shape) -> str:
        """Names one program: all that can change a byte of it, and nothing of what is served beside it."""
        return digest_of(self.program_question(shape))

    def evidence_key(self, shape: Shape, program_key: str | None = None) -> str:
        """Names what that program answers by these weights, held against that yardstick by this code."""
        return digest_of(
            {
                "format": "nxpipe.observation/1",
                "program": program_key or self.program_key(shape),
                "weights": self.weights.identity(),
                "yardstick": self.yardstick,
                "comparison": comparison_digest(),
            }
        )

    def program_question(self, shape: Shape) -> dict[str, object]:
        return {
            "format": "nxpipe.program/2",
            **replace(self, shapes=(shape,))._program_inputs(),
            "cache": cache_room(shape, self.shapes),
            "target": self.target.compiler_target,
            "options": {
                "autocast": self.autocast,
                "autocast_type": self.autocast_type,
                "tensor_parallel": self.tensor_parallel,
            },
        }

    def model_question(self) -> dict[str, object]:
        """Names the model: all that its parameters follow from."""
        return {"config": self.source.relevant_config(), "task": self.source.task}

    def _program_inputs(self) -> dict[str, object]:
        return program_inputs(self.source, self.shapes)

    @property
    def backend(self) -> str:
        """Whose compiler makes the programs."""
        return "emulator"

    @property
    def yardstick(self) -> str:
        """Whom the answers are held against."""
        return USUAL_YARDSTICK

    def capture(self, shape: Shape) -> "CaptureRequest":
        return capture_request(self.source, shape, self.shapes)

    def compile(self, shape: Shape, options: "PassOptions") -> "Program":
        from nxpipe.emulator.compile import compile_program

        return compile_program(self.capture(shape), options)

    def tensors(self) -> Tensors:
        """The weights that the model asks for; nothing of them is loaded yet."""
        from nxpipe.emulator.capture import parameter_specs

        return Tensors(self.weights, parameter_specs(self.capture(self.shapes[0])))

    def truth(self, shape: Shape, weights: Arrays, inputs: Arrays) -> Arrays:
        """What the yardstick makes of these inputs."""
        from nxpipe.emulator.capture import reference_outputs

        return reference_outputs(self.capture(shape), weights, inputs)

    def check(self) -> None:
        """Refuse, before any work, what cannot be built as asked."""
        self.require_degree()
        self._require_shapes()

    def require_degree(self) -> None:
        if self.tensor_parallel not in self.target.degrees:
            raise BuildRefused(
                f"{self.source.id}: a tensor-parallel degree of {self.tensor_parallel} was asked for, and "
                f"{self.target.name} offers {self._degrees(self.target.degrees)}"
            )

    def _require_shapes(self) -> None:
        allowed = all_phases(self.source.task)
        longest = longest_sequence(self.source)
        for shape in self.shapes:
            if shape.phase not in allowed:
                raise BuildRefused(
                    f"{self.source.id}: phase {shape.phase!r} cannot be built for task {self.source.task}; "
                    f"its phases are {' and '.join(allowed)}"
                )
            if longest is not None and shape.sequence > longest:
                raise BuildRefused(
                    f"{self.source.id}: a bucket of {shape.sequence} tokens was asked for, but the model knows "
                    f"positions up to {longest}; pass --buckets of at most {longest}"
                )

    def without_degree(self, reason: str, possible: Iterable[int]) -> BuildRefused:
        """The model cannot be divided as asked; the way out is a degree that suits the model and the target."""
        both = sorted(set(possible).intersection(self.target.degrees))
        return BuildRefused(f"{self.source.id}: {reason}; on {self.target.name} it can have {self._degrees(both)}")

    def _degrees(self, possible: Sequence[int]) -> str:
        """All degrees that there are, and the one to pass instead of what was asked for."""
        nearest = min(possible, key=lambda degree: (abs(degree - self.tensor_parallel), degree))
        return f"{', '.join(map(str, possible))}; the nearest is --tp {nearest}"


def shapes_of(phases: Iterable[str], batches: Iterable[int], buckets: Sequence[int]) -> tuple[Shape, ...]:
    """A program for each phase, batch and bucket; but one decode for all buckets, beside the cache that they share."""
    longest = max(buckets)
    shapes = (
        Shape(phase, batch, longest if phase == "decode" else bucket)
        for phase in phases
        for batch in batches
        for bucket in buckets
    )
    return tuple(dict.fromkeys(shapes))


def capture_request(source: ModelSource, shape: Shape, beside: Iterable[Shape] = ()) -> "CaptureRequest":
    """What the compiler's front end is asked for, for one program of those that are served together.

    All that keep a cache for the same batch share one, with room for the longest of them: whichever prefill a prompt
    fits into, the decode goes on with what it left.
    """
    from nxpipe.emulator.capture import CaptureRequest

    wanted = CaptureRequest(source.config, source.task, shape.phase, shape.batch, shape.sequence, source.dtype)
    room = cache_room(shape, beside)
    return wanted if room is None else replace(wanted, capacity=room)


def cache_room(shape: Shape, beside: Iterable[Shape]) -> int | None:
    """Tokens that the cache of a prefill has room for; None where the program's own shape says it."""
    sharing = [each.sequence for each in beside if each.phase in ("prefill", "decode") and each.batch == shape.batch]
    return max(sharing) if shape.phase == "prefill" and sharing else None


def program_inputs(source: ModelSource, shapes: Iterable[Shape]) -> dict[str, object]:
    """Everything that can change a captured program; no weights are among it."""
    return {
        "config": source.relevant_config(),
        "task": source.task,
        "shapes": [[shape.phase, shape.batch, shape.sequence] for shape in sorted(shapes)],
        "compiler": {"backend": "emulator", "source": compiler_digest()},
        "libraries": {name: library_version(name) for name in _libraries(source)} | _installed_choices(),
    }


def _libraries(source: ModelSource) -> tuple[str, ...]:
    """Diffusers writes a `_class_name` where transformers writes a model_type."""
    return (*LIBRARIES, "diffusers") if "_class_name" in source.config else LIBRARIES


@cache
def _installed_choices() -> dict[str, str]:
    found = {}
    for name in _CHOOSING:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def digest_of(question: Mapping[str, object]) -> str:
    """The name of a question."""
    return sha256_hex(canonical_json(question))


def all_phases(task: str) -> tuple[str, ...]:
    """Every program that a model of this task is served with."""
    return _PHASES.get(task, ("forward",))


def default_phases(task: str) -> tuple[str, ...]:
    """What a build makes without a word on phases."""
    return all_phases(task)[:1]


def longest_sequence(source: ModelSource) -> int | None:
    """The most tokens that the model knows positions for, where its configuration, or its part that reads, says so."""
    reads = source.config.get("text_config")
    for config in (source.config, reads if isinstance(reads, dict) else {}):
        for key in ("max_position_embeddings", "n_positions"):
            value = config.get(key)
            if isinstance(value, int) and _BY_DISTANCE not in config:
                return value
    return None


@cache
def library_version(name: str) -> str:
    """The installed release of a library, without importing it; its builds for CPU and CUDA capture alike."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError as error:
        extra = _EXTRAS.get(name, "compile")
        raise MissingSoftware(name, "Building this model", f"pip install 'nxpipe[{extra}]'") from error


def compiler_digest() -> str:
    """The SHA-256 of the emulator's own source: a changed compiler never serves what an older one made."""
    from nxpipe import emulator

    return source_digest(Path(emulator.__file__).parent)


def comparison_digest() -> str:
    """The same of what compares answers: figures of another comparison are others."""
    from nxpipe.pipeline import verify

    return source_digest(Path(verify.__file__).parent)


@cache
def source_digest(room: Path) -> str:
    """The SHA-256 of every Python file in a folder, with its place there."""
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*.py"), key=lambda path: path.relative_to(room).as_posix()):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(room).as_posix()}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()
