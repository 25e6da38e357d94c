"""Decoders for tests: one whose next token is a hash of all tokens before it, and tiny models on the emulator."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from nxpipe.emulator.compile import ports_of
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.model import Fast
from nxpipe.pipeline.compile.frontend import compile_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import shapes_of
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.serving.model import EmulatedSession
from nxpipe.pipeline.serving.programs import Decoder, DecoderPrograms
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import GenerationRequest, Output, Scheduler

VOCABULARY = 97
_TINY = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _TINY
    | {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gpt2": _TINY | {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def programs(rows: int, chunks: Sequence[int], capacity: int, *, continuous: bool = True) -> DecoderPrograms:
    phase = "extend" if continuous else "prefill"
    prompts = {length: f"{phase}-b{rows}-s{length}" for length in sorted(chunks)}
    return DecoderPrograms(rows, capacity, prompts, f"decode-b{rows}-s{capacity}", continuous)


class HashDecoder(Decoder):
    """A decoder whose cache has the tokens themselves. The next token is a hash of those up to the position, so that a
    token in a wrong row or place, or one that was never written, changes every token after it."""

    def __init__(self, own: DecoderPrograms) -> None:
        super().__init__(own, session=None)  # type: ignore[arg-type]  # it runs no program
        self.cache = np.full((own.rows, own.capacity), -1)
        self.is_failing = False

    def extend(self, row: int, tokens: Sequence[int], position: int, length: int) -> Array:
        assert len(tokens) <= length
        assert position + length <= self.programs.capacity
        self.cache[row, position : position + length] = -2  # padding
        self.cache[row, position : position + len(tokens)] = tokens
        return self._logits(row, position + len(tokens))

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Array:
        self.cache[:] = -2
        for row, tokens in prompts.items():
            self.cache[row, : len(tokens)] = tokens
        return np.stack([self._logits(row, len(prompts.get(row, (0,)))) for row in range(self.programs.rows)])

    def decode(self, tokens: Array, positions: Array) -> Array:
        if self.is_failing:
            raise RuntimeError("the core is gone")
        self.cache[np.arange(self.programs.rows), positions] = tokens
        return np.stack([self._logits(row, position + 1) for row, position in enumerate(positions)])

    def close(self) -> None:
        self.cache = self.cache[:0]

    def _logits(self, row: int, end: int) -> Array:
        digest = hashlib.blake2b(self.cache[row, :end].tobytes(), digest_size=16).digest()
        return np.random.default_rng(list(digest)).random(VOCABULARY)


@cache
def _codes(kind: str, rows: int, buckets: tuple[int, ...], phases: tuple[str, ...], degree: int) -> Any:
    source = PretrainedModel(kind, None, CONFIGS[kind], "text-generation", None)
    shapes = shapes_of(phases, (rows,), buckets)
    spec = BuildSpec(source, RandomWeights(3), shapes, instance("inf2.xlarge"), tensor_parallel=degree)
    compiled = {shape: compile_shape(spec, shape) for shape in shapes}
    return {shape.name: Fast(graph, ports_of(graph)) for shape, graph in compiled.items()}, shapes, spec.tensors()


def emulated(
    kind: str,
    rows: int,
    buckets: tuple[int, ...] = (8, 16, 48),
    phases: tuple[str, ...] = ("extend", "decode"),
    degree: int = 1,
) -> Decoder:
    """A tiny model with random weights."""
    codes, shapes, weights = _codes(kind, rows, buckets, phases, degree)
    return Decoder(DecoderPrograms.of(kind, shapes, rows), EmulatedSession(codes, weights))


def greedy(tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, **changes)


def finished(scheduler: Scheduler) -> dict[Any, list[Output]]:
    """The outputs of all requests by their tickets."""
    found: dict[Any, list[Output]] = {}
    while not scheduler.is_idle:
        for output in scheduler.step():
            found.setdefault(output.request.ticket, []).append(output)
    return found


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.chosen.token for output in outputs if output.chosen is not None]


def alone(decoder: Decoder, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[int]:
    """The tokens of a request that is served alone."""
    scheduler = Scheduler(decoder, **options)
    scheduler.add(GenerationRequest(tuple(prompt), params, "alone"))
    return tokens_of(finished(scheduler)["alone"])
