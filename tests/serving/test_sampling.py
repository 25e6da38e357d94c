"""Sampling: what is drawn follows the distribution, and depends on nothing but the request."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nxpipe.emulator.numerics import Array
from nxpipe.pipeline.serving.sampling import Sampler, SamplingParams, choose_all

LOGITS = arrays.arrays(np.float32, 20, elements=st.floats(-8, 8, width=32))


def shares_of(logits: Array) -> Array:
    shares = np.exp(logits.astype(np.float64) - logits.max())
    result: Array = shares / shares.sum()
    return result


def nucleus(logits: Array, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be drawn, by the definition: the likeliest k, and of them the fewest that have p together."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    shares = np.exp(logits[order].astype(np.float64) - logits[order[0]])
    shares /= shares.sum()
    chosen: set[int] = set()
    total = 0.0
    for token, share in zip(order, shares, strict=True):
        if total >= top_p:
            break
        chosen.add(token)
        total += share
    return chosen


@given(LOGITS, st.integers(0, 20), st.floats(0.05, 1), st.integers(0, 1 << 40))
def test_only_tokens_of_the_nucleus_are_drawn(logits: Array, top_k: int, top_p: float, seed: int) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
    allowed = nucleus(logits, top_k, top_p) | nucleus(logits, top_k, min(top_p + 1e-9, 1.0))
    if top_k:  # equal logits at the edge may be exchanged
        edge = np.sort(logits)[-top_k]
        allowed |= {token for token in range(20) if logits[token] == edge}
    assert {sampler.choose(logits).token for _ in range(8)} <= allowed


def test_tokens_are_drawn_as_often_as_their_share() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for temperature in (1.0, 0.5):
        sampler, count = Sampler(SamplingParams(temperature=temperature, seed=7)), 20_000
        drawn = Counter(sampler.choose(logits).token for _ in range(count))
        expected = shares_of(logits / temperature)
        chi = sum((drawn[token] - count * share) ** 2 / (count * share) for token, share in enumerate(expected))
        assert chi < 16.3  # the 99.9th percentile of three degrees of freedom


@given(LOGITS)
def test_greedy_takes_the_first_of_the_largest(logits: Array) -> None:
    plain, scored = (Sampler(SamplingParams(temperature=0.0, logprobs=count)) for count in (None, 5))
    assert plain.choose(logits).token == scored.choose(logits).token == int(np.argmax(logits))


@given(st.lists(LOGITS, min_size=2, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_row_s_token_does_not_depend_on_the_rows_beside_it(rows: list[Array], greedy: list[bool]) -> None:
    def sampler(number: int) -> Sampler:
        return Sampler(SamplingParams(temperature=0.0 if greedy[number] else 1.0, seed=number))

    together = choose_all([sampler(number) for number in range(len(rows))], np.stack(rows))
    assert together == [sampler(number).choose(row) for number, row in enumerate(rows)]


@given(LOGITS)
def test_log_probabilities_are_those_of_the_softmax(logits: Array) -> None:
    chosen = Sampler(SamplingParams(temperature=1.0, seed=0, logprobs=20)).choose(logits)
    shares = dict(enumerate(shares_of(logits)))
    assert chosen.logprob is not None
    assert np.isclose(np.exp(chosen.logprob), shares[chosen.token])
    assert np.allclose([np.exp(logprob) for _, logprob in chosen.likeliest], sorted(shares.values(), reverse=True))


@given(LOGITS, st.sets(st.integers(0, 40), max_size=12), st.integers(1, 4), st.sampled_from([0.0, 1.0]))
def test_no_token_that_ends_the_answer_is_chosen_before_the_least_length(
    logits: Array, ends: set[int], least: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, min_tokens=least, logprobs=20)
    sampler = Sampler(params, ends)
    first = [sampler.choose(logits) for _ in range(least)]
    assert not {chosen.token for chosen in first} & ends
    assert all(np.isfinite(logprob) for chosen in first for _, logprob in chosen.likeliest)
    free = Sampler(SamplingParams(temperature=0.0))
    assert temperature or sampler.choose(logits).token == free.choose(logits).token


def test_penalties_and_biases_change_the_logits_of_their_tokens() -> None:
    logits = np.array([2.0, 1.9, 1.0, 0.0])
    biased = Sampler(SamplingParams(temperature=0.0, logit_bias={3: 100.0}))
    assert biased.choose(logits).token == 3
    penalized = Sampler(SamplingParams(temperature=0.0, frequency_penalty=0.2))
    assert [penalized.choose(logits).token for _ in range(3)] == [0, 1, 0]
    present = Sampler(SamplingParams(temperature=0.0, presence_penalty=2.0))
    assert [present.choose(logits).token for _ in range(4)] == [0, 1, 2, 0]
