"""Decode steps: a prompt is prefilled, then a decoder generates one token after another from its KV cache.

Every variant keeps its own cache, so its errors accumulate. All variants read the tokens that PyTorch fp32 finds
likeliest, so that the figures of a step compare one and the same sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nxpipe.pipeline.compile.frontend import capture_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.source import DEFAULT_REFERENCE
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.cases import compile_variants, read_texts, runner, tensors_of
from nxpipe.pipeline.verify.comparison import Comparison, VariantResult, VerifyOptions
from nxpipe.pipeline.verify.deviation import compare

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph

Decoder: TypeAlias = Callable[[Arrays], Mapping[str, Any]]
Logits: TypeAlias = "list[np.ndarray[Any, Any]]"


def compare_steps(spec: BuildSpec, options: VerifyOptions, step: Step) -> Iterator[Comparison]:
    """One comparison a batch size, at the longest bucket, which prompt and new tokens share."""
    if "decode" not in spec.source.phases:
        raise BuildRefused(f"{spec.source.id}: task {spec.source.task} has no decode phase; leave out --steps")
    for batch in sorted({shape.batch for shape in spec.shapes}):
        longest = max(shape.sequence for shape in spec.shapes if shape.batch == batch)
        if options.steps >= longest:
            raise BuildRefused(
                f"{spec.source.id}: {options.steps} steps leave no room for a prompt in a bucket of {longest}; "
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
        truth, tokens = _follow(_in_pytorch(spec, pair, tensors, "float32"), prompt, options.steps, None)

    def compared(variant: str, decoders: tuple[Decoder, Decoder]) -> VariantResult:
        found, _ = _follow(decoders, prompt, options.steps, tokens)
        return VariantResult(variant, tuple(compare(_named(found), _named(truth))))

    emulated = []
    variants = [compile_variants(each, options) for each in captured]
    for mode in variants[0]:
        with step(f"{options.steps} steps emulated, {mode}"):
            loaded = [runner(spec, options).load(each[mode](), tensors) for each in variants]
            run = compared(mode, (loaded[0].run, loaded[1].run))
            prefill, decode = (each.work for each in loaded)
            emulated.append(replace(run, work=prefill + decode if prefill and decode else None))
    with step(f"{options.steps} steps in PyTorch bf16"):
        beside = compared("PyTorch bf16", _in_pytorch(spec, pair, tensors, "bfloat16"))
    name = f"{pair[0].name} and {options.steps} steps of {pair[1].name}"
    return Comparison(name, input_source, DEFAULT_REFERENCE, tuple(emulated), (beside,))


def _in_pytorch(spec: BuildSpec, pair: tuple[Shape, Shape], tensors: Arrays, dtype: str) -> tuple[Decoder, Decoder]:
    from nxpipe.emulator.capture.reference import Reference

    def runner(shape: Shape) -> Decoder:
        request = cast("CaptureRequest", spec.capture_request(shape))  # only a model class decodes
        reference = Reference(request, tensors, dtype)
        return lambda inputs: reference.answer(inputs).outputs

    return runner(pair[0]), runner(pair[1])


def _follow(
    decoders: tuple[Decoder, Decoder], prompt: Arrays, steps: int, tokens: "Logits | None"
) -> tuple[Logits, Logits]:
    """The logits of the prompt's last token and of each step, and the token that each step read."""
    prefill, decode = decoders
    answer = prefill(prompt)
    position = prompt["attention_mask"].sum(axis=1)
    logits, read = [answer["logits"]], []
    for number in range(steps):
        chosen = logits[-1][:, -1].argmax(axis=-1)[:, None] if tokens is None else tokens[number]
        read.append(chosen)
        state = {name: array for name, array in answer.items() if name.startswith("cache.")}
        answer = decode({"input_ids": chosen, "position": position + number, **state})
        logits.append(answer["logits"])
    return logits, read


def _named(logits: Logits) -> Arrays:
    return {f"token {number}.logits": array for number, array in enumerate(logits)}


def _prompt(spec: BuildSpec, graph: "Graph", options: VerifyOptions, size: tuple[int, int]) -> tuple[Arrays, str]:
    """A batch of prompts that leaves room for the new tokens, padded to the bucket, beside an empty cache."""
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
