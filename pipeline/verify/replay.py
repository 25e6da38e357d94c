"""Programs run on inputs: inference for `nxpipe run`, and stored artifacts compared on their stored inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import ModelSource, PretrainedModel
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE, Deviation
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
    from nxpipe.artifact_store.evidence import Compared
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
    """The user's inputs: tensors by name, or lines of text. Without either, a program reads its default inputs. Missing
    states start at zero."""

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
        """The inputs of each run. The last text fills up the last batch."""
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
        rows, noun = len(prompts.rows_for(shape.sequence)), "texts" if len(self.texts) > 1 else "text"
        return ProgramInputs([blank | batch for batch in batches], prompts.description(noun, shape.sequence), rows)


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of one program, one run for each batch; their source; and the number of texts, if they are texts."""

    batches: list[Arrays]
    description: str
    rows: int = 0


def run_model(spec: BuildSpec, user_inputs: RunInputs, execution: ExecutionOptions, step: Step) -> Iterator[RunResult]:
    """Run every program of a specification, compiled as a build compiles it."""
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
        inputs = user_inputs.to(program, default, spec.source, shape, largest)
        with step(f"load {shape.name}"):
            running = runner.load(program, tensors)
        yield from _run_program(name, shape.name, running, inputs, step)


def run_artifact(
    published: "Published", store: "Store", user_inputs: RunInputs, execution: ExecutionOptions, step: Step
) -> Iterator[RunResult]:
    """Run every program of an artifact, on its stored inputs unless the user passed others."""
    artifact = read_artifact(published, store, step)
    runner = Runner(execution, artifact.core)
    largest = max(stored_program.executable.sequence for stored_program in artifact.programs)
    for stored_program in artifact.programs:
        stored = stored_program.executable
        inputs = user_inputs.to(
            stored_program.program,
            artifact.inputs(stored_program),
            artifact.source,
            Shape(stored.phase, stored.batch, stored.sequence),
            largest,
        )
        with step(f"load {stored.name}"):
            running = runner.load(stored_program.program, artifact.weights, stored_program.instructions)
        yield from _run_program(published.model_id, stored.name, running, inputs, step)


def _blank_states(program: "CompiledGraph", inputs: Arrays) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: 0 * array for name, array in inputs.items() if name in program.graph.outputs}


def _run_program(
    model: str, program: str, running: RunnableProgram, program_inputs: ProgramInputs, step: Step
) -> Iterator[RunResult]:
    """Run one program. No result if every text is longer than its bucket and another program has a longer one."""
    if not program_inputs.batches:
        with step(f"skip {program}: {program_inputs.description}"):
            return
    with step(f"run {program}"):
        answers = [running.run(batch) for batch in program_inputs.batches]
    if not program_inputs.rows:
        yield RunResult(model, program, program_inputs.description, program_inputs.batches[0], answers[0], running.work)
    else:
        inputs, outputs = _joined(program_inputs.batches, program_inputs.rows), _joined(answers, program_inputs.rows)
        yield RunResult(model, program, program_inputs.description, inputs, outputs, running.work)


def _joined(batches: Sequence[Arrays], rows: int) -> Arrays:
    """All batches as one, without the rows that fill up the last one."""
    import numpy as np

    return {name: np.concatenate([batch[name] for batch in batches])[:rows] for name in batches[0]}


def compare_artifact(
    published: "Published",
    store: "Store",
    step: Step,
    execution: ExecutionOptions,
    kept: "list[tuple[Case, Comparison]] | None" = None,
) -> Iterator[Comparison]:
    """Compare every program of the artifact with PyTorch and with the outputs in its evidence.

    `kept` receives each program's case for the first of them.
    """
    artifact = read_artifact(published, store, step)
    for program in artifact.programs:
        cases = list(_cases(artifact, program, execution))
        comparisons = [compare_case(case, step) for case in cases]
        yield from comparisons
        if kept is not None:
            kept.append((cases[0], comparisons[0]))


def compared_run(case: Case, comparison: Comparison, store: "Store") -> "Compared":
    """The comparison as evidence has it; inputs and outputs are stored. Figures other than KL divergence are finite."""
    from nxpipe.artifact_store.evidence import Compared, Figures
    from nxpipe.pipeline.verify.evidence import execution_environment, tensors_file

    ((variant, emulate),) = case.variants.items()
    (answer,), _ = emulate(case.inputs, None)  # the run that was compared
    (result,) = (result for result in comparison.emulated if result.variant == variant)
    return Compared(
        program=case.program,
        yardstick=comparison.reference,
        outputs=tuple(Figures(**asdict(_without_nan(deviation))) for deviation in result.outputs),
        inputs=store.put_blob(tensors_file(case.inputs[0])),
        answers=store.put_blob(tensors_file(answer.outputs)),
        surroundings=execution_environment(),
    )


def _without_nan(deviation: Deviation) -> Deviation:
    """Without a divergence that is NaN, which JSON lacks; it may be, if no threshold limits it."""
    return replace(deviation, kl=None) if deviation.kl is not None and not isfinite(deviation.kl) else deviation


def _cases(artifact: StoredArtifact, stored: StoredProgram, execution: ExecutionOptions) -> Iterator[Case]:
    """One case for each reference, so that neither masks a deviation from the other; the program runs once for both."""
    references: dict[str, ReferenceRun] = {}
    source, outputs = artifact.source, stored.outputs
    if source is not None and find_spec("torch") is not None:
        references[DEFAULT_REFERENCE] = in_pytorch(_capture_request(source, stored), artifact.weights, "float32")
    if outputs is not None:
        references["the stored outputs"] = lambda _: [_answer(outputs)]
    if not references:
        reason = "PyTorch is not installed here" if source else "its file is not stored"
        raise ModelSourceError(
            f"{artifact.manifest.model.id}: it has no evidence, and {reason}, so there is no reference to compare "
            "with; build it again without --no-verify"
        )
    inputs, input_source = artifact.inputs(stored)
    emulated = {"as stored": _stored_run(stored, artifact.weights, Runner(execution, artifact.core))}
    for name, reference in references.items():
        yield Case(stored.executable.name, input_source, [inputs], emulated, {name: reference})


def _stored_run(stored: StoredProgram, weights: Arrays, runner: Runner) -> EmulatedRun:
    results: list[tuple[list[ModelOutputs], Statistics | None]] = []

    def emulate(batches: Batches, _: "ModelOutputs | None") -> tuple[list["ModelOutputs"], "Statistics | None"]:
        if not results:
            loaded = runner.load(stored.program, weights, stored.instructions)
            results.append(([_answer(loaded.run(batch)) for batch in batches], loaded.work))
        return results[0]

    return emulate


def _answer(outputs: Arrays) -> "ModelOutputs":
    from nxpipe.emulator.capture.request import ModelOutputs

    return ModelOutputs(outputs, {})


def _capture_request(source: PretrainedModel, stored: StoredProgram) -> "CaptureRequest":
    executable = stored.executable
    request = source.capture_request(Shape(executable.phase, executable.batch, executable.sequence))
    if executable.phase != "prefill":
        return request
    return replace(request, capacity=stored.program.graph.inputs["cache.0.key"].type.shape[2])
