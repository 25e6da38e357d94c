"""Small models of every class of docs/guides/models.md on XLA's CPU, beside `fast`: all phases, on several ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from nxpipe.emulator.analysis.graph_memory import states
from nxpipe.emulator.capture import CaptureRequest, example_inputs
from nxpipe.emulator.compile import CompiledGraph, shard_graph
from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import LoadedModule
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.shard import divide
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks
from tests.emulator import test_decode as decoders
from tests.emulator.models import captured, relative_error, request, weights

_ENCODERS = ("albert", "bert", "distilbert", "electra", "roberta", "xlm-roberta")
_DECODERS = ("falcon", "gemma2", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")
_IMAGES = ("convnext", "dinov2", "resnet", "swin", "vit")
TASKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_ENCODERS, "fill-mask"),
    **dict.fromkeys(_DECODERS, "text-generation"),
    **dict.fromkeys(_IMAGES, "image-classification"),
    "bart": "text2text-generation",
    "clip": "zero-shot-image-classification",
    "t5": "text2text-generation",
    "unet": "image-denoising",
    "unet-xl": "image-denoising",
    "vae": "image-decoding",
    "wav2vec2": "automatic-speech-recognition",
    "whisper": "automatic-speech-recognition",
}
DEGREES: Final = (1, 2, 4)
TOLERANCE: Final = 1e-5  # relative to the largest number of an output, as for `fast` and PyTorch
STEPS: Final = 8


def requests(family: str) -> Iterator[CaptureRequest]:
    """A request for each phase of a small model."""
    wanted = request(family, TASKS[family])
    if family not in _DECODERS:
        yield replace(wanted, phase="forward")
        return
    yield replace(wanted, phase="prefill", capacity=16)
    yield replace(wanted, phase="decode", sequence=16)


@cache
def compiled(wanted_key: tuple[str, str]) -> Graph:
    family, phase = wanted_key
    (wanted,) = (each for each in requests(family) if each.phase == phase)
    return unroll(run_passes(captured(wanted), PassOptions()))


def degrees(whole: Graph) -> tuple[int, ...]:
    """Those of the degrees that are possible for a graph."""
    possible = divide(whole).degrees()
    return tuple(degree for degree in DEGREES if degree == 1 or degree in possible)


def model_distance(family: str, wanted: CaptureRequest, degree: int) -> float:
    """The largest relative error of XLA's outputs and states, compared with those of `fast`."""
    whole = compiled((family, wanted.phase))
    program = shard_graph(whole, PassOptions(tensor_parallel=degree))
    parameters, inputs = weights(wanted), example_inputs(captured(wanted), wanted.config, seed=3)
    expected = LoadedProgram(program, LoadedRanks(program.graph, parameters)).run(inputs)
    found = LoadedProgram(program, loaded(program, parameters)).run(inputs)
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], expected[name]) for name in expected)


def loaded(program: CompiledGraph, parameters: Mapping[str, Array]) -> LoadedModule:
    module = module_of(program.graph, program.degree)
    return LoadedModule(module.text, module.interface, parameters)


def generation_distance(name: str, degree: int) -> tuple[float, bool]:
    """Prefill and eight steps of decoding, with the caches in the devices' memory all along: the largest relative error
    of logits and of the caches at the end; and whether every step wrote the caches where they were."""
    programs = {}
    for phase in ("prefill", "decode"):
        whole = run_passes(captured(decoders.request(name, phase)), PassOptions())
        programs[phase] = shard_graph(whole, PassOptions(tensor_parallel=degree))
    parameters, (ids, mask) = decoders.weights(name), decoders.prompts()
    fast = {phase: LoadedRanks(program.graph, parameters) for phase, program in programs.items()}
    xla = {phase: loaded(program, parameters) for phase, program in programs.items()}
    graph = programs["prefill"].graph
    blank = {state: np.zeros(graph.inputs[state].type.shape, np.float32) for state in states(graph)}
    caches = [blank] * degree
    resident = xla["prefill"].place(caches)
    prompt = {"input_ids": ids, "attention_mask": mask}
    expected, caches = fast["prefill"].run(prompt, caches)
    errors = [relative_error(xla["prefill"].step(prompt, resident)["logits"], expected["logits"])]
    position, in_place = np.asarray(decoders.PROMPTS, np.int64), True
    for _ in range(STEPS):
        given = {"input_ids": expected["logits"][:, 0].argmax(-1)[:, None], "position": position}
        expected, caches = fast["decode"].run(given, caches)
        before = {state: entry.addresses for state, entry in resident.items()}
        errors.append(relative_error(xla["decode"].step(given, resident)["logits"], expected["logits"]))
        in_place = in_place and before == {state: entry.addresses for state, entry in resident.items()}
        position = position + 1
    for own, wanted in zip(xla["decode"].read(resident), caches, strict=True):
        errors += [relative_error(own[state], wanted[state]) for state in wanted]
    return max(errors), in_place
