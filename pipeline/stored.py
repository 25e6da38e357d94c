"""An artifact read back: its programs, its weights, and the inputs and outputs that are stored with it. Every byte is
read against its digest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import BuildRefused, ModelSourceError
from pipeline.evidence import Step
from pipeline.models.source import ModelSource
from pipeline.verify import Arrays

if TYPE_CHECKING:
    from artifact_store import Published, Store
    from artifact_store.manifest import Executable, Manifest
    from emulator.compile import Program
    from emulator.types import TensorType


@dataclass(frozen=True)
class StoredProgram:
    executable: "Executable"
    program: "Program"
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
        """The generation of cores that it was built for."""
        from emulator.hardware import INSTANCES

        return next(one.core for one in INSTANCES.values() if one.compiler_target == self.manifest.target)

    def inputs(self, stored: StoredProgram) -> tuple[Arrays, str]:
        """What a program is fed when nobody gives anything else, and where that is from."""
        if stored.inputs is not None:
            return stored.inputs, "the stored inputs"
        from emulator.capture import example_inputs

        if stored.program.degree > 1:
            raise ModelSourceError(
                f"{self.manifest.model.id}: published without golden inputs, which a program of "
                f"{stored.program.degree} ranks needs; build it again without --no-verify"
            )
        random = example_inputs(stored.program.whole, self.source.config if self.source else {}, seed=0)
        return random, "random inputs: none are stored"


def read_artifact(published: "Published", store: "Store", step: Step) -> Stored:
    from emulator.types import DType, TensorType
    from pipeline.comparison import refuse_what_memory_cannot_hold

    manifest = published.manifest
    if manifest.backend != "emulator":
        raise BuildRefused(
            f"{manifest.model.id}: its programs are of backend {manifest.backend}, which the emulator cannot run; "
            "verify an artifact of --backend emulator"
        )
    kinds = {tensor.name: TensorType(tensor.shape, DType(tensor.dtype)) for tensor in manifest.weights}
    refuse_what_memory_cannot_hold(manifest.model.id, kinds)
    with step(f"read {len(manifest.blobs())} blobs"):
        weights = _weights(manifest, kinds, store)
        files = {file.path: store.read_blob(file.blob) for file in manifest.files}
        programs = tuple(_stored(executable, files, store) for executable in manifest.executables)
    return Stored(manifest, _source(manifest, files), weights, programs)


def _weights(manifest: "Manifest", kinds: Mapping[str, "TensorType"], store: "Store") -> Arrays:
    import numpy as np

    from artifact_store.weights import read_weights

    return {
        tensor.name: np.frombuffer(data, kinds[tensor.name].dtype.stored).reshape(tensor.shape)
        for tensor, data in read_weights(store.blobs, manifest.weights)
    }


def _stored(executable: "Executable", files: Mapping[str, bytes], store: "Store") -> StoredProgram:
    inputs, outputs = (_golden(files, executable, side) for side in ("inputs", "outputs"))
    return StoredProgram(executable, _program(executable, files, store), inputs, outputs)


def _program(executable: "Executable", files: Mapping[str, bytes], store: "Store") -> "Program":
    """The program as it was published; which piece of a tensor each rank has is a file beside it."""
    from emulator.compile import Program
    from emulator.graph import Graph
    from emulator.passes.shard import Piece

    graph = Graph.from_bytes(store.read_blob(executable.blob))
    if graph.key != executable.graph_key:
        raise ModelSourceError(
            f"{executable.name}: its graph has key {graph.key[:12]}, where the manifest says "
            f"{executable.graph_key[:12]}; build the model again"
        )
    if executable.tensor_parallel == 1:
        return Program(graph, graph, 1, {}, {})
    pieces = {
        side: {name: Piece(one["axis"], tuple(one["sizes"]), tuple(one["parts"])) for name, one in listed.items()}
        for side, listed in json.loads(files[f"ranks/{executable.name}.json"]).items()
    }
    return Program(graph, graph, executable.tensor_parallel, pieces["weights"], pieces["states"])


def _golden(files: Mapping[str, bytes], executable: "Executable", side: str) -> Arrays | None:
    from safetensors.numpy import load

    data = files.get(f"golden/{executable.name}/{side}.safetensors")
    return None if data is None else load(data)


def _source(manifest: "Manifest", files: Mapping[str, bytes]) -> ModelSource | None:
    """The model's own class can be built from its configuration."""
    if "config.json" not in files:
        return None
    config = json.loads(files["config.json"])
    return ModelSource(manifest.model.id, manifest.model.revision, config, manifest.model.task, None)
