"""Replay of a stored artifact: every blob is checked against its digest, every program runs again.

Outputs are compared with those of the evidence and, where PyTorch is installed, with PyTorch's own. Both comparisons
use the thresholds of [verify]: numpy of another machine may add in another order, which narrow types make visible.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.cases import in_pytorch
from nxpipe.pipeline.verify.comparison import Batches, Case, Comparison, EmulatedRun, ReferenceRun, compare_case
from nxpipe.pipeline.verify.execution import ExecutionOptions, Runner
from nxpipe.pipeline.verify.stored_artifact import StoredArtifact, StoredProgram, read_artifact

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import Answer
    from nxpipe.emulator.core.machine import Statistics


def compare_artifact(
    published: "Published", store: "Store", step: Step, execution: ExecutionOptions
) -> Iterator[Comparison]:
    """Every program of the artifact, compared with PyTorch and with the outputs in its evidence."""
    artifact = read_artifact(published, store, step)
    for one in artifact.programs:
        yield from (compare_case(case, step) for case in _cases(artifact, one, execution))


def _cases(artifact: StoredArtifact, one: StoredProgram, execution: ExecutionOptions) -> Iterator[Case]:
    """One case a reference, so that neither hides what the other shows; the program runs once for both."""
    references: dict[str, ReferenceRun] = {}
    source, outputs = artifact.source, one.outputs
    if source is not None and find_spec("torch") is not None:
        references[DEFAULT_REFERENCE] = in_pytorch(_capture_request(source, one), artifact.weights, "float32")
    if outputs is not None:
        references["the stored outputs"] = lambda _: [_answer(outputs)]
    if not references:
        why = "PyTorch is not installed here" if source else "its file is not stored"
        raise ModelSourceError(
            f"{artifact.manifest.model.id}: it has no evidence, and {why}, so there is no reference to compare "
            "with; build it again without --no-verify"
        )
    inputs, input_source = artifact.inputs(one)
    emulated = {"as stored": _as_stored(one, artifact.weights, Runner(execution, artifact.core))}
    for name, reference in references.items():
        yield Case(one.executable.name, input_source, [inputs], emulated, {name: reference})


def _as_stored(one: StoredProgram, weights: Arrays, runner: Runner) -> EmulatedRun:
    done: list[tuple[list[Answer], Statistics | None]] = []

    def emulate(batches: Batches, _: "Answer | None") -> tuple[list["Answer"], "Statistics | None"]:
        if not done:
            loaded = runner.load(one.program, weights, one.instructions)
            done.append(([_answer(loaded.run(batch)) for batch in batches], loaded.work))
        return done[0]

    return emulate


def _answer(outputs: Arrays) -> "Answer":
    from nxpipe.emulator.capture.request import Answer

    return Answer(outputs, {})


def _capture_request(source: PretrainedModel, one: StoredProgram) -> "CaptureRequest":
    executable = one.executable
    request = source.capture_request(Shape(executable.phase, executable.batch, executable.sequence))
    if executable.phase != "prefill":
        return request
    return replace(request, capacity=one.program.graph.inputs["cache.0.key"].type.shape[2])
