"""Sampling: the next token of each row from its logits.

Greedy rows are answered for the whole batch at once. A row with a temperature draws from a generator of its own, seeded
by the request: what a request draws does not depend on the requests beside it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from nxpipe.emulator.numerics import Array


_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity; vLLM's bound


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens, and when it stops."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # the number of likeliest tokens to report beside the chosen one
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # tokens before which none is chosen that ends the answer

    @property
    def is_plain_greedy(self) -> bool:
        """True if the answer is the index of the largest logit."""
        return self.temperature == 0 and not self.has_penalties and self.logprobs is None and not self.min_tokens

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True)
class Chosen:
    """A token with its log probability, and those of the likeliest tokens, if the request wants them."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The state of one request: its generator, and the tokens that it has chosen, for penalties. `ends` are the tokens
    that end its answer."""

    def __init__(self, params: SamplingParams, ends: Collection[int] = ()) -> None:
        self.params = params
        self._ends, self._left = list(ends), params.min_tokens
        self._generator = np.random.Generator(np.random.PCG64(params.seed))
        self._counts: dict[int, int] = {}

    def choose(self, logits: "Array") -> Chosen:
        """The next token from the logits of its row."""
        params = self.params
        if params.is_plain_greedy:
            return Chosen(int(logits.argmax()))
        adjusted = self._penalized(logits.astype(np.float64))
        token = int(adjusted.argmax()) if params.temperature == 0 else self._drawn(adjusted)
        if params.has_penalties:
            self._counts[token] = self._counts.get(token, 0) + 1
        return self._described(token, adjusted)

    def _penalized(self, logits: "Array") -> "Array":
        params = self.params
        for token, bias in params.logit_bias.items():
            if token < len(logits):
                logits[token] += bias
        for token, count in self._counts.items():
            logits[token] -= params.presence_penalty + count * params.frequency_penalty
        if self._left > 0:
            self._left -= 1
            logits[[token for token in self._ends if token < len(logits)]] = -np.inf
        return logits

    def _drawn(self, logits: "Array") -> int:
        """A token drawn from the likeliest `top_k`, and of those from the fewest that have `top_p` together."""
        params, candidates = self.params, np.arange(len(logits))
        if 0 < params.top_k < len(logits):
            candidates = np.argpartition(-logits, params.top_k - 1)[: params.top_k]
        candidates = candidates[np.lexsort((candidates, -logits[candidates]))]  # equal logits by their token
        shares = np.exp((logits[candidates] - logits[candidates[0]]) / params.temperature)
        cumulative = np.cumsum(shares / shares.sum())
        if params.top_p < 1:
            cumulative = cumulative[: int(np.searchsorted(cumulative, params.top_p)) + 1]
        place = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(candidates[min(int(place), len(cumulative) - 1)])

    def _described(self, token: int, logits: "Array") -> Chosen:
        count = self.params.logprobs
        if count is None:
            return Chosen(token)
        shifted = logits - logits.max()
        logprobs = np.maximum(shifted - np.log(np.exp(shifted).sum()), _LEAST_LOGPROB)
        order = np.argsort(-logprobs, kind="stable")[:count]
        return Chosen(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in order))


def choose_all(samplers: Sequence[Sampler], logits: "Array") -> list[Chosen]:
    """The next token of each row; row i of the logits is that of sampler i."""
    if all(sampler.params.is_plain_greedy for sampler in samplers):
        return [Chosen(token) for token in logits.argmax(axis=-1).tolist()]
    return [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
