"""Programs run on inputs: inference for `nxpipe run`, and stored artifacts compared again on their stored inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import ModelSource, PretrainedModel
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.cases import in_pytorch
from nxpipe.pipeline.verify.comparison import Batches, Case, Comparison, EmulatedRun, ReferenceRun, compare_case
from nxpipe.pipeline.verify.execution import ExecutionOptions, RunnableProgram, Runner
from nxpipe.pipeline.verify.stored_artifact import StoredArtifact, StoredProgram, read_artifact

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Published, Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import ModelOutputs
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.core.machine import Statistics


_READ_TEXT = {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class RunResult:
    """The outputs of one program."""

    model: str
    program: str
    input_source: str
    inputs: Arrays
    outputs: Arrays
    work: "Statistics | None"


@dataclass(frozen=True)
class RunInputs:
    """The user's inputs: tensors by name, or lines of text. Without either, a program reads its default inputs. States
    that are not given start at zero."""

    tensors: Arrays | None = None
    texts: tuple[str, ...] = ()
    truncate: bool = False  # texts that are longer than the largest bucket

    def to(
        self,
        program: "CompiledGraph",
        default: tuple[Arrays, str],
        source: ModelSource | None,
        shape: Shape,
        largest: int,
    ) -> "ProgramInputs":
        """The inputs of each run. A batch of texts is filled up with its last one."""
        if self.tensors is None and not self.texts:
            return ProgramInputs([default[0]], default[1])
        blank = _blank_states(program, default[0])
        if self.tensors is not None:
            return ProgramInputs([blank | dict(self.tensors)], "the given inputs")
        reads = default[0].keys() - blank.keys()
        if reads != _READ_TEXT or source is None:
            raise BuildRefused(f"{shape.name} reads {', '.join(sorted(reads))}, not text alone; pass --input FILE")
        from nxpipe.pipeline.models.prompts import Prompts

        try:
            prompts = Prompts.read(self.texts, source, largest, truncate=self.truncate, title="Text")
        except (ModelSourceError, InputInvalid) as error:
            raise type(error)(str(error).replace("--prompts: ", "--text: ")) from error
        batches = prompts.batches(shape.batch, shape.sequence)
        rows, what = len(prompts.rows_for(shape.sequence)), "texts" if len(self.texts) > 1 else "text"
        return ProgramInputs([blank | batch for batch in batches], prompts.description(what, shape.sequence), rows)


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of one program: one run for each batch, their source, and the number of texts, if they are texts."""

    batches: list[Arrays]
    description: str
    rows: int = 0


def run_model(spec: BuildSpec, given: RunInputs, execution: ExecutionOptions, step: Step) -> Iterator[RunResult]:
    """Every program of a specification, compiled as a build compiles it."""
    from nxpipe.emulator.capture import example_inputs
    from nxpipe.pipeline.compile.frontend import compile_shape
    from nxpipe.pipeline.verify.comparison import require_memory

    spec.check()
    name, runner = spec.source.id, Runner(execution, spec.target.core)
    tensors = spec.tensors()
    require_memory(name, tensors.kinds)
    largest = max(shape.sequence for shape in spec.shapes)
    for shape in sorted(spec.shapes):
        with step(f"compile {shape.name}"):
            program = compile_shape(spec, shape)
        random = example_inputs(program.whole, spec.source.config, seed=0)
        default = (random | _blank_states(program, random), "random inputs")
        feed = given.to(program, default, spec.source, shape, largest)
        with step(f"load {shape.name}"):
            running = runner.load(program, tensors)
        yield from _ran(name, shape.name, running, feed, step)


def run_artifact(
    published: "Published", store: "Store", given: RunInputs, execution: ExecutionOptions, step: Step
) -> Iterator[RunResult]:
    """Every program of an artifact, on its stored inputs unless others are given."""
    artifact = read_artifact(published, store, step)
    runner = Runner(execution, artifact.core)
    largest = max(one.executable.sequence for one in artifact.programs)
    for one in artifact.programs:
        stored = one.executable
        feed = given.to(
            one.program,
            artifact.inputs(one),
            artifact.source,
            Shape(stored.phase, stored.batch, stored.sequence),
            largest,
        )
        with step(f"load {stored.name}"):
            running = runner.load(one.program, artifact.weights, one.instructions)
        yield from _ran(published.model_id, stored.name, running, feed, step)


def _blank_states(program: "CompiledGraph", inputs: Arrays) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: 0 * array for name, array in inputs.items() if name in program.graph.outputs}


def _ran(model: str, program: str, running: RunnableProgram, feed: ProgramInputs, step: Step) -> Iterator[RunResult]:
    """The result of one program; none if every text is longer than it and another program is long enough."""
    if not feed.batches:
        with step(f"skip {program}: {feed.description}"):
            return
    with step(f"run {program}"):
        answers = [running.run(batch) for batch in feed.batches]
    if not feed.rows:
        yield RunResult(model, program, feed.description, feed.batches[0], answers[0], running.work)
    else:
        inputs, outputs = _joined(feed.batches, feed.rows), _joined(answers, feed.rows)
        yield RunResult(model, program, feed.description, inputs, outputs, running.work)


def _joined(batches: Sequence[Arrays], rows: int) -> Arrays:
    """All batches as one, without the rows that fill up the last."""
    import numpy as np

    return {name: np.concatenate([batch[name] for batch in batches])[:rows] for name in batches[0]}


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
    done: list[tuple[list[ModelOutputs], Statistics | None]] = []

    def emulate(batches: Batches, _: "ModelOutputs | None") -> tuple[list["ModelOutputs"], "Statistics | None"]:
        if not done:
            loaded = runner.load(one.program, weights, one.instructions)
            done.append(([_answer(loaded.run(batch)) for batch in batches], loaded.work))
        return done[0]

    return emulate


def _answer(outputs: Arrays) -> "ModelOutputs":
    from nxpipe.emulator.capture.request import ModelOutputs

    return ModelOutputs(outputs, {})


def _capture_request(source: PretrainedModel, one: StoredProgram) -> "CaptureRequest":
    executable = one.executable
    request = source.capture_request(Shape(executable.phase, executable.batch, executable.sequence))
    if executable.phase != "prefill":
        return request
    return replace(request, capacity=one.program.graph.inputs["cache.0.key"].type.shape[2])
