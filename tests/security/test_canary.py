"""Class E of the review: wrong counts and unresponsive versions. The judge promotes neither."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from nxpipe.pipeline.canary.documents import EvidenceInvalid
from nxpipe.pipeline.canary.evalues import FullTrafficTest
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import explain
from nxpipe.pipeline.canary.handler import Action, RolloutState
from nxpipe.pipeline.canary.judge import Decision, Moment, judge
from nxpipe.pipeline.canary.metrics import (
    LATENCIES,
    NO_REQUESTS,
    Arm,
    Batch,
    InFlight,
    MinuteCounts,
    Minutes,
    UnansweredRequests,
)
from nxpipe.pipeline.canary.plan import CanaryPlan
from tests.canary.samples import PLAN, arm, minute, plan_with
from tests.security.balancer_counts import PLAN as TIMED
from tests.security.balancer_counts import Front, Version, course, roll_out

HEALTHY = ((150, 1), (2850, 14))
UNTIMED = plan_with()
SLOW = plan_with(latencies=(2, 2.5, 3, 3.5, 4, 5, 6.4))  # seconds
STABLE = arm(2850, 14)
SOON = 6  # minutes: the step's first two are left out, and a count settles for two


def attempt(*ids: str) -> Any:
    return pytest.mark.attempt(*ids)


def decisions(canary: Any, stable: Arm = STABLE, minutes: int = 60) -> list[Decision]:
    """The decision at each minute, with these counts."""
    evidence, found = Evidence(), []
    for number in range(minutes):
        judged = judge(PLAN, evidence, [Batch(number, canary, stable)], Moment(0, 0, number + 1))
        evidence = judged.evidence
        found.append(judged.verdict.decision)
    return found


@pytest.mark.parametrize(
    "canary",
    [
        pytest.param(Arm(math.nan, 0), marks=attempt("E01")),
        pytest.param(Arm(math.inf, 0), marks=attempt("E02")),
        pytest.param(Arm(-150, 0), marks=attempt("E03")),
        pytest.param(Arm(150, 151), marks=attempt("E04")),
        pytest.param(Arm(1e300, 1e300), marks=attempt("E05")),
        pytest.param(Arm(12.5, 0.5), marks=attempt("E07")),
        pytest.param(Arm("150", 0), marks=attempt("E08")),  # type: ignore[arg-type]
        pytest.param(Arm(None, 0), marks=attempt("E09")),  # type: ignore[arg-type]
        pytest.param(replace(arm(150, 1), slower=(1, 2, 3, 4, 5, 6, 7)), marks=attempt("E11")),
        pytest.param(replace(arm(150, 1), slower=(9, 1)), marks=attempt("E12")),
    ],
)
def test_counts_that_cannot_be_prove_nothing_and_a_person_is_asked(canary: Arm) -> None:
    assert decisions(canary) == [Decision.CONTINUE] * 59 + [Decision.UNDECIDED]


@attempt("E10")
def test_of_one_request_that_is_called_true_little_is_learnt() -> None:
    assert decisions(Arm(True, False), Arm(2850, 14))[-1] is Decision.UNDECIDED


@attempt("E06")
def test_a_counter_at_its_limit_has_a_verdict() -> None:
    found = decisions(arm(10**10, 5 * 10**7), arm(10**10, 5 * 10**7), minutes=5)
    assert found[-1] is Decision.ADVANCE


@attempt("E13")
@pytest.mark.parametrize(
    "wrong", [Batch(1, Arm(math.nan, 0), NO_REQUESTS), minute(0, *HEALTHY)], ids=["NaN", "replayed"]
)
def test_one_good_minute_and_unusable_ones_do_not_advance(wrong: Batch) -> None:
    evidence = judge(PLAN, Evidence(), [minute(0, *HEALTHY)], Moment(0, 0, 1)).evidence
    for clock in range(2, 60):
        judged = judge(PLAN, evidence, [wrong], Moment(0, 0, clock))
        evidence = judged.evidence
        assert judged.verdict.decision is Decision.CONTINUE
    assert judge(PLAN, evidence, [], Moment(0, 0, 60)).verdict.decision is Decision.UNDECIDED


@attempt("E23", "E24")
@pytest.mark.parametrize("clock", [10**9, -(10**9)])
def test_a_clock_that_jumps_advances_nothing(clock: int) -> None:
    evidence = judge(PLAN, Evidence(), [minute(0, *HEALTHY)], Moment(0, 0, 1)).evidence
    decision = judge(PLAN, evidence, [], Moment(0, 0, clock)).verdict.decision
    assert decision is (Decision.UNDECIDED if clock > 0 else Decision.CONTINUE)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(10**6, marks=attempt("E14")),
        pytest.param(-1, marks=attempt("E15")),
        pytest.param(math.nan, marks=attempt("E16")),
        pytest.param(2**63, marks=attempt("E17")),
    ],
)
def test_minutes_that_are_not_of_the_rollout_prove_nothing(number: Any) -> None:
    evidence = Evidence()
    for clock in range(1, 60):
        judged = judge(PLAN, evidence, [Batch(number, arm(*HEALTHY[0]), STABLE)], Moment(0, 0, clock))
        evidence = judged.evidence
        assert judged.verdict.decision is Decision.CONTINUE
    assert (evidence.taken, evidence.set_aside) == (Minutes(), 59)


@pytest.mark.parametrize(
    "stable", [pytest.param(STABLE, marks=attempt("E18")), pytest.param(NO_REQUESTS, marks=attempt("E19"))]
)
def test_without_traffic_a_person_is_asked(stable: Arm) -> None:
    assert decisions(NO_REQUESTS, stable) == [Decision.CONTINUE] * 59 + [Decision.UNDECIDED]


@attempt("E20")
def test_a_failing_stable_version_promotes_nothing() -> None:
    assert Decision.ADVANCE not in decisions(arm(*HEALTHY[0]), arm(2850, 570))


CRASH = pytest.param("crash", 1, marks=attempt("E21", "E22"), id="crashes")
HANG = pytest.param("hang", 1, marks=attempt("E21", "E22"), id="hangs for a minute")
LONG_HANG = pytest.param("hang", 8, marks=attempt("E21", "E22"), id="hangs for eight minutes")
GIVEN_UP = pytest.param("given_up", 5, marks=attempt("E21", "E22"), id="clients give up")


def without_answer(way: str, share: float, late: float = 0.0) -> Version:
    crash, hang, given_up = (share if way == name else 0.0 for name in ("crash", "hang", "given_up"))
    return Version(crash=crash, hang=hang, given_up=given_up, late=late)


@pytest.mark.parametrize("at_start", [True, False], ids=["counted at the start", "counted at the end"])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(("way", "idle"), [CRASH, HANG, LONG_HANG, GIVEN_UP])
def test_a_version_that_leaves_requests_unanswered_goes_back_at_once(
    way: str, idle: int, share: float, at_start: bool
) -> None:
    """Never a rollout that ends otherwise, and all of them as soon as the counts of the first minute have settled in
    which the load balancer has returned errors."""
    ended = [
        roll_out(
            Front(without_answer(way, share, 0.01), Version(late=0.01), seed=seed, idle=idle, at_start=at_start), TIMED
        )
        for seed in range(15)
    ]
    assert {(word, step) for word, step, _ in ended} == {(Action.ROLL_BACK, 0)}
    assert max(minutes for _, _, minutes in ended) <= SOON + idle


@attempt("E21", "E22")
@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_without_known_latencies_it_takes_a_few_minutes_more(share: float) -> None:
    """Each request may be in flight for a minute then, which hides so many of them, once."""
    ended = [roll_out(Front(Version(crash=share), Version(), seed=seed), UNTIMED) for seed in range(20)]
    assert {word for word, _, _ in ended} == {Action.ROLL_BACK}
    assert max(minutes for _, _, minutes in ended) <= SOON + 2 / share


@pytest.mark.slow
@pytest.mark.parametrize("requests", [300, 3000])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(("way", "idle"), [CRASH, LONG_HANG])
def test_of_a_thousand_versions_that_do_not_answer_all_but_a_few_go_back(
    way: str, idle: int, share: float, requests: int
) -> None:
    ended = [
        roll_out(Front(without_answer(way, share), Version(), requests, seed, idle, seed % 2 == 0), TIMED)
        for seed in range(1000)
    ]
    soon = idle + (SOON if requests == 3000 else 3 * SOON)
    back = [minutes for word, _, minutes in ended if word is Action.ROLL_BACK]
    assert len(back) >= 990
    assert sum(minutes <= soon for minutes in back) >= 990


@pytest.mark.sample(2)
@pytest.mark.parametrize(("late", "plan"), [(0.0, TIMED), (0.01, TIMED), (0.05, UNTIMED), (0.5, UNTIMED), (0.05, SLOW)])
def test_healthy_versions_are_promoted_whenever_answers_are_counted(late: float, plan: CanaryPlan) -> None:
    ended = [roll_out(Front(Version(late=late), Version(late=late), seed=seed), plan) for seed in range(5)]
    assert [word for word, _, _ in ended] == [Action.ADVANCE] * 5


def test_responses_that_stream_for_minutes_are_in_flight_and_not_unanswered() -> None:
    """The latency of a stream is that of its first byte; the response may be counted when its last byte is sent."""
    streaming = Version(streams=5)
    ended = [roll_out(Front(streaming, streaming, seed=seed, idle=5), TIMED) for seed in range(5)]
    assert [word for word, _, _ in ended] == [Action.ADVANCE] * 5


def test_a_hang_behind_streams_is_found_as_well() -> None:
    hanging = Version(streams=5, hang=0.3)
    ended = [roll_out(Front(hanging, Version(streams=5), seed=seed, idle=5), TIMED) for seed in range(5)]
    assert {word for word, _, _ in ended} == {Action.ROLL_BACK}


@pytest.mark.slow
@pytest.mark.parametrize(
    "version",
    [Version(streams=5), Version(failed=0.002, crash=0.001, hang=0.001, given_up=0.001)],
    ids=["streams", "few without an answer"],
)
def test_of_four_hundred_healthy_versions_at_most_four_go_back(version: Version) -> None:
    ended = [roll_out(Front(version, version, seed=seed, idle=5), TIMED)[0] for seed in range(400)]
    assert ended.count(Action.ROLL_BACK) <= 4
    assert ended.count(Action.ADVANCE) >= 380


@attempt("E22")
def test_a_source_that_does_not_count_what_hangs_asks_a_person() -> None:
    """As the review has run it: no error is told, and three of ten requests have no latency."""
    canary = replace(arm(105, 0), requests=150)
    found = decisions(canary)
    assert found == [Decision.CONTINUE] * 59 + [Decision.UNDECIDED]
    judged = judge(TIMED, Evidence(), [Batch(0, canary, STABLE)], Moment(0, 0, 1))
    assert "45 of 150 good responses have no latency" in explain(TIMED, judged.evidence, (), judged.verdict)


USUAL = InFlight(0.1)  # minutes


def test_requests_in_flight_are_not_unanswered_and_a_counter_gone_wrong_hides_little() -> None:
    opened, found = UnansweredRequests(), []
    for requests, answers in [(100, 90), (100, 100), (100, 110), (100, 90), (100, 95), (100, 100), (0, 0), (20, 20)]:
        opened, unanswered = opened.after(MinuteCounts(requests, answers, returned=5), USUAL)
        found.append(unanswered)
    assert found == [0, 0, 0, 0, 5, 0, 0, 8]
    opened, _ = opened.after(MinuteCounts(100, 10**12), USUAL)  # worth at most a minute's requests
    after_it: list[float] = [0, 0]
    for at in range(2):
        opened, after_it[at] = opened.after(MinuteCounts(100, 0, returned=100), USUAL)
    assert after_it == [0, 77]


def test_open_requests_are_unanswered_when_the_load_balancer_says_so_or_their_time_is_over() -> None:
    opened, found = UnansweredRequests(), []
    for returned in (0, 0, 20, 0, 0):  # of each minute's 100 requests, 30 have no response
        opened, unanswered = opened.after(MinuteCounts(100, 70, returned=returned), InFlight(0.1, longest=3))
        found.append(unanswered)
    assert found == [0, 0, 20, 0, 0]
    for _ in range(6):
        opened, unanswered = opened.after(MinuteCounts(100, 70), InFlight(0.1, longest=3))
        found.append(unanswered)
    assert sum(found) == 11 * 30 - 3 * 100


def test_refused_connections_are_unanswered_requests_at_once() -> None:
    _, unanswered = UnansweredRequests().after(MinuteCounts(100, 97, refused=3), InFlight())
    assert unanswered == 3


def test_a_balance_passes_as_numbers_and_older_ones_are_read() -> None:
    opened, _ = UnansweredRequests().after(MinuteCounts(100, 70, refused=2, returned=9), InFlight(0.1, longest=3))
    assert UnansweredRequests.from_json(opened.as_json()) == opened
    assert UnansweredRequests.from_json([30, 20, 100]) == UnansweredRequests(30, 20, 100)


def test_a_version_that_stops_to_answer_when_it_serves_alone_goes_back() -> None:
    assert FullTrafficTest(1000, 300).fails(PLAN)
    _, unanswered = UnansweredRequests().after(MinuteCounts(1000, 700, returned=300), InFlight(0.01))
    assert FullTrafficTest(1000, int(unanswered)).fails(PLAN)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, marks=attempt("E25")),
        pytest.param(-1, marks=attempt("E26")),
        pytest.param(99, marks=attempt("E27")),
    ],
)
def test_steps_cannot_be_left_out(step: int) -> None:
    with pytest.raises(EvidenceInvalid, match="in order"):
        judge(PLAN, Evidence(), [], Moment(step, 0, 1))


@attempt("E28")
def test_garbage_never_has_a_verdict_and_never_raises() -> None:
    chance = random.Random(17)
    odd: tuple[Any, ...] = (math.nan, math.inf, -1, 0.5, None, "1", 1e300, [], -math.inf)
    for _ in range(2000):
        counts = [chance.choice(odd) for _ in range(3)]
        batch: Any = Batch(
            chance.choice((0, -1, 2**70)), Arm(counts[0], counts[1], counts[2]), Arm(counts[1], counts[2])
        )
        verdict = judge(PLAN, Evidence(), [batch], Moment(0, 0, 1)).verdict
        assert verdict.decision is Decision.CONTINUE
        assert verdict.set_aside


@attempt("E29")
def test_two_thousand_minutes_with_gaps_stay_small_enough_for_a_machine() -> None:
    batches = [minute(number, *HEALTHY) for number in range(0, 4000, 2)]
    evidence = judge(PLAN, Evidence(), batches, Moment(0, 0, 4000)).evidence
    text = replace(course(), evidence=evidence).text()
    assert len(text) < 200_000
    assert RolloutState.from_text(text).evidence == evidence


def test_a_judge_reads_what_an_older_one_remembered() -> None:
    document = json.loads(course().text())
    del document["opened"]
    evidence = judge(PLAN, Evidence(), [minute(0, *HEALTHY)], Moment(0, 0, 1)).evidence.as_json()
    del evidence["baked"]
    for step in evidence["steps"]:
        del step["untimed"]
    again = RolloutState.from_text(json.dumps(document | {"evidence": evidence}))
    assert again.opened == (UnansweredRequests(), UnansweredRequests())
    assert again.evidence.baked == again.evidence.taken == Minutes.of([0])


assert len(LATENCIES) == 7
