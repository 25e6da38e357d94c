"""Comparison cases of `nxpipe verify`: the programs of a build specification, their inputs and their references."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.compile.frontend import CapturedShape, capture_shape, compile_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import first_layers
from nxpipe.pipeline.models.prompts import Prompts
from nxpipe.pipeline.models.shapes import SAVED_PROGRAM, Shape
from nxpipe.pipeline.models.source import DEFAULT_REFERENCE, PretrainedModel
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.comparison import (
    Batches,
    Case,
    Comparison,
    CompileTapped,
    ReferenceRun,
    VerifyOptions,
    compare_case,
    on_emulator,
    require_memory,
)
from nxpipe.pipeline.verify.execution import Runner

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.answer import Answer
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.pipeline.models.weights import Tensors

# Inputs of a model with a tokenizer, where no prompts are given: everyday words, numbers, code, names.
_SAMPLES: Final = (
    "The river rose in the night, and by morning the lower road was under water.",
    "Der Zug nach Basel faehrt heute um 17:42 Uhr von Gleis 9.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Ada Lovelace wrote notes on the Analytical Engine in 1843.",
)


def compare_model(spec: BuildSpec, options: VerifyOptions, step: Step) -> Iterator[Comparison]:
    """Every program of the specification, in each autocast mode."""
    from nxpipe.pipeline.verify.steps import compare_steps

    spec = _sliced(spec, options)
    spec.check()
    for shape in sorted(spec.shapes):
        tensors = tensors_of(spec, shape)
        yield compare_case(_case(spec, shape, tensors, options, step), step, layers=options.layers)
    if options.steps:
        yield from compare_steps(spec, options, step)


def _sliced(spec: BuildSpec, options: VerifyOptions) -> BuildSpec:
    """The specification of the first layers alone, where the options ask for it."""
    source = spec.source
    if not isinstance(source, PretrainedModel):
        if options.layers or options.slice_layers or options.steps or options.prompts:
            raise BuildRefused(
                f"{source.id}: a saved program is compared as a whole; leave out --layers, --slice-layers, --steps "
                "and --prompts"
            )
        return spec
    if options.slice_layers is None:
        return spec
    return replace(spec, source=replace(source, config=first_layers(source.config, options.slice_layers)))


def tensors_of(spec: BuildSpec, shape: Shape) -> "Tensors":
    from nxpipe.pipeline.models.weights import Tensors

    tensors = Tensors(spec.weights, spec.parameters(shape))
    require_memory(spec.source.id, tensors.kinds)
    return tensors


def compile_variants(captured: CapturedShape, options: VerifyOptions) -> Mapping[str, CompileTapped]:
    """The program in the specification's autocast mode first, then in the modes of the options, for all ranks."""
    spec, shape = captured.spec, captured.shape
    modes = dict.fromkeys((spec.autocast, *options.modes))
    return {mode: partial(compile_shape, replace(spec, autocast=mode), shape, captured=captured) for mode in modes}


def runner(spec: BuildSpec, options: VerifyOptions) -> Runner:
    return Runner(options.execution, spec.target.core)


def _case(spec: BuildSpec, shape: Shape, tensors: "Tensors", options: VerifyOptions, step: Step) -> Case:
    from nxpipe.emulator.given import require_inputs

    with step(f"capture {shape.name}"):
        captured = capture_shape(spec, shape)
    inputs, input_source = _inputs(spec, shape, captured.graph, options)
    for batch in inputs:
        require_inputs(captured.graph, batch)
    variants = compile_variants(captured, options)
    return Case(
        program=shape.name,
        input_source=input_source,
        inputs=inputs,
        variants={mode: on_emulator(each, tensors, runner(spec, options)) for mode, each in variants.items()},
        references=_references(spec, shape, tensors),
    )


def _references(spec: BuildSpec, shape: Shape, tensors: "Tensors") -> dict[str, ReferenceRun]:
    """The implementations to compare with, the reference of evidence first. A model class runs in bf16 as well."""
    request = spec.capture_request(shape)
    if request is None:
        return {spec.reference: partial(_saved_answers, spec, shape, tensors)}
    return {
        DEFAULT_REFERENCE: in_pytorch(request, tensors, "float32"),
        "PyTorch bf16": in_pytorch(request, tensors, "bfloat16"),
    }


def _saved_answers(spec: BuildSpec, shape: Shape, tensors: "Tensors", batches: Batches) -> "list[Answer]":
    from nxpipe.emulator.capture.answer import Answer

    return [Answer(spec.outputs(shape, tensors, batch), {}) for batch in batches]


def in_pytorch(request: "CaptureRequest", tensors: Arrays, dtype: str) -> ReferenceRun:
    def answers(batches: Batches) -> "list[Answer]":
        from nxpipe.emulator.capture.reference import Reference

        reference = Reference(request, tensors, dtype)
        return [reference.answer(batch) for batch in batches]

    return answers


def _inputs(spec: BuildSpec, shape: Shape, graph: "Graph", options: VerifyOptions) -> tuple[Batches, str]:
    """Text where the program reads nothing else, or random values of a fixed seed; and their source."""
    from nxpipe.emulator.capture import example_inputs

    random = example_inputs(graph, spec.source.config, seed=0)
    state = {name: 0 * array for name, array in random.items() if name in graph.outputs}
    is_text = shape.phase != SAVED_PROGRAM and random.keys() - state.keys() == {"input_ids", "attention_mask"}
    if not is_text:
        if options.prompts:
            raise BuildRefused(
                f"{spec.source.id} {shape.name}: reads {', '.join(random.keys() - state.keys())}, not text alone; "
                "leave out --prompts, or pass --phases prefill"
            )
        return [random], "random inputs"
    texts, input_source = read_texts(spec, shape.batch, (shape.sequence, longest(spec)), options)
    return ([{**text, **state} for text in texts], input_source) if texts else ([random], input_source)


def longest(spec: BuildSpec) -> int:
    """The longest bucket of the specification."""
    return max(shape.sequence for shape in spec.shapes)


def read_texts(spec: BuildSpec, batch: int, buckets: tuple[int, int], options: VerifyOptions) -> tuple[Batches, str]:
    """The given prompts, else samples if the model has a tokenizer; no batch where random ids are taken instead.

    `buckets` are the program's, and the longest that is served with it.
    """
    sequence, largest = buckets
    if options.prompts:
        prompts = Prompts.read(options.prompts, spec.source, largest, truncate=options.truncate)
        texts = prompts.batches(batch, sequence)
        return texts, prompts.words("prompts" if texts else "prompts, so random token ids", sequence)
    if spec.source.folder is None:
        return [], "random token ids: there is no tokenizer beside the model"
    try:
        samples = Prompts.read(_SAMPLES, spec.source, largest, truncate=True)
    except (ModelSourceError, InputInvalid) as error:
        reason = str(error).removeprefix("--prompts: ").partition(";")[0]
        return [], f"random token ids: {reason}"
    return samples.batches(batch, sequence), samples.words("sample texts, by the model's own tokenizer", sequence)
