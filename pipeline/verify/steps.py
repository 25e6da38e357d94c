"""A decoder followed over many tokens: a prompt is read, then one token after another is made beside the cache.

Every way keeps its own cache, so what it loses on the way adds up; all of them are given the tokens that PyTorch fp32
finds likeliest, so that the figures of a step compare one and the same sentence.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid
from nxpipe.pipeline.verify.cases import published, read_texts, runner, tensors_of, ways
from nxpipe.pipeline.verify.comparison import Comparison, Run, Trial, as_it_is
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.verify import Arrays, compare

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.ir.graph import Graph

Runner: TypeAlias = Callable[[Arrays], Mapping[str, Any]]
Logits: TypeAlias = "list[np.ndarray[Any, Any]]"
_YARDSTICK = "PyTorch fp32"


def compare_steps(request: BuildRequest, trial: Trial, step: Step) -> Iterator[Comparison]:
    """One comparison a batch size, at the longest bucket, which prompt and new tokens share."""
    from nxpipe.pipeline.request import all_phases

    if "decode" not in all_phases(request.source.task):
        raise BuildRefused(f"{request.source.id}: a {request.source.task} model decodes nothing; leave out --steps")
    for batch in sorted({shape.batch for shape in request.shapes}):
        longest = max(shape.sequence for shape in request.shapes if shape.batch == batch)
        if trial.steps >= longest:
            raise BuildRefused(
                f"{request.source.id}: {trial.steps} steps leave no room for a prompt in a bucket of {longest}; "
                "pass fewer --steps, or a larger --buckets"
            )
        yield _compared(request, trial, (batch, longest), step)


def _compared(request: BuildRequest, trial: Trial, size: tuple[int, int], step: Step) -> Comparison:
    from nxpipe.emulator.capture import capture

    pair = (Shape("prefill", *size), Shape("decode", *size))
    tensors = tensors_of(request, pair[0])
    with step(f"capture {pair[0].name} and {pair[1].name}"):
        graphs = tuple(capture(request.capture(shape)) for shape in pair)
    prompt, fed = _prompt(request, graphs[0], trial, size)
    with step(f"{trial.steps} steps in {_YARDSTICK}"):
        truth, tokens = _follow(_in_pytorch(request, pair, tensors, "float32"), prompt, trial.steps, None)

    def held(way: str, runners: tuple[Runner, Runner]) -> Run:
        found, _ = _follow(runners, prompt, trial.steps, tokens)
        return Run(way, tuple(compare(_named(found), _named(truth))))

    emulated = []
    plan = published(request, pair[0])
    modes = [ways(request, graph, trial, plan) for graph in graphs]
    for mode in modes[0]:
        with step(f"{trial.steps} steps emulated, {mode}"):
            loaded = [runner(request, trial).load(way[mode](as_it_is), tensors) for way in modes]
            run = held(mode, (loaded[0].run, loaded[1].run))
            prefill, decode = (each.work for each in loaded)
            emulated.append(replace(run, work=prefill + decode if prefill and decode else None))
    with step(f"{trial.steps} steps in PyTorch bf16"):
        beside = held("PyTorch bf16", _in_pytorch(request, pair, tensors, "bfloat16"))
    name = f"{pair[0].name} and {trial.steps} steps of {pair[1].name}"
    return Comparison(name, fed, _YARDSTICK, tuple(emulated), (beside,))


def _in_pytorch(request: BuildRequest, pair: tuple[Shape, Shape], tensors: Arrays, dtype: str) -> tuple[Runner, Runner]:
    from nxpipe.emulator.capture.reference import Reference

    def runner(shape: Shape) -> Runner:
        reference = Reference(request.capture(shape), tensors, dtype)
        return lambda inputs: reference.answer(inputs).outputs

    return runner(pair[0]), runner(pair[1])


def _follow(
    runners: tuple[Runner, Runner], prompt: Arrays, steps: int, tokens: "Logits | None"
) -> tuple[Logits, Logits]:
    """The logits of the prompt's last token and of each step, and the tokens that were read on the way."""
    prefill, decode = runners
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


def _prompt(request: BuildRequest, graph: "Graph", trial: Trial, size: tuple[int, int]) -> tuple[Arrays, str]:
    """A batch of prompts that leaves room for the new tokens, padded to the bucket, beside an empty cache."""
    import numpy as np

    from nxpipe.emulator.capture import example_inputs

    batch, sequence = size
    random = example_inputs(graph, request.source.config, seed=0)
    room = sequence - trial.steps
    try:
        texts, fed = read_texts(request, batch, (room, room), trial)
    except InputInvalid as error:
        after = f"a bucket of {sequence} leaves room for {room} before --steps {trial.steps}"
        raise InputInvalid(f"{error}; {after}") from error
    fed = f"the first {batch} of {fed}" if len(texts) > 1 else fed
    first = texts[0] if texts else {name: random[name][:, : -trial.steps] for name in ("input_ids", "attention_mask")}
    padded = {name: np.pad(array, ((0, 0), (0, trial.steps))) for name, array in first.items()}
    return {**padded, **{name: 0 * array for name, array in random.items() if name.startswith("cache.")}}, fed
