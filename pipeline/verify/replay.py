"""A stored artifact put to the test: every blob read against its digest, every program run again.

The answers must be those that its evidence holds; and where PyTorch is installed, near to its
own. Both are held to [verify]: another machine's numpy may add in another order, which narrow types make visible.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.request import Shape, capture_request
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.verify.cases import in_pytorch
from nxpipe.pipeline.verify.comparison import Asked, Batches, Case, Comparison, Emulated, compare_case
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.runner import Execution, Runner
from nxpipe.pipeline.verify.stored import Stored, StoredProgram, read_artifact
from nxpipe.pipeline.verify.verify import USUAL_YARDSTICK, Arrays

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import Answer
    from nxpipe.emulator.core import Statistics


def compare_artifact(published: "Published", store: "Store", step: Step, execution: Execution) -> Iterator[Comparison]:
    """Every program of the artifact, held against PyTorch and the answers of its evidence."""
    artifact = read_artifact(published, store, step)
    for one in artifact.programs:
        yield from (compare_case(case, step) for case in _cases(artifact, one, execution))


def _cases(artifact: Stored, one: StoredProgram, execution: Execution) -> Iterator[Case]:
    """One a yardstick, so that neither can hide what the other shows; the program runs once for both."""
    references: dict[str, Asked] = {}
    source, outputs = artifact.source, one.outputs
    if source is not None and find_spec("torch") is not None:
        references[USUAL_YARDSTICK] = in_pytorch(_wanted(source, one), artifact.weights, "float32")
    if outputs is not None:
        references["the stored outputs"] = lambda _: [_answer(outputs)]
    if not references:
        why = "PyTorch is not installed here" if source else "its file is not stored"
        raise ModelSourceError(
            f"{artifact.manifest.model.id}: no evidence lies beside it, and {why}, so there is nothing to hold "
            "its answers against; build it again without --no-verify"
        )
    inputs, fed = artifact.inputs(one)
    emulated = {"as stored": _as_stored(one, artifact.weights, Runner(execution, artifact.core))}
    for name, reference in references.items():
        yield Case(one.executable.name, fed, [inputs], emulated, {name: reference})


def _as_stored(one: StoredProgram, weights: Arrays, runner: Runner) -> Emulated:
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


def _wanted(source: ModelSource, one: StoredProgram) -> "CaptureRequest":
    executable = one.executable
    wanted = capture_request(source, Shape(executable.phase, executable.batch, executable.sequence))
    if executable.phase != "prefill":
        return wanted
    return replace(wanted, capacity=one.program.graph.inputs["cache.0.key"].type.shape[2])
