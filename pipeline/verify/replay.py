"""Programs run on inputs: inference for `nxpipe run`, and stored artifacts compared on their stored inputs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import ModelSource, PretrainedModel
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError, PromptTooLong
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.util.text import did_you_mean
from nxpipe.pipeline.verify.cases import in_pytorch
from nxpipe.pipeline.verify.comparison import Batches, Case, Comparison, EmulatedRun, ReferenceRun, compare_case
from nxpipe.pipeline.verify.device import (
    DeviceOptions,
    FetchedProgram,
    artifact_on_devices,
    require_computed,
    require_device_programs,
)
from nxpipe.pipeline.verify.execution import ExecutionOptions, RunnableProgram, Runner
from nxpipe.pipeline.verify.prove import golden_evidence
from nxpipe.pipeline.verify.stored_artifact import StoredArtifact, StoredProgram, read_artifact

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.evidence import Compared
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import ModelOutputs
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.core.machine import Statistics
    from nxpipe.pipeline.models.prompts import Prompts


AS_STORED: Final = "as stored"  # the variant of an artifact's program
_PHASE_BY_INPUT: Final = {"row": "extend", "position": "decode"}  # the first that is among the inputs
_READ_TEXT: Final = {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class RunResult:
    """The outputs of one program."""

    model: str
    program: str
    input_source: str
    inputs: Arrays
    outputs: Arrays
    work: "Statistics | None"
    labels: Mapping[int, str] = field(default_factory=dict)  # of the classes, from the model's configuration


@dataclass(frozen=True)
class RunInputs:
    """The user's inputs: tensors by name, or lines of text. Without either, a program reads its default inputs. Missing
    states start at zero. `program` is the name of the only program to run."""

    tensors: Arrays | None = None
    texts: tuple[str, ...] = ()
    truncate: bool = False  # texts that are longer than the largest bucket
    program: str | None = None

    def select(self, shapes: Sequence[Shape], source: ModelSource | None) -> "SelectedInputs":
        """The programs to run: the named one; for texts the smallest bucket and batch that hold them; for tensors those
        of the phase that reads them; else all."""
        given = self.tensors or {}
        later = next((phase for name, phase in _PHASE_BY_INPUT.items() if name in given), None)
        suited = [shape for shape in shapes if (shape.phase == later if later else shape.begins_text)] or list(shapes)
        if self.program is not None:
            suited = [_named(self.program, shapes)]
        elif self.tensors is None and not self.texts:
            suited = list(shapes)
        if not self.texts or source is None:
            return SelectedInputs(suited, self)
        buckets = sorted({shape.sequence for shape in suited})
        prompts = self._prompts(source, buckets[-1])
        bucket = next((size for size in buckets if size >= prompts.longest), buckets[-1])
        fitting = sorted((shape for shape in suited if shape.sequence == bucket), key=lambda shape: shape.batch)
        return SelectedInputs(
            [next((shape for shape in fitting if shape.batch >= len(self.texts)), fitting[-1])], self, prompts
        )

    def _prompts(self, source: ModelSource, largest: int) -> "Prompts":
        from nxpipe.pipeline.models.prompts import Prompts

        try:
            return Prompts.read(self.texts, source, largest, truncate=self.truncate, title="Text")
        except PromptTooLong:
            raise
        except (ModelSourceError, InputInvalid) as error:
            raise type(error)(str(error).replace("--prompts: ", "--text: ")) from error


@dataclass(frozen=True)
class SelectedInputs:
    """The programs to run, and the user's inputs for each of them; their texts as token ids."""

    shapes: list[Shape]
    user_inputs: RunInputs
    prompts: "Prompts | None" = None

    def of(self, program: "CompiledGraph", default: tuple[Arrays, str], shape: Shape) -> "ProgramInputs":
        """The inputs of each run. The last text fills up the last batch."""
        tensors, texts = self.user_inputs.tensors, self.user_inputs.texts
        if tensors is None and not texts:
            return ProgramInputs([default[0]], default[1])
        blank = _blank_states(program, default[0])
        if tensors is not None:
            return ProgramInputs([blank | dict(tensors)], "the given inputs")
        reads = default[0].keys() - blank.keys()
        if reads != _READ_TEXT or self.prompts is None:
            raise BuildRefused(
                f"{shape.name} reads {', '.join(sorted(reads))}, not text alone; pass --input FILE, or generate "
                "text with nxpipe generate"
            )
        batches = [blank | batch for batch in self.prompts.batches(shape.batch, shape.sequence)]
        noun = "texts" if len(texts) > 1 else "text"
        return ProgramInputs(batches, self.prompts.description(noun, shape.sequence), len(texts))


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of one program, one run for each batch; their source; and the number of texts, if they are texts."""

    batches: Sequence[Arrays]
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
    shapes = sorted(spec.shapes)
    selected = user_inputs.select(shapes, spec.source)
    for shape in selected.shapes:
        with step(f"compile {shape.name}"):
            program = compile_shape(spec, shape)
        random = example_inputs(program.whole, spec.source.config, seed=0)
        default = (random | _blank_states(program, random), "random inputs")
        inputs = selected.of(program, default, shape)
        with step(f"load {shape.name}"):
            running = runner.load(program, tensors)
        yield replace(_run_program(name, shape.name, running, inputs, step), labels=_labels(spec.source))


def run_artifact(
    published: "Published", store: "Store", user_inputs: RunInputs, execution: ExecutionOptions, step: Step
) -> Iterator[RunResult]:
    """Run every program of an artifact, on its stored inputs unless the user passed others."""
    artifact = read_artifact(published, store, step)
    runner = Runner(execution, artifact.core)
    for stored, inputs in _programs_to_run(artifact, user_inputs):
        name = stored.executable.name
        with step(f"load {name}"):
            running = runner.load(stored.program, artifact.weights, stored.instructions)
        yield replace(_run_program(published.model_id, name, running, inputs, step), labels=_labels(artifact.source))


def run_on_devices(
    published: "Published",
    store: "Store",
    user_inputs: RunInputs,
    options: DeviceOptions,
    step: Step,
    watch: Watch,
) -> Iterator[RunResult]:
    """Run every program of an artifact on this machine's devices, on the inputs of `run_artifact`."""
    manifest = published.manifest
    require_device_programs(manifest)
    artifact = read_artifact(published, store, step, weights=False)
    inputs: dict[str, ProgramInputs] = {}
    for stored, given in _programs_to_run(artifact, user_inputs):
        inputs[stored.executable.name] = given
        for batch in given.batches:
            stored.program.require_inputs(batch)

    def batches(program: FetchedProgram) -> Sequence[Arrays]:
        return inputs[program.name].batches if program.name in inputs else ()

    with artifact_on_devices(manifest, store, batches, options, step, watch) as (_, runs):
        # All programs: the files are gone before the first result is shown, which may be where the user interrupts.
        answers = {
            program.name: [program.answers(number) for number in range(len(inputs[program.name].batches))]
            for program, _ in runs
        }
    for name, outputs in answers.items():
        yield replace(_result(published.model_id, name, inputs[name], outputs), labels=_labels(artifact.source))


def _shape(stored: StoredProgram) -> Shape:
    return Shape(stored.executable.phase, stored.executable.batch, stored.executable.sequence)


def _programs_to_run(artifact: StoredArtifact, user_inputs: RunInputs) -> list[tuple[StoredProgram, "ProgramInputs"]]:
    with artifact.source_with_tokenizer() if user_inputs.texts else nullcontext(artifact.source) as source:
        selected = user_inputs.select([_shape(stored) for stored in artifact.programs], source)
    programs = [stored for stored in artifact.programs if _shape(stored) in selected.shapes]
    return [(stored, selected.of(stored.program, artifact.inputs(stored), _shape(stored))) for stored in programs]


def _named(name: str, shapes: Sequence[Shape]) -> Shape:
    known = {shape.name: shape for shape in shapes}
    if name not in known:
        hint = did_you_mean(name, known) or f"; the programs are {', '.join(known)}"
        raise InputInvalid(f"--program: there is no program {name!r}{hint}")
    return known[name]


def _blank_states(program: "CompiledGraph", inputs: Arrays) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: 0 * array for name, array in inputs.items() if name in program.graph.outputs}


def _run_program(
    model: str, program: str, running: RunnableProgram, program_inputs: ProgramInputs, step: Step
) -> RunResult:
    with step(f"run {program}"), running.counted(program) as counters:
        answers = [counters.run(running.run, batch) for batch in program_inputs.batches]
    return _result(model, program, program_inputs, answers, running.work)


def _result(
    model: str, program: str, given: ProgramInputs, answers: Sequence[Arrays], work: "Statistics | None" = None
) -> RunResult:
    if not given.rows:
        return RunResult(model, program, given.description, given.batches[0], answers[0], work)
    inputs, outputs = _joined(given.batches, given.rows), _joined(answers, given.rows)
    return RunResult(model, program, given.description, inputs, outputs, work)


def _labels(source: ModelSource | None) -> dict[int, str]:
    """The names of classes, by their number."""
    names = source.config.get("id2label") if source else None
    if not isinstance(names, Mapping):
        return {}
    return {int(number): str(name) for number, name in names.items() if str(number).isdecimal()}


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
    runner = Runner(execution, artifact.core)
    for program in artifact.programs:
        cases = list(_cases(artifact, program, {AS_STORED: _stored_run(program, artifact.weights, runner)}))
        comparisons = [compare_case(case, step) for case in cases]
        yield from comparisons
        if kept is not None:
            kept.append((cases[0], comparisons[0]))


def compared_run(case: Case, comparison: Comparison, store: "Store") -> "Compared":
    """The comparison as evidence has it; inputs and outputs are stored."""
    from nxpipe.artifact_store.evidence import Compared
    from nxpipe.pipeline.verify.evidence import execution_environment, tensors_file

    ((variant, emulate),) = case.variants.items()
    (answer,), _ = emulate(case.inputs, None)  # the run that was compared
    (result,) = (result for result in comparison.emulated if result.variant == variant)
    return Compared(
        program=case.program,
        yardstick=comparison.reference,
        outputs=tuple(deviation.figures() for deviation in result.outputs),
        inputs=store.put_blob(tensors_file(case.inputs[0])),
        answers=store.put_blob(tensors_file(answer.outputs)),
        surroundings=execution_environment(),
    )


def compare_on_devices(
    published: "Published", store: "Store", options: DeviceOptions, step: Step, watch: Watch
) -> Iterator[Comparison]:
    """Compare every program of the artifact, run on this machine's devices, with the references of `compare_artifact`.

    A rank whose copy of a result differs from the first rank's is a variant of its own. VerificationFailed for a device
    that did not run a program; nothing is stored.
    """
    manifest = published.manifest
    golden_evidence(manifest, store)
    artifact = read_artifact(published, store, step, weights=find_spec("torch") is not None)
    stored = {program.executable.name: program for program in artifact.programs}
    inputs = {name: artifact.inputs(program)[0] for name, program in stored.items()}
    with artifact_on_devices(manifest, store, lambda program: [inputs[program.name]], options, step, watch) as (
        _,
        runs,
    ):
        variants = {program.name: _answers_of_ranks(program, stored[program.name]) for program, _ in runs}
    for name, program in stored.items():
        for case in _cases(artifact, program, variants[name]):
            yield compare_case(replace(case, work="compare"), step)


def _answers_of_ranks(program: FetchedProgram, stored: StoredProgram) -> dict[str, EmulatedRun]:
    """The answers of a device as variants of a case."""
    results = program.results()
    require_computed(program, results, stored.outputs or {}, stored.inputs or {})
    ranks = {AS_STORED: 0} | {f"rank {rank}": rank for rank in program.differing_ranks(results)}
    return {name: _given(program.whole(results, rank)) for name, rank in ranks.items()}


def _given(answers: Arrays) -> EmulatedRun:
    return lambda batches, layers: ([_answer(answers)], None)


def _cases(artifact: StoredArtifact, stored: StoredProgram, variants: Mapping[str, EmulatedRun]) -> Iterator[Case]:
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
    for name, reference in references.items():
        yield Case(stored.executable.name, input_source, [inputs], variants, {name: reference})


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
