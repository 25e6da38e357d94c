"""An artifact read back: its programs, its weights, and the inputs and outputs that are stored with it. Every byte is
read against its digest."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from pipeline import artifact_files
from pipeline.documents import json_of
from pipeline.errors import ModelSourceError, ProgramInvalid
from pipeline.models.source import ModelSource
from pipeline.verification.evidence import Step
from pipeline.verification.stored_program import core_of, read_instructions, require_instructions, require_made_of
from pipeline.verification.verify import Arrays

if TYPE_CHECKING:
    from artifact_store import Published, Store
    from artifact_store.manifest import Executable, Manifest
    from emulator.compile import Program
    from emulator.executable import Executable as Instructions
    from emulator.types import TensorType

_MOST_ELEMENTS: Final = 1 << 48  # beyond this numpy cannot say a shape, even that of nothing


@dataclass(frozen=True)
class StoredProgram:
    executable: "Executable"
    program: "Program"  # as a graph
    instructions: "Instructions"
    inputs: Arrays | None  # the golden ones, if there are any
    outputs: Arrays | None


@dataclass(frozen=True)
class Stored:
    manifest: "Manifest"
    source: ModelSource | None  # none of a program that came in a file: its class cannot be built again
    weights: Arrays
    programs: tuple[StoredProgram, ...]

    @property
    def core(self) -> str:
        return core_of(self.manifest)

    def inputs(self, stored: StoredProgram) -> tuple[Arrays, str]:
        """What a program is fed when nobody gives anything else, and where that is from."""
        if stored.inputs is not None:
            require_inputs(stored, self.manifest.model.id)
            return stored.inputs, "the stored inputs"
        from emulator.capture import example_inputs

        if stored.program.degree > 1:
            raise ModelSourceError(
                f"{self.manifest.model.id}: published without golden inputs, which a program of "
                f"{stored.program.degree} ranks needs; build it again without --no-verify"
            )
        random = example_inputs(stored.program.whole, self.source.config if self.source else {}, seed=0)
        return random, "random inputs: none are stored"


def require_inputs(stored: StoredProgram, model: str) -> None:
    """What is stored may be a stranger's, and is fed to PyTorch as well."""
    from emulator.errors import InputsInvalid

    try:
        stored.program.require_inputs(stored.inputs or {})
    except InputsInvalid as error:
        raise ProgramInvalid(
            f"{model} {stored.executable.name}: of its stored inputs, {error}; build it again"
        ) from error


def read_artifact(published: "Published", store: "Store", step: Step) -> Stored:
    from emulator.types import DType, TensorType
    from pipeline.verification.comparison import refuse_what_memory_cannot_hold

    manifest = published.manifest
    require_instructions(manifest)
    require_tensors(manifest)
    kinds = {tensor.name: TensorType(tensor.shape, DType(tensor.dtype)) for tensor in manifest.weights}
    refuse_what_memory_cannot_hold(manifest.model.id, kinds)
    with step(f"read {len(manifest.blobs())} blobs"):
        weights = _weights(manifest, kinds, store)
        files = {file.path: store.read_blob(file.blob) for file in manifest.files}
        programs = tuple(_stored(manifest, executable, files, store) for executable in manifest.executables)
    return Stored(manifest, _source(manifest, files), weights, programs)


def require_tensors(manifest: "Manifest") -> None:
    """Refuse, before a byte is read, tensors whose bytes cannot be what their type and shape say."""
    from emulator.types import DType, TensorType

    for tensor in manifest.weights:
        where = f"{manifest.model.id}: tensor {tensor.name[:80]!r}"
        if tensor.name == "__metadata__" or tensor.dtype not in set(DType):
            what = (
                f"has element type {tensor.dtype[:40]!r}" if tensor.name != "__metadata__" else "cannot be one's name"
            )
            raise ProgramInvalid(f"{where} {what}; build the model again")
        need = TensorType(tensor.shape, DType(tensor.dtype)).nbytes
        if need != tensor.blob.size or prod(size or 1 for size in tensor.shape) > _MOST_ELEMENTS:
            raise ProgramInvalid(
                f"{where} is {tensor.dtype} of {list(tensor.shape)}, which takes {need:,} bytes, and "
                f"{tensor.blob.size:,} are stored; build the model again"
            )


def _weights(manifest: "Manifest", kinds: Mapping[str, "TensorType"], store: "Store") -> Arrays:
    import numpy as np

    from artifact_store.weights import read_weights

    return {
        tensor.name: np.frombuffer(data, kinds[tensor.name].dtype.stored).reshape(tensor.shape)
        for tensor, data in read_weights(store.blobs, manifest.weights)
    }


def _stored(
    manifest: "Manifest", executable: "Executable", files: Mapping[str, bytes], store: "Store"
) -> StoredProgram:
    where = f"{manifest.model.id} {executable.name}"
    instructions = read_instructions(manifest, executable, store)
    program = _program(instructions, executable, files, where)
    require_made_of(program, instructions, where)
    inputs, outputs = (_golden(files, executable, side) for side in ("inputs", "outputs"))
    return StoredProgram(executable, program, instructions, inputs, outputs)


def _program(
    instructions: "Instructions", executable: "Executable", files: Mapping[str, bytes], where: str
) -> "Program":
    """The graph as it was published. Which piece of a tensor each rank has is said by the program made of it."""
    from emulator.compile import Program
    from emulator.graph import Graph
    from emulator.isa.program import Role

    graph = Graph.from_bytes(files[artifact_files.graph(executable.name)])
    if graph.key != executable.graph_key:
        raise ProgramInvalid(
            f"{where}: its graph has key {graph.key[:12]}, where the manifest says {executable.graph_key[:12]}; build "
            "the model again"
        )
    weights, states = (instructions.pieces(role) for role in (Role.PARAMETER, Role.STATE))
    return Program(graph, graph, executable.tensor_parallel, weights, states)


def _golden(files: Mapping[str, bytes], executable: "Executable", side: str) -> Arrays | None:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = files.get(artifact_files.golden(executable.name, side))
    try:
        return None if data is None else dict(sorted(load(data).items()))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProgramInvalid(
            f"{executable.name}: its stored {side} are not a safetensors file ({error}); build the model again"
        ) from error


def _source(manifest: "Manifest", files: Mapping[str, bytes]) -> ModelSource | None:
    """The model's own class can be built from its configuration."""
    if "config.json" not in files:
        return None
    config = json_of(files["config.json"])
    return ModelSource(manifest.model.id, manifest.model.revision, config, manifest.model.task, None)
