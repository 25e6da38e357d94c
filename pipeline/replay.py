"""A stored artifact put to the test: every blob read against its digest, every program run again.

The answers must be those that the artifact carries as its golden outputs; and where PyTorch is installed, near to its
own. Both are held to [verify]: another machine's numpy may add in another order, which narrow types make visible.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.cases import in_pytorch
from pipeline.comparison import (
    Asked,
    Batches,
    Case,
    Comparison,
    Emulated,
    compare_case,
    refuse_what_memory_cannot_hold,
)
from pipeline.errors import ModelSourceError
from pipeline.evidence import Step
from pipeline.models.source import ModelSource
from pipeline.request import Shape, capture_request
from pipeline.verify import USUAL_YARDSTICK, Arrays

if TYPE_CHECKING:
    from artifact_store import Published, Store
    from artifact_store.manifest import Executable, Manifest
    from emulator.capture import CaptureRequest
    from emulator.capture.answer import Answer
    from emulator.compile import Program
    from emulator.types import TensorType


def compare_artifact(published: "Published", store: "Store", step: Step) -> Iterator[Comparison]:
    """Every program of the artifact, held against PyTorch and its golden outputs."""
    from emulator.types import DType, TensorType

    manifest = published.manifest
    kinds = {tensor.name: TensorType(tensor.shape, DType(tensor.dtype)) for tensor in manifest.weights}
    refuse_what_memory_cannot_hold(manifest.model.id, kinds)
    with step(f"read {len(manifest.blobs())} blobs"):
        weights = _weights(manifest, kinds, store)
        files = {file.path: store.read_blob(file.blob) for file in manifest.files}
        programs = [_program(executable, files, store) for executable in manifest.executables]
    for executable, program in zip(manifest.executables, programs, strict=True):
        yield from (compare_case(case, step) for case in _cases(manifest, program, executable, files, weights))


def _weights(manifest: "Manifest", kinds: Mapping[str, "TensorType"], store: "Store") -> Arrays:
    import numpy as np

    from artifact_store.weights import read_weights

    return {
        tensor.name: np.frombuffer(data, kinds[tensor.name].dtype.stored).reshape(tensor.shape)
        for tensor, data in read_weights(store.blobs, manifest.weights)
    }


def _cases(
    manifest: "Manifest", program: "Program", executable: "Executable", files: Mapping[str, bytes], weights: Arrays
) -> Iterator[Case]:
    """One a yardstick, so that neither can hide what the other shows; the program runs once for both."""
    inputs, outputs = (_golden(files, executable, side) for side in ("inputs", "outputs"))
    references: dict[str, Asked] = {}
    source = _source(manifest, files)
    if source is not None and find_spec("torch") is not None:
        references[USUAL_YARDSTICK] = in_pytorch(_wanted(source, executable, program), weights, "float32")
    if outputs is not None:
        references["the stored outputs"] = lambda _: [_answer(outputs)]
    if not references:
        why = "PyTorch is not installed here" if source else "its file is not stored"
        raise ModelSourceError(
            f"{manifest.model.id}: published without golden outputs, and {why}, so there is nothing to hold its "
            "answers against; build it again without --no-verify"
        )
    fed = "the stored inputs" if inputs is not None else "random inputs: none are stored"
    batch = inputs if inputs is not None else _random(manifest, source, program)
    emulated = {"as stored": _as_stored(program, weights)}
    for name, reference in references.items():
        yield Case(executable.name, fed, [batch], emulated, {name: reference})


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


def _as_stored(program: "Program", weights: Arrays) -> Emulated:
    answers: list[Answer] = []

    def emulate(batches: Batches, _: "Answer | None") -> list["Answer"]:
        if not answers:
            from emulator.ranks import LoadedProgram

            loaded = LoadedProgram(program, weights)
            answers.extend(_answer(loaded.run(batch)) for batch in batches)
        return answers

    return emulate


def _answer(outputs: Arrays) -> "Answer":
    from emulator.capture.answer import Answer

    return Answer(outputs, {})


def _source(manifest: "Manifest", files: Mapping[str, bytes]) -> ModelSource | None:
    """The model's own class can be built from its configuration; a program that came in a file has none."""
    if "config.json" not in files:
        return None
    config = json.loads(files["config.json"])
    return ModelSource(manifest.model.id, manifest.model.revision, config, manifest.model.task, None)


def _wanted(source: ModelSource, executable: "Executable", program: "Program") -> "CaptureRequest":
    wanted = capture_request(source, Shape(executable.phase, executable.batch, executable.sequence))
    if executable.phase != "prefill":
        return wanted
    return replace(wanted, capacity=program.graph.inputs["cache.0.key"].type.shape[2])


def _golden(files: Mapping[str, bytes], executable: "Executable", side: str) -> Arrays | None:
    from safetensors.numpy import load

    data = files.get(f"golden/{executable.name}/{side}.safetensors")
    return None if data is None else load(data)


def _random(manifest: "Manifest", source: ModelSource | None, program: "Program") -> Arrays:
    from emulator.capture import example_inputs

    if program.degree > 1:
        raise ModelSourceError(
            f"{manifest.model.id}: published without golden inputs, which a program of {program.degree} ranks needs; "
            "build it again without --no-verify"
        )
    return example_inputs(program.whole, source.config if source else {}, seed=0)
