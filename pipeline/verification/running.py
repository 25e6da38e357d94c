"""What `nxpipe run` does: programs of a model, of a file or of an artifact, run on what the user feeds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import BuildRefused, ModelSourceError
from pipeline.models.source import ModelSource
from pipeline.request import BuildRequest, Shape
from pipeline.verification.evidence import Step
from pipeline.verification.runner import Execution, Runner, Running
from pipeline.verification.verify import Arrays

if TYPE_CHECKING:
    import numpy as np

    from artifact_store import Published, Store
    from emulator.compile import Program
    from emulator.core import Statistics

_READ_TEXT = {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class Ran:
    """What one program answered."""

    model: str
    program: str
    fed: str  # in words: where the inputs come from
    inputs: Arrays
    outputs: Arrays
    work: "Statistics | None"


@dataclass(frozen=True)
class Fed:
    """What the user gives: tensors by name, or lines of text; where it is neither, a program's usual inputs are read.
    States that are not given start at zero."""

    tensors: Arrays | None = None
    texts: tuple[str, ...] = ()

    def to(self, program: "Program", usual: Arrays, source: ModelSource | None, shape: Shape) -> list[Arrays]:
        """The inputs of each run. A batch of texts is filled up with its last one."""
        if self.tensors is None and not self.texts:
            return [usual]
        blank = _blank_states(program, usual)
        if self.tensors is not None:
            return [blank | dict(self.tensors)]
        reads = usual.keys() - blank.keys()
        if reads != _READ_TEXT or source is None:
            raise BuildRefused(f"{shape.name} reads {', '.join(sorted(reads))}, not text alone; pass --input FILE")
        from pipeline.models.prompts import batches_of

        try:
            batches = batches_of(self.texts, source, shape.batch, shape.sequence)
        except ModelSourceError as error:
            raise ModelSourceError(f"--text: {str(error).removeprefix('--prompts: ')}") from error
        return [blank | batch for batch in batches]

    def words(self, usual: str) -> str:
        if self.texts:
            return f"{len(self.texts)} texts" if len(self.texts) > 1 else "one text"
        return usual if self.tensors is None else "the given inputs"


def run_model(request: BuildRequest, fed: Fed, execution: Execution, step: Step) -> Iterator[Ran]:
    """Every program of a request, compiled as a build compiles it."""
    from emulator.capture import example_inputs
    from pipeline.backends.emulator import compiled
    from pipeline.verification.comparison import refuse_what_memory_cannot_hold

    request.check()
    name, runner = request.source.id, Runner(execution, request.target.core)
    tensors = request.tensors()
    refuse_what_memory_cannot_hold(name, tensors.kinds)
    for shape in sorted(request.shapes):
        program = compiled(request, shape, step)
        random = example_inputs(program.whole, request.source.config, seed=0)
        batches = fed.to(program, random | _blank_states(program, random), request.source, shape)
        with step(f"load {shape.name}"):
            running = runner.load(program, tensors)
        yield _ran(name, shape.name, running, batches, fed.words("random inputs"), len(fed.texts), step)


def run_artifact(published: "Published", store: "Store", fed: Fed, execution: Execution, step: Step) -> Iterator[Ran]:
    """Every program of an artifact, on its stored inputs if nothing else is given."""
    from pipeline.verification.stored import read_artifact

    artifact = read_artifact(published, store, step)
    runner = Runner(execution, artifact.core)
    for one in artifact.programs:
        made = one.executable
        usual, words = artifact.inputs(one)
        batches = fed.to(one.program, usual, artifact.source, Shape(made.phase, made.batch, made.sequence))
        with step(f"load {made.name}"):
            running = runner.load(one.program, artifact.weights, one.instructions)
        yield _ran(published.model_id, made.name, running, batches, fed.words(words), len(fed.texts), step)


def _blank_states(program: "Program", inputs: Arrays) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: 0 * array for name, array in inputs.items() if name in program.graph.outputs}


def _ran(model: str, program: str, running: Running, batches: Sequence[Arrays], fed: str, rows: int, step: Step) -> Ran:
    with step(f"run {program}"):
        answers = [running.run(batch) for batch in batches]
    if not rows:
        return Ran(model, program, fed, batches[0], answers[0], running.work)
    return Ran(model, program, fed, _joined(batches, rows), _joined(answers, rows), running.work)


def _joined(batches: Sequence[Arrays], rows: int) -> Arrays:
    """All batches, without what the last one was filled up with."""
    import numpy as np

    return {name: np.concatenate([batch[name] for batch in batches])[:rows] for name in batches[0]}
