"""The simulation of a replica: closed forms of queueing theory, the real scheduler on the same trace, and laws."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from statistics import stdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nxpipe.emulator.hardware import instance
from nxpipe.emulator.isa.program import Program
from nxpipe.emulator.lower.backend import run_backend
from nxpipe.emulator.lower.records import TargetGraph
from nxpipe.emulator.schedule.timeline import latency_ns
from nxpipe.pipeline.compile.frontend import compile_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import shapes_of
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.plan.schedulers import Replica, Scheduling, StepTimes
from nxpipe.pipeline.plan.simulation import Outcome, quantile_of, simulate
from nxpipe.pipeline.plan.steps import PredictedSteps, ProgramSteps
from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Request, Traffic
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.serving.programs import DecoderPrograms
from nxpipe.pipeline.serving.scheduler import GenerationRequest, Scheduler
from tests.serving.decoders import CONFIGS, VOCABULARY, HashDecoder, greedy, programs


@dataclass(frozen=True)
class Constant:
    """Every prompt takes one time, and every token another."""

    prompt: float
    token: float

    def prefill(self, tokens: int, context: int = 0, rows: int = 1) -> float:
        return self.prompt

    def decode(self, rows: int, context: int) -> float:
        return self.token


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# Closed forms


def require_near(found: Sequence[float], expected: float) -> None:
    """Means of independent seeds: their own mean is the closed form, by the spread that they have."""
    error = stdev(found) / math.sqrt(len(found))
    assert error < 0.05 * expected, "too few requests to tell"
    assert abs(mean(found) - expected) < 4 * error


def mean_of_steady(outcome: Outcome) -> float:
    """The mean time to the first token, without the start in which nobody waits."""
    return mean(outcome.ttft[len(outcome.ttft) // 10 :])


def test_one_server_of_constant_time_waits_as_md1() -> None:
    load, service = 0.7, 1.0
    traffic = Traffic(LengthDistribution.parse("10"), LengthDistribution.parse("1"))
    replica = Replica(1, 128, (128,), Scheduling.NXDI)
    found = [
        simulate(traffic.requests(4000, seed, load / service), replica, Constant(service, 1.0)) for seed in range(12)
    ]
    require_near([mean_of_steady(each) for each in found], load * service / (2 * (1 - load)) + service)
    require_near([each.busy for each in found], load)


@pytest.mark.parametrize("rows", [1, 4])
def test_exponential_answers_in_rows_wait_as_mmc(rows: int) -> None:
    token, length, load = 0.001, 1000, 0.7
    traffic = Traffic(LengthDistribution.parse("10"), LengthDistribution.parse(f"exponential:{length}"))
    service = token * length
    rate = load * rows / service
    replica = Replica(rows, 1 << 20, (128,), Scheduling.NXDI)
    found = [simulate(traffic.requests(5000, seed, rate), replica, Constant(0.0, token)) for seed in range(16)]
    offered = load * rows
    last = offered**rows / math.factorial(rows) / (1 - load)
    queued = last / (sum(offered**k / math.factorial(k) for k in range(rows)) + last)  # Erlang's C
    require_near([mean_of_steady(each) for each in found], queued * service / (rows * (1 - load)))


@pytest.mark.parametrize("scheduler", list(Scheduling))
def test_the_mean_number_in_the_system_is_rate_times_latency(scheduler: Scheduling) -> None:
    """Little's law: the number is counted at random moments, not derived from the latencies."""
    traffic = Traffic(LengthDistribution.parse("uniform:20-400"), LengthDistribution.parse("exponential:60"))
    requests = traffic.requests(20_000, 3, 0.9)
    replica = replica_of(scheduler, rows=8)
    found = simulate(requests, replica, Constant(0.2, 0.05))
    times = [(each.arrival, each.arrival + took) for each, took in zip(requests, found.latency, strict=True)]
    moments = Random(1)
    counts = []
    for _ in range(400):
        at = moments.uniform(0.1, 0.9) * found.seconds
        counts.append(sum(start <= at < end for start, end in times))
    assert mean(counts) == pytest.approx(len(requests) / found.seconds * mean(found.latency), rel=0.06)


# The real scheduler


def served(own: DecoderPrograms, milliseconds: dict[str, float], requests: Sequence[Request]) -> Outcome:
    """What the scheduler of `nxpipe serve` does on a clock that the programs' predicted times move."""
    decoder = HashDecoder(own)
    decoder.latency_ms = milliseconds.get
    scheduler = Scheduler(decoder)
    random = Random(3)
    pending = list(enumerate(requests))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    clock = 0.0
    while pending or not scheduler.is_idle:
        while pending and pending[0][1].arrival <= clock:
            number, each = pending.pop(0)
            prompt = tuple(random.randrange(VOCABULARY) for _ in range(each.prompt))
            scheduler.add(GenerationRequest(prompt, greedy(each.output, ignore_eos=True), number))
        if scheduler.is_idle:
            clock = pending[0][1].arrival
            continue
        before = scheduler.counts.predicted_ms
        outputs = scheduler.step()
        clock += (scheduler.counts.predicted_ms - before) / 1e3
        for output in outputs:
            first.setdefault(output.request.ticket, clock)
            last[output.request.ticket] = clock
    ttft = [first[n] - each.arrival for n, each in enumerate(requests)]
    tpot = [(last[n] - first[n]) / (each.output - 1) for n, each in enumerate(requests) if each.output > 1]
    return Outcome(len(requests), 0, clock, ttft, tpot, [], 0, 0, 0.0)


@cache
def emulated_milliseconds(kind: str, phase: str) -> tuple[DecoderPrograms, dict[str, float]]:
    """The programs of a tiny model and their times on the emulator's clock."""
    source = PretrainedModel(kind, None, CONFIGS[kind], "text-generation", None)
    shapes = shapes_of((phase, "decode"), (4,), (8, 16, 48))
    spec = BuildSpec(source, RandomWeights(3), shapes, instance("inf2.xlarge"), tensor_parallel=1)
    found = {}
    for shape in shapes:
        *_, (_, program) = run_backend(TargetGraph(compile_shape(spec, shape).graph, "v2", 1))
        assert isinstance(program, Program)
        nanoseconds = latency_ns(program)
        assert nanoseconds is not None
        found[shape.name] = nanoseconds / 1e6
    return DecoderPrograms.of(kind, shapes, 4), found


@pytest.mark.sample(4)
@pytest.mark.parametrize("phase", ["extend", "prefill"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_the_simulation_does_what_the_server_does_on_the_same_trace(kind: str, phase: str, load: float) -> None:
    """The issue asks for 5 % of mean and p99; nothing but rounding differs."""
    own, milliseconds = emulated_milliseconds(kind, phase)
    steps = ProgramSteps({length: milliseconds[name] for length, name in own.prompts.items()}, milliseconds[own.decode])
    chunk = own.chunk if own.is_continuous else 0
    replica = Replica(own.rows, own.capacity, tuple(own.prompts), Scheduling.NXPIPE, chunk=chunk)
    traffic = Traffic(LengthDistribution.parse("uniform:2-30"), LengthDistribution.parse("uniform:1-16"))
    capacity = 4 / (2 * steps.prefill(16) + 9 * steps.decode(4, 0))
    requests = traffic.requests(300, 11, load * capacity)
    real, found = served(own, milliseconds, requests), simulate(requests, replica, steps)
    for ours, theirs in ((found.ttft, real.ttft), (found.tpot, real.tpot)):
        assert mean(ours) == pytest.approx(mean(theirs), rel=1e-6)
        assert quantile_of(ours, 0.99) == pytest.approx(quantile_of(theirs, 0.99), rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_request_has_the_times_that_the_server_gives_it(
    drawn: list[tuple[float, int, int]], rows: int, continuous: bool
) -> None:
    own = programs(rows, (4, 8) if continuous else (4, 8, 40), 40, continuous=continuous)
    names = {name: 10.0 * length for length, name in own.prompts.items()} | {own.decode: 7.0}
    requests = [Request(at, prompt, output) for at, prompt, output in sorted(drawn)]
    replica = Replica(rows, 40, tuple(own.prompts), Scheduling.NXPIPE, chunk=8 if continuous else 0)
    steps = ProgramSteps({length: 10.0 * length for length in own.prompts}, 7.0)
    real, found = served(own, names, requests), simulate(requests, replica, steps)
    assert found.ttft == pytest.approx(real.ttft)
    assert found.tpot == pytest.approx(real.tpot)


# Laws


def replica_of(scheduler: Scheduling, rows: int = 4, queue: int | None = None) -> Replica:
    return {
        Scheduling.NXPIPE: Replica(rows, 1024, (64, 128), Scheduling.NXPIPE, chunk=128, queue=queue),
        Scheduling.NXDI: Replica(rows, 1024, (128, 512), Scheduling.NXDI, queue=queue),
        Scheduling.VLLM: Replica(
            rows, 1024 * rows, (128, 256), Scheduling.VLLM, chunk=256, block=32, queue=queue, longest=1024
        ),
    }[scheduler]


schedulers = st.sampled_from(list(Scheduling))
loads = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 500), st.integers(1, 200)).map(lambda each: Request(*each)),
    min_size=1,
    max_size=25,
).map(lambda found: sorted(found, key=lambda each: each.arrival))


@given(loads, schedulers, st.integers(1, 6))
def test_no_request_is_lost_and_each_gets_its_tokens(requests: list[Request], scheduler: Scheduling, rows: int) -> None:
    found = simulate(requests, replica_of(scheduler, rows), Constant(0.3, 0.02))
    assert len(found.ttft) == found.requests == len(requests)
    assert found.tokens == sum(each.output for each in requests)
    assert len(found.tpot) == sum(each.output > 1 for each in requests)
    assert min(found.ttft) >= 0.3 - 1e-9
    assert 0 < found.busy <= 1


@given(loads, schedulers, st.integers(1, 6))
def test_prompts_are_read_in_the_order_of_arrival(requests: list[Request], scheduler: Scheduling, rows: int) -> None:
    found = simulate(requests, replica_of(scheduler, rows), Constant(0.3, 0.02))
    firsts = [each.arrival + took for each, took in zip(requests, found.ttft, strict=True)]
    assert all(one <= other + 1e-9 for one, other in pairwise(firsts))


@given(loads, schedulers)
def test_a_server_is_never_idle_while_a_request_waits(requests: list[Request], scheduler: Scheduling) -> None:
    """Work conservation: if all come at once, a program runs until the last token."""
    at_once = [Request(0.0, each.prompt, each.output) for each in requests]
    assert simulate(at_once, replica_of(scheduler), Constant(0.3, 0.02)).busy == pytest.approx(1.0)


@given(loads, st.integers(1, 5))
def test_one_more_row_ends_no_later_if_its_step_takes_no_longer(requests: list[Request], rows: int) -> None:
    at_once = [Request(0.0, each.prompt, each.output) for each in requests]
    few, many = (
        simulate(at_once, replica_of(Scheduling.NXDI, count), Constant(0.3, 0.02)) for count in (rows, rows + 1)
    )
    assert many.seconds <= few.seconds + 1e-9


@given(loads, schedulers, st.floats(1, 3))
def test_slower_programs_answer_nobody_sooner(requests: list[Request], scheduler: Scheduling, factor: float) -> None:
    at_once = [Request(0.0, each.prompt, each.output) for each in requests]
    fast = simulate(at_once, replica_of(scheduler), Constant(0.3, 0.02))
    slow = simulate(at_once, replica_of(scheduler), Constant(0.3 * factor, 0.02 * factor))
    assert all(one <= other + 1e-9 for one, other in zip(fast.latency, slow.latency, strict=True))


@given(loads, schedulers, st.integers(0, 3))
def test_a_full_queue_refuses_and_what_it_takes_it_answers(
    requests: list[Request], scheduler: Scheduling, queue: int
) -> None:
    assume(len(requests) > 3)
    found = simulate(requests, replica_of(scheduler, 1, queue), Constant(0.3, 0.02))
    assert found.refused + len(found.ttft) == len(requests)


@given(loads, schedulers, st.integers(1, 8))
def test_clients_that_wait_for_their_answers_are_never_more_than_they_are(
    requests: list[Request], scheduler: Scheduling, clients: int
) -> None:
    found = simulate(requests, replica_of(scheduler), Constant(0.3, 0.02), concurrency=clients)
    assert len(found.ttft) == len(requests)
    # Each client's answers follow one another, so all latencies together fill at most the time of all clients.
    assert sum(found.latency) <= clients * found.seconds + 1e-6


def test_blocks_that_are_taken_keep_a_request_waiting() -> None:
    replica = Replica(8, 256, (128,), Scheduling.VLLM, chunk=128, block=32)
    requests = [Request(0.0, 100, 20), Request(0.0, 100, 20), Request(0.0, 100, 20)]
    found = simulate(requests, replica, Constant(1.0, 0.1))
    assert found.ttft[1] == pytest.approx(2.0)
    assert found.ttft[2] > 2.0 + 19 * 0.1  # the third one has no blocks before another has ended


def test_a_prefix_that_earlier_requests_had_is_not_read_again() -> None:
    replica = replica_of(Scheduling.NXPIPE)
    alone = simulate([Request(0.0, 500, 1), Request(9.0, 500, 1)], replica, Constant(1.0, 0.0))
    shared = simulate([Request(0.0, 500, 1), Request(9.0, 500, 1, shared=400)], replica, Constant(1.0, 0.0))
    assert alone.ttft == [4.0, 4.0]
    assert shared.ttft == [4.0, 1.0]  # three chunks of 128 are in the row


def test_bursty_requests_wait_longer_than_those_of_poisson_and_these_than_regular_ones() -> None:
    lengths = LengthDistribution.parse("10"), LengthDistribution.parse("1")
    replica = Replica(1, 128, (128,), Scheduling.NXDI)
    waits = [
        mean(simulate(Traffic(*lengths, arrivals).requests(20_000, 2, 0.8), replica, Constant(1.0, 1.0)).ttft)
        for arrivals in (Arrivals.CONSTANT, Arrivals.POISSON, Arrivals.BURSTY)
    ]
    assert waits[0] == pytest.approx(1.0)
    assert waits[0] < waits[1] < waits[2]


def test_steps_of_a_model_are_predictions_with_their_interval() -> None:
    name = "meta-llama/Llama-3.1-8B"
    known = architecture(name)
    assert known is not None

    def steps(bound: str) -> StepTimes:
        return PredictedSteps(name, "inf2.48xlarge", 8, 8, "NxD Inference", known, bound)  # type: ignore[arg-type]

    low, nominal, high = (steps(bound).decode(8, 2048) for bound in ("low", "nominal", "high"))
    assert low < nominal < high
    assert 0.005 < nominal < 0.1
    whole, chunk = steps("nominal").prefill(2048), steps("nominal").prefill(512, 1536)
    assert steps("nominal").prefill(512) <= chunk < whole
    assert steps("nominal").prefill(512, rows=2) == pytest.approx(2 * steps("nominal").prefill(512))


def test_points_around_the_predictions_lie_on_the_ellipse_of_their_interval() -> None:
    name = "meta-llama/Llama-3.1-8B"
    known = architecture(name)
    assert known is not None
    steps = PredictedSteps(name, "inf2.48xlarge", 8, 8, "NxD Inference", known)
    nominal, *points = steps.around()
    ends = {"low": replace(steps, bound="low"), "high": replace(steps, bound="high")}
    asked: tuple[Callable[[StepTimes], float], ...] = (lambda s: s.prefill(2048), lambda s: s.decode(8, 2048))
    for ask in asked:
        middle, low, high = (ask(each) for each in (nominal, ends["low"], ends["high"]))
        assert min(map(ask, points)) == pytest.approx(low)
        assert max(map(ask, points)) == pytest.approx(high)
        assert middle == pytest.approx(ask(steps))
    prompts, tokens = (
        [math.log(ask(each) / ask(nominal)) / math.log(ask(ends["high"]) / ask(nominal)) for each in points]
        for ask in asked
    )
    for one, other in zip(prompts, tokens, strict=True):
        assert math.hypot(one, other) == pytest.approx(1.0)


def test_a_wider_interval_has_the_same_middle_and_no_time_below_the_floor() -> None:
    name = "meta-llama/Llama-3.1-8B"
    known = architecture(name)
    assert known is not None
    steps = PredictedSteps(name, "inf2.48xlarge", 8, 8, "NxD Inference", known, widening=1.0)
    wide = replace(steps, widening=50.0)
    assert wide.decode(8, 2048) == steps.decode(8, 2048)
    fast, fastest = (replace(each, bound="low").decode(8, 2048) for each in (steps, wide))
    weights = 2 * 8.0e9 / (8 * 0.41e12)  # bytes of about 8 billion parameters, at the HBM rate of 8 cores
    assert 0.9 * weights < fastest < fast
