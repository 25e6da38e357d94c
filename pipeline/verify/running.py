"""What `nxpipe run` does: programs of a model, of a file or of an artifact, run on what the user feeds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.runner import Execution, Runner, Running
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Published, Store
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.core import Statistics

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
    truncate: bool = False  # texts that are longer than the largest bucket

    def to(
        self,
        program: "CompiledGraph",
        usual: tuple[Arrays, str],
        source: ModelSource | None,
        shape: Shape,
        largest: int,
    ) -> "Feed":
        """The inputs of each run. A batch of texts is filled up with its last one."""
        if self.tensors is None and not self.texts:
            return Feed([usual[0]], usual[1])
        blank = _blank_states(program, usual[0])
        if self.tensors is not None:
            return Feed([blank | dict(self.tensors)], "the given inputs")
        reads = usual[0].keys() - blank.keys()
        if reads != _READ_TEXT or source is None:
            raise BuildRefused(f"{shape.name} reads {', '.join(sorted(reads))}, not text alone; pass --input FILE")
        from nxpipe.pipeline.models.prompts import Prompts

        try:
            prompts = Prompts.read(self.texts, source, largest, truncate=self.truncate, word="Text")
        except (ModelSourceError, InputInvalid) as error:
            raise type(error)(str(error).replace("--prompts: ", "--text: ")) from error
        batches = prompts.batches(shape.batch, shape.sequence)
        rows, what = len(prompts.of_room(shape.sequence)), "texts" if len(self.texts) > 1 else "text"
        return Feed([blank | batch for batch in batches], prompts.words(what, shape.sequence), rows)


@dataclass(frozen=True)
class Feed:
    """What one program is fed: a run for each batch, where it is from, and of texts how many rows they are."""

    batches: list[Arrays]
    words: str
    rows: int = 0


def run_model(request: BuildRequest, fed: Fed, execution: Execution, step: Step) -> Iterator[Ran]:
    """Every program of a request, compiled as a build compiles it."""
    from nxpipe.emulator.capture import example_inputs
    from nxpipe.pipeline.compile.emulator import compiled
    from nxpipe.pipeline.verify.comparison import refuse_what_memory_cannot_hold

    request.check()
    name, runner = request.source.id, Runner(execution, request.target.core)
    tensors = request.tensors()
    refuse_what_memory_cannot_hold(name, tensors.kinds)
    largest = max(shape.sequence for shape in request.shapes)
    for shape in sorted(request.shapes):
        program = compiled(request, shape, step)
        random = example_inputs(program.whole, request.source.config, seed=0)
        usual = (random | _blank_states(program, random), "random inputs")
        feed = fed.to(program, usual, request.source, shape, largest)
        with step(f"load {shape.name}"):
            running = runner.load(program, tensors)
        yield from _ran(name, shape.name, running, feed, step)


def run_artifact(published: "Published", store: "Store", fed: Fed, execution: Execution, step: Step) -> Iterator[Ran]:
    """Every program of an artifact, on its stored inputs if nothing else is given."""
    from nxpipe.pipeline.verify.stored import read_artifact

    artifact = read_artifact(published, store, step)
    runner = Runner(execution, artifact.core)
    largest = max(one.executable.sequence for one in artifact.programs)
    for one in artifact.programs:
        made = one.executable
        feed = fed.to(
            one.program, artifact.inputs(one), artifact.source, Shape(made.phase, made.batch, made.sequence), largest
        )
        with step(f"load {made.name}"):
            running = runner.load(one.program, artifact.weights, one.instructions)
        yield from _ran(published.model_id, made.name, running, feed, step)


def _blank_states(program: "CompiledGraph", inputs: Arrays) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: 0 * array for name, array in inputs.items() if name in program.graph.outputs}


def _ran(model: str, program: str, running: Running, feed: Feed, step: Step) -> Iterator[Ran]:
    """Nothing of a program that is shorter than every text, where there is a longer one."""
    if not feed.batches:
        with step(f"{program} is left out: {feed.words}"):
            return
    with step(f"run {program}"):
        answers = [running.run(batch) for batch in feed.batches]
    if not feed.rows:
        yield Ran(model, program, feed.words, feed.batches[0], answers[0], running.work)
    else:
        inputs, outputs = _joined(feed.batches, feed.rows), _joined(answers, feed.rows)
        yield Ran(model, program, feed.words, inputs, outputs, running.work)


def _joined(batches: Sequence[Arrays], rows: int) -> Arrays:
    """All batches, without what the last one was filled up with."""
    import numpy as np

    return {name: np.concatenate([batch[name] for batch in batches])[:rows] for name in batches[0]}
