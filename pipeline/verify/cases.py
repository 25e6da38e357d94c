"""What `nxpipe verify` compares: the programs of a Hugging Face model, and a program that was saved in a file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from nxpipe.pipeline.models.depth import first_layers
from nxpipe.pipeline.models.prompts import Prompts
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.saved_request import SavedRequest
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError
from nxpipe.pipeline.verify.comparison import (
    Asked,
    Batches,
    Case,
    Comparison,
    Compiled,
    Tap,
    Trial,
    compare_case,
    on_emulator,
    refuse_what_memory_cannot_hold,
)
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.runner import Runner
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import Answer
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.passes import PassOptions
    from nxpipe.pipeline.models.weights import Tensors

Plan: TypeAlias = Iterable[tuple[str, str]]  # patterns of modules, and how each is divided

# What a model reads when it brings a tokenizer and nobody says what to read: everyday words, numbers, code, names.
_SAMPLES = (
    "The river rose in the night, and by morning the lower road was under water.",
    "Der Zug nach Basel faehrt heute um 17:42 Uhr von Gleis 9.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Ada Lovelace wrote notes on the Analytical Engine in 1843.",
)


def compare_model(request: BuildRequest, trial: Trial, step: Step) -> Iterator[Comparison]:
    """Every program of the request, in each mode."""
    from nxpipe.pipeline.verify.steps import compare_steps

    request = sliced(request, trial)
    request.check()
    for shape in sorted(request.shapes):
        tensors = tensors_of(request, shape)
        yield compare_case(_case(request, shape, tensors, trial, step), step, layers=trial.layers)
    if trial.steps:
        yield from compare_steps(request, trial, step)


def sliced(request: BuildRequest, trial: Trial) -> BuildRequest:
    if trial.slice_layers is None:
        return request
    source = request.source
    return replace(request, source=replace(source, config=first_layers(source.config, trial.slice_layers)))


def tensors_of(request: BuildRequest, shape: Shape) -> "Tensors":
    from nxpipe.emulator.capture import parameter_specs
    from nxpipe.pipeline.models.weights import Tensors

    tensors = Tensors(request.weights, parameter_specs(request.capture(shape)))
    refuse_what_memory_cannot_hold(request.source.id, tensors.kinds)
    return tensors


def ways(request: BuildRequest, graph: "Graph", trial: Trial, plan: Plan = ()) -> Mapping[str, Compiled]:
    """The mode asked for first, then those beside it, each as what a captured graph compiles to, for all ranks."""
    from nxpipe.emulator.compile import divided
    from nxpipe.emulator.passes import PassOptions, run_passes
    from nxpipe.emulator.passes.shard import DegreeImpossible

    def later(options: "PassOptions") -> Compiled:
        def compiled(tap: Tap) -> "Program":
            try:
                return divided(tap(run_passes(graph, replace(options, tensor_parallel=1))), options)
            except DegreeImpossible as error:
                raise request.without_degree(error.reason, error.degrees) from error

        return compiled

    said = (request.autocast_type, request.target.compiler_target, request.tensor_parallel, tuple(plan))
    return {mode: later(PassOptions(mode, *said)) for mode in dict.fromkeys((request.autocast, *trial.modes))}


def runner(request: BuildRequest, trial: Trial) -> Runner:
    return Runner(trial.execution, request.target.core)


def published(request: BuildRequest, shape: Shape) -> Plan:
    """The authors' own division among ranks, which a build follows too."""
    if request.tensor_parallel == 1:
        return ()
    from nxpipe.emulator.capture.model import published_plan

    return published_plan(request.capture(shape))


def _case(request: BuildRequest, shape: Shape, tensors: "Tensors", trial: Trial, step: Step) -> Case:
    from nxpipe.emulator.capture import capture
    from nxpipe.emulator.given import require_inputs

    with step(f"capture {shape.name}"):
        graph = capture(request.capture(shape))
    inputs, fed = _inputs(request, shape, graph, trial)
    for batch in inputs:
        require_inputs(graph, batch)
    compiled = ways(request, graph, trial, published(request, shape))
    return Case(
        program=shape.name,
        fed=fed,
        inputs=inputs,
        ways={mode: on_emulator(one, tensors, runner(request, trial)) for mode, one in compiled.items()},
        references={
            "PyTorch fp32": in_pytorch(request.capture(shape), tensors, "float32"),
            "PyTorch bf16": in_pytorch(request.capture(shape), tensors, "bfloat16"),
        },
    )


def in_pytorch(wanted: "CaptureRequest", tensors: Arrays, dtype: str) -> Asked:
    def ask(batches: Batches) -> list["Answer"]:
        from nxpipe.emulator.capture.reference import Reference

        reference = Reference(wanted, tensors, dtype)
        return [reference.answer(batch) for batch in batches]

    return ask


def _inputs(request: BuildRequest, shape: Shape, graph: "Graph", trial: Trial) -> tuple[Batches, str]:
    """Text where the program reads text alone and there is any; else random ids from a fixed seed. And which."""
    from nxpipe.emulator.capture import example_inputs

    random = example_inputs(graph, request.source.config, seed=0)
    state = {name: 0 * array for name, array in random.items() if name in graph.outputs}
    if random.keys() - state.keys() != {"input_ids", "attention_mask"}:
        if trial.prompts:
            raise BuildRefused(
                f"{request.source.id} {shape.name}: reads {', '.join(random.keys() - state.keys())}, so no prompt "
                "alone can feed it; leave out --prompts, or pass --phases prefill"
            )
        return [random], "random inputs"
    texts, fed = read_texts(request, shape.batch, (shape.sequence, longest(request)), trial)
    return ([{**text, **state} for text in texts], fed) if texts else ([random], fed)


def longest(request: BuildRequest) -> int:
    """The most tokens that a program of the request reads."""
    return max(shape.sequence for shape in request.shapes)


def read_texts(request: BuildRequest, batch: int, room: tuple[int, int], trial: Trial) -> tuple[Batches, str]:
    """The prompts given, else samples if there is a tokenizer to read them with; none where random ids must do.

    `room` is that of the program, and that of the longest one beside it.
    """
    sequence, largest = room
    if trial.prompts:
        prompts = Prompts.read(trial.prompts, request.source, largest, truncate=trial.truncate)
        texts = prompts.batches(batch, sequence)
        return texts, prompts.words("prompts" if texts else "prompts, so random token ids", sequence)
    if request.source.folder is None:
        return [], "random token ids: there is no tokenizer beside the model"
    try:
        samples = Prompts.read(_SAMPLES, request.source, largest, truncate=True)
    except (ModelSourceError, InputInvalid) as error:
        reason = str(error).removeprefix("--prompts: ").partition(";")[0]
        return [], f"random token ids: {reason}"
    return samples.batches(batch, sequence), samples.words("sample texts, by the model's own tokenizer", sequence)


def compare_file(request: SavedRequest, trial: Trial, step: Step) -> Comparison:
    """A saved program, held against what PyTorch or ONNX's reference evaluator computes with the same file."""
    from nxpipe.emulator.capture import example_inputs
    from nxpipe.emulator.capture.request import Answer

    program, (shape,) = request.program, request.shapes
    request.check()
    if trial.layers or trial.slice_layers or trial.steps or trial.prompts:
        raise BuildRefused(
            f"{program.name}: a saved program is compared as a whole; leave out --layers, --slice-layers, --steps "
            "and --prompts"
        )
    program.require_data()
    with step(f"read {program.name}"):
        graph, tensors = request.graph, request.tensors()
    refuse_what_memory_cannot_hold(program.name, tensors.kinds)
    inputs = [example_inputs(graph, {}, seed=0)]

    def ask(batches: Batches) -> list[Answer]:
        return [Answer(request.truth(shape, tensors, batch), {}) for batch in batches]

    who = runner(request, trial)
    emulated = {mode: on_emulator(one, tensors, who) for mode, one in ways(request, graph, trial).items()}
    return compare_case(Case(shape.name, "random inputs", inputs, emulated, {request.yardstick: ask}), step)
