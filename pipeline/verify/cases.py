"""Comparison cases of `nxpipe verify`: the programs of a build specification, their inputs and their references."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from nxpipe.pipeline.compile.frontend import CapturedShape, capture_shape, compile_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import SAVED_PROGRAM, Shape, first_layers
from nxpipe.pipeline.models.prompts import Prompts
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.thresholds import DEFAULT_REFERENCE
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid, ModelSourceError
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.comparison import (
    Batches,
    Case,
    Comparison,
    CompileTapped,
    ReferenceRun,
    VariantResult,
    VerifyOptions,
    compare_case,
    on_emulator,
    require_memory,
)
from nxpipe.pipeline.verify.evidence import compare
from nxpipe.pipeline.verify.execution import Runner

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.capture.request import ModelOutputs
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.pipeline.models.weights import Tensors


# Default inputs of a model with a tokenizer: everyday language, numbers, code, names.
_SAMPLES: Final = (
    "The river rose in the night, and by morning the lower road was under water.",
    "Der Zug nach Basel faehrt heute um 17:42 Uhr von Gleis 9.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Ada Lovelace wrote notes on the Analytical Engine in 1843.",
)


def compare_model(spec: BuildSpec, options: VerifyOptions, step: Step) -> Iterator[Comparison]:
    """Compare every program of the specification, in each autocast mode."""

    spec = _sliced(spec, options)
    spec.check()
    for shape in sorted(spec.shapes):
        tensors = tensors_of(spec, shape)
        yield compare_case(_case(spec, shape, tensors, options, step), step, layers=options.layers)
    if options.steps:
        yield from compare_steps(spec, options, step)


def _sliced(spec: BuildSpec, options: VerifyOptions) -> BuildSpec:
    """The specification of the first layers only, if the options have `slice_layers`."""
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
    """Compile functions by autocast mode: the specification's mode first, then those of the options."""
    spec, shape = captured.spec, captured.shape
    modes = dict.fromkeys((spec.autocast, *options.modes))
    return {mode: partial(compile_shape, replace(spec, autocast=mode), shape, captured=captured) for mode in modes}


def runner(spec: BuildSpec, options: VerifyOptions) -> Runner:
    return Runner(options.execution, spec.target.core)


def _case(spec: BuildSpec, shape: Shape, tensors: "Tensors", options: VerifyOptions, step: Step) -> Case:
    from nxpipe.emulator.run.inputs import require_inputs

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
        variants={mode: on_emulator(variant, tensors, runner(spec, options)) for mode, variant in variants.items()},
        references=_references(spec, shape, tensors),
    )


def _references(spec: BuildSpec, shape: Shape, tensors: "Tensors") -> dict[str, ReferenceRun]:
    """The implementations to compare with, that of the evidence first. A model class runs in bf16 as well."""
    request = spec.capture_request(shape)
    if request is None:
        return {spec.reference: partial(_saved_answers, spec, shape, tensors)}
    return {
        DEFAULT_REFERENCE: in_pytorch(request, tensors, "float32"),
        "PyTorch bf16": in_pytorch(request, tensors, "bfloat16"),
    }


def _saved_answers(spec: BuildSpec, shape: Shape, tensors: "Tensors", batches: Batches) -> "list[ModelOutputs]":
    from nxpipe.emulator.capture.request import ModelOutputs

    return [ModelOutputs(spec.outputs(shape, tensors, batch), {}) for batch in batches]


def in_pytorch(request: "CaptureRequest", tensors: Arrays, dtype: str) -> ReferenceRun:
    def answers(batches: Batches) -> "list[ModelOutputs]":
        from nxpipe.emulator.capture.reference import Reference

        reference = Reference(request, tensors, dtype)
        return [reference.run(batch) for batch in batches]

    return answers


def _inputs(spec: BuildSpec, shape: Shape, graph: "Graph", options: VerifyOptions) -> tuple[Batches, str]:
    """Text if the program reads nothing else, or random values of a fixed seed; and a description of the source."""
    from nxpipe.emulator.capture import example_inputs

    random = example_inputs(graph, spec.source.config, seed=0)
    state = {name: 0 * array for name, array in random.items() if name in graph.outputs}
    is_text = shape.phase != SAVED_PROGRAM and random.keys() - state.keys() == {"input_ids", "attention_mask"}
    if not is_text:
        if options.prompts and (shape.begins_text or not any(other.begins_text for other in spec.shapes)):
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
    """The user's prompts, else samples if the model has a tokenizer; no batch if random ids are used instead.

    `buckets` are the program's bucket, and the longest bucket that is served with it.
    """
    sequence, largest = buckets
    if options.prompts:
        prompts = Prompts.read(options.prompts, spec.source, largest, truncate=options.truncate)
        texts = prompts.batches(batch, sequence)
        return texts, prompts.description("prompts" if texts else "prompts, so random token ids", sequence)
    if spec.source.folder is None:
        return [], "random token ids: there is no tokenizer beside the model"
    try:
        samples = Prompts.read(_SAMPLES, spec.source, largest, truncate=True)
    except (ModelSourceError, InputInvalid) as error:
        reason = str(error).removeprefix("--prompts: ").partition(";")[0]
        return [], f"random token ids: {reason}"
    return samples.batches(batch, sequence), samples.description("sample texts, by the model's own tokenizer", sequence)


Decoder: TypeAlias = Callable[[Arrays], Mapping[str, Any]]
Logits: TypeAlias = "list[np.ndarray[Any, Any]]"


def compare_steps(spec: BuildSpec, options: VerifyOptions, step: Step) -> Iterator[Comparison]:
    """One comparison for each batch size, at the longest bucket, which prompt and new tokens share."""
    if "decode" not in spec.source.phases:
        raise BuildRefused(f"{spec.source.id}: task {spec.source.task} has no decode phase; leave out --steps")
    for batch in sorted({shape.batch for shape in spec.shapes}):
        longest = max(shape.sequence for shape in spec.shapes if shape.batch == batch)
        if options.steps >= longest:
            raise BuildRefused(
                f"{spec.source.id}: --steps {options.steps} leaves no tokens for a prompt in a bucket of {longest}; "
                "pass fewer --steps, or a larger --buckets"
            )
        yield _compared(spec, options, (batch, longest), step)


def _compared(spec: BuildSpec, options: VerifyOptions, size: tuple[int, int], step: Step) -> Comparison:
    pair = (Shape("prefill", *size), Shape("decode", *size))
    tensors = tensors_of(spec, pair[0])
    with step(f"capture {pair[0].name} and {pair[1].name}"):
        captured = [capture_shape(spec, shape) for shape in pair]
    prompt, input_source = _prompt(spec, captured[0].graph, options, size)
    with step(f"{options.steps} steps in {DEFAULT_REFERENCE}"):
        truth, tokens = _decode_steps(_in_pytorch(spec, pair, tensors, "float32"), prompt, options.steps, None)

    def compared(variant: str, decoders: tuple[Decoder, Decoder]) -> VariantResult:
        logits, _ = _decode_steps(decoders, prompt, options.steps, tokens)
        return VariantResult(variant, tuple(compare(_named(logits), _named(truth))))

    emulated = []
    variants = [compile_variants(phase, options) for phase in captured]
    for mode in variants[0]:
        with step(f"{options.steps} steps emulated, {mode}"):
            loaded = [runner(spec, options).load(by_mode[mode](), tensors) for by_mode in variants]
            run = compared(mode, (loaded[0].run, loaded[1].run))
            prefill, decode = (program.work for program in loaded)
            emulated.append(replace(run, work=prefill + decode if prefill and decode else None))
    with step(f"{options.steps} steps in PyTorch bf16"):
        bf16 = compared("PyTorch bf16", _in_pytorch(spec, pair, tensors, "bfloat16"))
    name = f"{pair[0].name} and {options.steps} steps of {pair[1].name}"
    return Comparison(name, input_source, DEFAULT_REFERENCE, tuple(emulated), (bf16,))


def _in_pytorch(spec: BuildSpec, pair: tuple[Shape, Shape], tensors: Arrays, dtype: str) -> tuple[Decoder, Decoder]:
    from nxpipe.emulator.capture.reference import Reference

    def runner(shape: Shape) -> Decoder:
        request = cast("CaptureRequest", spec.capture_request(shape))  # only a model class decodes
        reference = Reference(request, tensors, dtype)
        return lambda inputs: reference.run(inputs).outputs

    return runner(pair[0]), runner(pair[1])


def _decode_steps(
    decoders: tuple[Decoder, Decoder], prompt: Arrays, steps: int, tokens: "Logits | None"
) -> tuple[Logits, Logits]:
    """The logits of the prompt's last token and of each step, and the token that each step read."""
    prefill, decode = decoders
    answer = prefill(prompt)
    position = prompt["attention_mask"].sum(axis=1)
    logits, tokens_read = [answer["logits"]], []
    for number in range(steps):
        chosen = logits[-1][:, -1].argmax(axis=-1)[:, None] if tokens is None else tokens[number]
        tokens_read.append(chosen)
        state = {name: array for name, array in answer.items() if name.startswith("cache.")}
        answer = decode({"input_ids": chosen, "position": position + number, **state})
        logits.append(answer["logits"])
    return logits, tokens_read


def _named(logits: Logits) -> Arrays:
    return {f"token {number}.logits": array for number, array in enumerate(logits)}


def _prompt(spec: BuildSpec, graph: "Graph", options: VerifyOptions, size: tuple[int, int]) -> tuple[Arrays, str]:
    """A batch of prompts and an empty KV cache; the bucket holds each prompt with its new tokens."""
    import numpy as np

    from nxpipe.emulator.capture import example_inputs

    batch, sequence = size
    random = example_inputs(graph, spec.source.config, seed=0)
    longest = sequence - options.steps
    try:
        texts, input_source = read_texts(spec, batch, (longest, longest), options)
    except InputInvalid as error:
        after = f"a bucket of {sequence} holds {longest} tokens before --steps {options.steps}"
        raise InputInvalid(f"{error}; {after}") from error
    input_source = f"the first {batch} of {input_source}" if len(texts) > 1 else input_source
    first = texts[0] if texts else {name: random[name][:, : -options.steps] for name in ("input_ids", "attention_mask")}
    padded = {name: np.pad(array, ((0, 0), (0, options.steps))) for name, array in first.items()}
    return {**padded, **{name: 0 * array for name, array in random.items() if name.startswith("cache.")}}, input_source
