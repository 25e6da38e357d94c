"""An artifact read back: its programs, its weights, and the inputs and answers of its evidence. Every byte is
read against its digest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.util.errors import ModelSourceError, ProgramInvalid
from nxpipe.pipeline.util.files import json_of
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.judged import chosen
from nxpipe.pipeline.verify.stored_program import core_of, read_instructions, require_instructions, require_made_of
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.executable.executable import Executable as Instructions
    from nxpipe.emulator.ir.types import TensorType


@dataclass(frozen=True)
class StoredProgram:
    executable: "Executable"
    program: "Program"  # as a graph
    instructions: "Instructions"
    inputs: Arrays | None  # of the evidence, if there is any
    outputs: Arrays | None  # and what was answered to them


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
        from nxpipe.emulator.capture import example_inputs

        if stored.program.degree > 1:
            raise ModelSourceError(
                f"{self.manifest.model.id}: nothing shows what it was fed, which a program of "
                f"{stored.program.degree} ranks needs; build it again without --no-verify"
            )
        random = example_inputs(stored.program.whole, self.source.config if self.source else {}, seed=0)
        return random, "random inputs: none are stored"


def require_inputs(stored: StoredProgram, model: str) -> None:
    """What is stored may be a stranger's, and is fed to PyTorch as well."""
    from nxpipe.emulator.errors import InputsInvalid

    try:
        stored.program.require_inputs(stored.inputs or {})
    except InputsInvalid as error:
        raise ProgramInvalid(
            f"{model} {stored.executable.name}: of its stored inputs, {error}; build it again"
        ) from error


def read_artifact(published: "Published", store: "Store", step: Step) -> Stored:
    from nxpipe.emulator.ir.types import DType, TensorType
    from nxpipe.pipeline.verify.comparison import refuse_what_memory_cannot_hold

    manifest = published.manifest
    require_instructions(manifest)
    strange = sorted({tensor.dtype for tensor in manifest.weights} - set(DType))
    if strange:
        raise ProgramInvalid(f"{manifest.model.id}: no program has weights of type {strange[0]}; build the model again")
    kinds = {tensor.name: TensorType(tensor.shape, DType(tensor.dtype)) for tensor in manifest.weights}
    refuse_what_memory_cannot_hold(manifest.model.id, kinds)
    with step(f"read {len(manifest.blobs())} blobs"):
        weights = _weights(manifest, kinds, store)
        files = {file.path: store.read_blob(file.blob) for file in manifest.files}
        found = chosen(manifest, store.evidence(published.manifest_digest))
        programs = tuple(_stored(manifest, executable, files, found, store) for executable in manifest.executables)
    return Stored(manifest, _source(manifest, files), weights, programs)


def _weights(manifest: "Manifest", kinds: Mapping[str, "TensorType"], store: "Store") -> Arrays:
    import numpy as np

    from nxpipe.artifact_store.weights import read_weights

    return {
        tensor.name: np.frombuffer(data, kinds[tensor.name].dtype.stored).reshape(tensor.shape)
        for tensor, data in read_weights(store.blobs, manifest.weights)
    }


def _stored(
    manifest: "Manifest",
    executable: "Executable",
    files: Mapping[str, bytes],
    evidence: "Evidence | None",
    store: "Store",
) -> StoredProgram:
    where = f"{manifest.model.id} {executable.name}"
    instructions = read_instructions(manifest, executable, store)
    program = _program(instructions, executable, files, where)
    require_made_of(program, instructions, where)
    found = evidence.of(executable.name) if evidence else None
    inputs, outputs = (_arrays(store, found.inputs), _arrays(store, found.answers)) if found else (None, None)
    return StoredProgram(executable, program, instructions, inputs, outputs)


def _program(
    instructions: "Instructions", executable: "Executable", files: Mapping[str, bytes], where: str
) -> "Program":
    """The graph as it was published. Which piece of a tensor each rank has is said by the program made of it."""
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.ir.decoding import decode
    from nxpipe.emulator.isa.program import Role

    graph = decode(files[artifact_files.graph(executable.name)])
    if graph.key != executable.graph_key:
        raise ProgramInvalid(
            f"{where}: its graph has key {graph.key[:12]}, where the manifest says {executable.graph_key[:12]}; build "
            "the model again"
        )
    weights, states = (instructions.pieces(role) for role in (Role.PARAMETER, Role.STATE))
    return Program(graph, graph, executable.tensor_parallel, weights, states)


def _arrays(store: "Store", blob: "Blob") -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(sorted(load(store.read_blob(blob)).items()))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProgramInvalid(
            f"blob {blob.sha256} of its evidence is not a safetensors file ({error}); verify the artifact again"
        ) from error


def _source(manifest: "Manifest", files: Mapping[str, bytes]) -> ModelSource | None:
    """The model's own class can be built from its configuration."""
    if "config.json" not in files:
        return None
    config = json_of(files["config.json"])
    return ModelSource(manifest.model.id, manifest.model.revision, config, manifest.model.task, None)
