"""Continuous batching: a request's tokens never depend on the requests beside it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.serving.programs import DecoderPrograms
from nxpipe.pipeline.serving.sampling import SamplingParams
from nxpipe.pipeline.serving.scheduler import Finish, GenerationRequest, Scheduler
from nxpipe.pipeline.util.errors import BuildRefused, InputInvalid
from tests.serving.decoders import HashDecoder, alone, emulated, finished, greedy, programs, tokens_of
from tests.tiers import examples

CAPACITY = 40


@dataclass(frozen=True)
class Arrival:
    """A request, the step in which it comes, and that in which it is cancelled."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    cancelled: int | None


def prompts(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts, of which many have a prefix in common."""
    shared = tuple(range(5, 5 + longest))
    own = st.lists(st.integers(0, 96), min_size=1, max_size=8).map(tuple)
    prefix = st.integers(0, longest - 8).map(lambda length: shared[:length])
    return st.tuples(prefix, own).map(lambda parts: parts[0] + parts[1])


def sampled() -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from(
        [
            {"temperature": 0.0},
            {"temperature": 0.0},
            {"temperature": 0.0, "min_tokens": 5, "stop_tokens": frozenset(range(48))},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.7, "seed": 1, "top_k": 9},
        ]
    )


@st.composite
def arrivals(draw: st.DrawFn, longest: int = CAPACITY - 1) -> list[Arrival]:
    return [
        Arrival(
            draw(st.integers(0, 12)),
            draw(prompts(longest)),
            SamplingParams(max_tokens=draw(st.integers(1, 12)), **draw(sampled())),
            draw(st.none() | st.integers(0, 25)),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


def served(scheduler: Scheduler, given_arrivals: list[Arrival]) -> dict[int, list[Any]]:
    """The outputs by the number of the request."""
    requests = {n: GenerationRequest(each.prompt, each.params, n) for n, each in enumerate(given_arrivals)}
    found: dict[int, list[Any]] = {n: [] for n in requests}
    step = 0
    while step <= 25 or not scheduler.is_idle:
        for number, each in enumerate(given_arrivals):
            if each.step == step:
                scheduler.add(requests[number])
            if each.cancelled == step and step >= each.step:
                scheduler.cancel(requests[number])
        for output in scheduler.step():
            found[output.request.ticket].append(output)
        step += 1
    return found


def require_as_alone(given_arrivals: list[Arrival], found: dict[int, list[Any]], decoder: Any) -> None:
    for number, each in enumerate(given_arrivals):
        expected = alone(decoder, each.prompt, each.params)
        outputs = found[number]
        assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if outputs[-1].finish is Finish.CANCELLED:
            assert tokens_of(outputs) == expected[: len(tokens_of(outputs))]
        else:
            assert tokens_of(outputs) == expected


@settings(deadline=None)
@given(arrivals(), st.integers(1, 5), st.sampled_from([(8,), (4, 8), (4, 8, 16), (5, 7)]))
def test_batching_never_changes_the_tokens_of_a_request(
    given_arrivals: list[Arrival], rows: int, chunks: tuple[int, ...]
) -> None:
    own = programs(rows, chunks, CAPACITY)
    found = served(Scheduler(HashDecoder(own)), given_arrivals)
    require_as_alone(given_arrivals, found, HashDecoder(own))


@settings(deadline=None)
@given(arrivals(longest=16), st.integers(1, 4))
def test_neither_does_a_static_batch(given_arrivals: list[Arrival], rows: int) -> None:
    own = programs(rows, (8, 16), CAPACITY, continuous=False)
    found = served(Scheduler(HashDecoder(own)), given_arrivals)
    require_as_alone(given_arrivals, found, HashDecoder(own))


@pytest.mark.sample(16)
@pytest.mark.parametrize("phases", [("extend", "decode"), ("prefill", "decode")])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_batching_never_changes_the_tokens_of_a_model(kind: str, degree: int, phases: tuple[str, ...]) -> None:
    @settings(deadline=None, max_examples=examples(4 if degree == 1 else 2))
    @given(arrivals(longest=30))
    def check(given_arrivals: list[Arrival]) -> None:
        plain = [
            Arrival(each.step, each.prompt, greedy(each.params.max_tokens), each.cancelled) for each in given_arrivals
        ]
        decoder = emulated(kind, 4, phases=phases, degree=degree)
        require_as_alone(plain, served(Scheduler(decoder), plain), decoder)

    check()


def test_a_prompt_is_cut_by_its_length_alone() -> None:
    own = programs(2, (4, 16), CAPACITY)
    assert [own.next_chunk(39, position) for position in (0, 16, 32)] == [(0, 16, 16), (16, 32, 16), (24, 39, 16)]
    assert [own.next_chunk(20, position) for position in (0, 16)] == [(0, 16, 16), (16, 20, 4)]


def test_a_row_reads_a_prefix_once_and_its_next_request_only_what_is_new() -> None:
    own = programs(1, (4,), CAPACITY)
    scheduler = Scheduler(HashDecoder(own))
    shared = tuple(range(10, 22))
    for number, tail in enumerate([(1, 2), (3,), (4, 5, 6)]):
        scheduler.add(GenerationRequest((*shared, *tail), greedy(5), number))
    found = finished(scheduler)
    assert [found[number][-1].reused for number in range(3)] == [0, 12, 12]
    assert scheduler.counts.reused_tokens == 24
    for number, tail in enumerate([(1, 2), (3,), (4, 5, 6)]):
        assert tokens_of(found[number]) == alone(HashDecoder(own), (*shared, *tail), greedy(5))


def test_rows_go_on_while_a_long_prompt_is_read() -> None:
    scheduler = Scheduler(HashDecoder(programs(2, (4,), CAPACITY)))
    scheduler.add(GenerationRequest((1, 2), greedy(30), "short"))
    scheduler.step()
    scheduler.add(GenerationRequest(tuple(range(33)), greedy(2), "long"))
    steps = [[output.request.ticket for output in scheduler.step()] for _ in range(8)]
    assert steps == [["short"]] * 8  # a chunk of the long prompt beside each token of the short one


def test_a_late_request_ends_and_its_row_is_free() -> None:
    now = [0.0]
    scheduler = Scheduler(HashDecoder(programs(1, (4,), CAPACITY)), now=lambda: now[0])
    scheduler.add(GenerationRequest((1, 2), greedy(30), "late", deadline=5.0))
    scheduler.add(GenerationRequest((3,), greedy(2), "next"))
    scheduler.add(GenerationRequest((4,), greedy(2), "never", deadline=1.0))
    scheduler.step()
    now[0] = 6.0
    ends = {ticket: outputs[-1].finish for ticket, outputs in finished(scheduler).items()}
    assert ends == {"late": Finish.TIMEOUT, "next": Finish.LENGTH, "never": Finish.TIMEOUT}


def test_an_answer_ends_with_an_end_token_a_stop_token_or_its_length() -> None:
    own = programs(1, (4,), CAPACITY)
    tokens = alone(HashDecoder(own), (7,), greedy(20))
    third = tokens[2]
    assert alone(HashDecoder(own), (7,), greedy(20), end_tokens=[third]) == tokens[: tokens.index(third) + 1]
    assert alone(HashDecoder(own), (7,), greedy(20, ignore_eos=True), end_tokens=[third]) == tokens
    stopping = greedy(20, stop_tokens=frozenset([third]))
    assert alone(HashDecoder(own), (7,), stopping) == tokens[: tokens.index(third) + 1]


def test_a_prompt_that_is_too_long_is_refused_and_an_answer_ends_with_the_cache() -> None:
    scheduler = Scheduler(HashDecoder(programs(1, (4,), CAPACITY)))
    with pytest.raises(InputInvalid, match="40 tokens, and at most 39 are read"):
        scheduler.add(GenerationRequest(tuple(range(40)), greedy(1), 0))
    with pytest.raises(InputInvalid, match="no tokens"):
        scheduler.add(GenerationRequest((), greedy(1), 0))
    scheduler.add(GenerationRequest(tuple(range(35)), greedy(1000), "long"))
    assert len(finished(scheduler)["long"]) == 5


def test_artifacts_without_a_decode_program_are_refused_with_the_remedy() -> None:
    with pytest.raises(BuildRefused, match="--phases prefill,decode"):
        DecoderPrograms.of("bert", [])


def test_idle_rows_change_nothing_that_is_reused() -> None:
    """A decode writes in all rows; what it leaves in an idle row lies behind the tokens that the row holds."""
    own = programs(2, (4,), CAPACITY)
    decoder = HashDecoder(own)
    scheduler = Scheduler(decoder)
    scheduler.add(GenerationRequest(tuple(range(9)), greedy(1), "first"))
    finished(scheduler)
    before = decoder.cache[0, :8].copy()
    scheduler.add(GenerationRequest((50,), greedy(20), "other"))
    scheduler.add(GenerationRequest((51,), greedy(20), "other too"))
    scheduler.step()
    assert np.array_equal(decoder.cache[0, :1], [50]) or np.array_equal(decoder.cache[0, :8], before)
    finished(scheduler)
    assert scheduler.is_idle
