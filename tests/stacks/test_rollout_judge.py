"""What the judge's function makes of what the machines tell it: when a rollout may open, what is asked of CloudWatch,
how many requests an answer stands for, and what a look comes to.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.canary.constants import EVALUATIONS_PER_EXECUTION
from nxpipe.pipeline.canary.documents import CanaryError, digest_of
from nxpipe.pipeline.canary.evalues import FullTrafficTest, bets_above
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.handler import Action, ResponseLimits, RolloutState, evaluate, handle
from nxpipe.pipeline.canary.judge import Moment, judge
from nxpipe.pipeline.canary.metrics import (
    PAIR_METRICS,
    Arm,
    PairCounts,
    batches,
    complete,
    minute_of,
    queries,
    start_of,
)
from nxpipe.pipeline.canary.plan import Schedule, ShadowPhase
from tests.canary.samples import plan_with

LATENCIES: Final = (0.1, 0.15, 0.2, 0.3, 0.5, 0.625, 0.8)
PLAN: Final = plan_with((5, 100), bake_min=5, bake_max=60, latencies=LATENCIES)
FLEET: Final = {
    "balancer": "app/front/1",
    "least": 1,
    "alarms": ["bad"],
    "colours": {
        name: {"group": f"demo-{name}", "targets": f"arn:{name}", "series": f"targetgroup/{name}/1"}
        for name in ("blue", "green", "standby")
    },
}
QUIET: Final = {"metric_names": [], "metric_states": [], "composite_names": ["bad"], "composite_states": ["OK"]}
LOUD: Final = QUIET | {"composite_states": ["ALARM"]}
STATE: Final = {
    "from": "blue",
    "to": "green",
    "plan": PLAN.as_json(),
    "weights": {"blue": [100], "green": [0], "standby": [0]},
    "blue": {"desired": 3, "most": 4},
    "green": {"desired": 0, "most": 4},
    "alarms": QUIET,
}


def opened(**changes: Any) -> dict[str, Any]:
    found = {"fleet": FLEET, "state": STATE | changes, "name": "r1", "at": at(0)}
    return handle({"opens": found}, None)


def at(minute: float) -> str:
    """A moment of a rollout that began at the start of a minute."""
    return datetime.fromtimestamp(1_800_000_000 + minute * 60, UTC).isoformat()


def begun(step: int = 0, **changes: Any) -> RolloutState:
    course = RolloutState.from_text(opened(**changes)["carried"])
    return course.begin(step, at(0))


def answer(course: RolloutState, counts: Mapping[str, float], minutes: range) -> list[dict[str, Any]]:
    """CloudWatch's response for these counts per minute; other queries have none."""
    times = [start_of(minute, 60) for minute in minutes]
    return [
        {"Id": query["Id"], "Timestamps": times, "Values": [counts[query["Id"]]] * len(times), "StatusCode": "Complete"}
        if query["Id"] in counts
        else {"Id": query["Id"], "Timestamps": [], "Values": [], "StatusCode": "Complete"}
        for query in course.query(at(0))["queries"]
    ]


def seen(
    course: RolloutState, minute: float, counts: Mapping[str, float] | None = None, **changes: Any
) -> dict[str, Any]:
    metrics = answer(course, counts or {}, course.settled(at(minute)))
    return {"at": at(minute), "metrics": metrics, "alarms": QUIET, "record": {}} | changes


def said(word: str) -> dict[str, Any]:
    return {"Item": {"fleet": {"S": "search"}, "signal": {"S": word}}}


GOOD: Final = {
    f"{arm}_{name}": count
    for arm, count in (("canary", 150.0), ("stable", 2850.0))
    for name in ("requests", "2xx", "timed")
}
BAD: Final = GOOD | {"canary_2xx": 75.0, "canary_5xx": 75.0}


# Opening


def test_a_rollout_opens_with_all_weights_of_each_step_and_the_way_back() -> None:
    result = opened()
    assert result["steps"] == [
        {"blue": 95, "green": 5, "standby": 0},
        {"blue": 5, "green": 95, "standby": 0},
        {"blue": 0, "green": 100, "standby": 0},
    ]
    assert result["home"] == {"blue": 100, "green": 0, "standby": 0}
    assert (result["from"]["group"], result["to"]["targets"], result["size"]) == ("demo-blue", "arn:green", 3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"to": "blue"}, "between blue and green, not from"),
        ({"from": None}, "between blue and green, not from"),
        ({"weights": {"blue": [95], "green": [5], "standby": [0]}}, "blue does not have all traffic"),
        ({"weights": {"blue": [0], "green": [100], "standby": [0]}}, "blue does not have all traffic"),
        ({"weights": {"blue": [], "green": [0], "standby": [0]}}, "blue does not have all traffic"),
        ({"weights": {"blue": [100], "green": [0], "standby": [1]}}, "blue does not have all traffic"),
        ({"green": {"desired": 2, "most": 4}}, "demo-green has 2 instances of an earlier version"),
        ({"green": {"desired": 0, "most": 2}}, "demo-green may have 2 instances and needs 3"),
        ({"alarms": LOUD}, "alarm bad is active before the rollout"),
        ({"alarms": QUIET | {"composite_names": [], "composite_states": []}}, "which is gone"),
        ({"plan": None}, "has no plan"),
        ({"plan": {"steps": []}}, "invalid rollout plan"),
        ({"pace": {"poll": 0}}, "poll is 0"),
        ({"pace": {"haste": 1}}, "haste"),
        ({"pace": {"warm_tries": 10_000}}, "at most"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CanaryError, match=why):
        opened(**changes)


@pytest.mark.parametrize(
    ("described", "limits"),
    [
        ({"idle_timeout": 300, "draining": 600}, ResponseLimits(5, 10)),
        ({"idle_timeout": 90, "draining": 1}, ResponseLimits(2, 2)),
        ({}, ResponseLimits(1, 1)),  # a fleet deployed before the limits were described
    ],
)
def test_the_limits_of_the_fleet_are_those_of_the_rollout(described: dict[str, int], limits: ResponseLimits) -> None:
    answer = handle({"opens": {"fleet": FLEET | described, "state": STATE, "name": "r1", "at": at(0)}}, None)
    assert RolloutState.from_text(answer["carried"]).limits == limits


# CloudWatch


def test_latencies_are_asked_for_as_counts_of_what_took_longer() -> None:
    result = queries("app/front/1", {"canary": "targetgroup/green/1"}, LATENCIES, 60)
    trimmed = [entry["MetricStat"]["Stat"] for entry in result if "slower" in entry["Id"]]
    assert trimmed == ["TC(0.1:)", "TC(0.15:)", "TC(0.2:)", "TC(0.3:)", "TC(0.5:)", "TC(0.625:)", "TC(0.8:)"]
    assert len({entry["Id"] for entry in result}) == len(result)


def test_a_series_without_a_value_has_counted_nothing() -> None:
    course = begun()
    counts = GOOD | {
        "canary_2xx": 138.0,
        "canary_3xx": 4.0,
        "canary_4xx": 3.0,
        "canary_5xx": 2.0,
        "canary_slower0": 9.0,
        "balancer_502": 1.0,
    }
    (missing, there), _ = batches(answer(course, counts, range(7, 8)), (6, 7), LATENCIES, 60, course.opened)
    assert missing.canary == Arm(0, 0, 0, (0,) * 7)
    assert there.canary == Arm(150.0, 3.0, 150.0, (9.0, 0, 0, 0, 0, 0, 0))


@given(st.integers(0, 4 * 10**9), st.sampled_from([1, 10, 60, 300]))
def test_a_minute_is_found_in_its_own_beginning(second: int, period: int) -> None:
    minute = second // period
    assert minute_of(start_of(minute, period), period) == minute


def test_an_answer_in_part_is_taken_for_none_and_asked_for_again() -> None:
    course = begun()
    found = seen(course, 10, GOOD)
    found["metrics"][0]["StatusCode"] = "PartialData"
    assert not complete(found["metrics"])
    after = evaluate(course, found)
    assert (after.taken, after.state.due) == ([], course.due)
    assert len(evaluate(after.state, seen(after.state, 10, GOOD)).taken) == 6


def test_a_minute_is_counted_when_it_has_settled_and_once() -> None:
    """The step's first two are its own shift and a cold one; the last two may still change."""
    course = begun()
    first = evaluate(course, seen(course, 6.5, GOOD))
    second = evaluate(first.state, seen(first.state, 9.5, GOOD))
    minutes = [batch.minute - minute_of(at(0), 60) for batch in (*first.taken, *second.taken)]
    assert minutes == list(range(2, 7))


def test_what_settles_after_a_step_has_ended_is_still_counted() -> None:
    course = begun()
    first = evaluate(course, seen(course, 6.5, GOOD)).state
    next_ = first.begin(1, at(7))
    assert next_.due == first.due
    assert next_.begun > first.begun


def test_no_question_is_about_the_future() -> None:
    """CloudWatch refuses one whose beginning is not before its end, which is the moment of the next look."""
    course = begun()
    for minute in (0, 0.5, 1, 3, 30):
        assert datetime.fromisoformat(course.query(at(minute))["from"]) < datetime.fromisoformat(at(minute))


# The shadow phase

SHADOW_PLAN: Final = plan_with((5, 100), bake_min=5, bake_max=60, shadow=ShadowPhase(10, 5, 30))
SHADOWED: Final = FLEET | {"shadow": {"Project": "demo", "Fleet": "search"}}


def in_shadow(**changes: Any) -> dict[str, Any]:
    state = STATE | {"plan": SHADOW_PLAN.as_json()} | changes
    return handle({"opens": {"fleet": SHADOWED, "state": state, "name": "r1", "at": at(0)}}, None)


def pairs(bad: int, of: int = 200) -> dict[str, float]:
    return dict(zip(PAIR_METRICS, (float(of), float(bad), float(bad), 0.0), strict=True))


ONLY_STABLE: Final = {name: count for name, count in GOOD.items() if name.startswith("stable")}


def test_the_shadow_phase_is_a_step_without_traffic_before_the_others() -> None:
    answer = in_shadow()
    assert [step["green"] for step in answer["steps"]] == [0, 5, 95, 100]
    assert [entry["percent"] for entry in answer["mirrors"]] == [10, 0, 0, 0]
    assert (answer["mirrors"][0]["from"], answer["mirrors"][0]["to"]) == ("blue", "green")
    assert answer["count"] == 4


def test_a_fleet_that_was_deployed_without_the_phase_refuses_it_and_another_plan_mirrors_nothing() -> None:
    with pytest.raises(CanaryError, match="deployed without one"):
        opened(plan=SHADOW_PLAN.as_json())
    assert [entry["percent"] for entry in in_shadow(plan=PLAN.as_json())["mirrors"]] == [0, 0, 0]
    assert "mirrors" not in opened()


def test_pairs_of_other_rollouts_are_not_asked_for_and_none_after_the_first_step() -> None:
    course = RolloutState.from_text(in_shadow()["carried"])
    asked = [course.begin(step, at(0)).query(at(1))["queries"] for step in range(4)]
    named = [[query for query in each if query["Id"] in PAIR_METRICS] for each in asked]
    assert list(map(len, named)) == [4, 4, 0, 0]
    dimensions = named[0][0]["MetricStat"]["Metric"]["Dimensions"]
    assert {"Name": "Rollout", "Value": "r1"} in dimensions


def test_a_version_that_answers_otherwise_goes_back_from_the_phase() -> None:
    course = RolloutState.from_text(in_shadow()["carried"]).begin(0, at(0))
    assert words(course, range(1, 9), ONLY_STABLE | pairs(20))[-1] is Action.ROLL_BACK


def test_a_version_that_answers_alike_goes_on_within_its_own_time() -> None:
    course = RolloutState.from_text(in_shadow()["carried"]).begin(0, at(0))
    found = words(course, range(1, 12), ONLY_STABLE | pairs(0))
    assert found.index(Action.ADVANCE) == 8  # the cold minute, five minutes, and the two until they settle
    assert set(found[:8]) == {Action.CONTINUE}


def test_without_pairs_the_phase_is_undecided_and_says_so() -> None:
    course = RolloutState.from_text(in_shadow()["carried"]).begin(0, at(0))
    found = words(course, range(1, 40), ONLY_STABLE)
    assert found.count(Action.ASK) == 1
    assert Action.ADVANCE not in found
    after = evaluate(course, seen(course, 35, ONLY_STABLE))
    assert "No pair was recorded" in after.reason


def test_a_pair_that_is_late_does_not_hide_the_traffic_of_a_step() -> None:
    course = RolloutState.from_text(in_shadow()["carried"]).begin(0, at(0))
    course = evaluate(course, seen(course, 10, ONLY_STABLE | pairs(0))).state.begin(1, at(10))
    taken = evaluate(course, seen(course, 16, GOOD | pairs(1))).taken
    by_minute = {batch.minute - course.begun: batch for batch in taken}
    assert all((by_minute[number].pairs is None) == (number >= 0) for number in by_minute)
    assert by_minute[0].canary.requests == 150


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1))
def test_pairs_are_fair_to_a_version_that_fails_as_often(discordant: int, ratio: float, share: float) -> None:
    """The e-value of a discordant pair has an expectation of at most 1 for every odds ratio up to 1, in any mixture."""
    plan, odds = SHADOW_PLAN, max(ratio, 1e-6)
    of_canary = odds / (1 + odds)
    for position, bet in bets_above(plan.ratios, 1.0):
        assert bet <= 0
        value = plan.ratios[position]
        won, lost = 2 * value / (1 + value), 2 / (1 + value)
        assert of_canary * won + (1 - of_canary) * lost <= 1 + 1e-12
    alone = round(discordant * share * 0.5)
    batch = PairCounts(discordant, alone, alone, discordant - alone).batch(3, Arm(0, 0))
    judged = judge(plan, Evidence(), [batch], Moment(0, 0, 4)).verdict
    assert judged.worse <= 1e-9  # no more of the discordant pairs are bad for the canary than for the stable version


# A look


def words(course: RolloutState, minutes: range, counts: Mapping[str, float], **changes: Any) -> list[Action]:
    found = []
    for minute in minutes:
        looked = evaluate(course, seen(course, minute, counts, **changes))
        course = looked.state
        found.append(looked.action)
    return found


def test_a_bad_version_goes_back_as_soon_as_its_first_minutes_are_known() -> None:
    assert words(begun(), range(1, 7), BAD)[-1] is Action.ROLL_BACK


def test_an_alarm_and_a_person_end_it_whatever_the_counts_say() -> None:
    course = begun()
    assert evaluate(course, seen(course, 3, GOOD, alarms=LOUD)).action is Action.ROLL_BACK
    assert evaluate(course, seen(course, 3, GOOD, record=said("abort"))).action is Action.ROLL_BACK


def test_an_alarm_that_was_deleted_sounds() -> None:
    course = begun()
    gone = QUIET | {"composite_names": [], "composite_states": []}
    assert "which is gone" in evaluate(course, seen(course, 3, GOOD, alarms=gone)).reason


def test_no_step_ends_before_hung_requests_are_counted() -> None:
    """The first counted minute is the third; a request of it is given up eight minutes later, and counts settle in
    two."""
    course = replace(begun(), limits=ResponseLimits(silent=8, longest=8))
    held = words(course, range(1, 30), GOOD).index(Action.ADVANCE)
    assert held == 2 + 8 + 2
    assert words(begun(), range(1, 30), GOOD).index(Action.ADVANCE) < held
    full = replace(begun(step=2, pace={"final": 1}), limits=ResponseLimits(silent=8, longest=8))
    assert words(full, range(1, 30), {}).index(Action.ADVANCE) == held


def test_a_paused_step_does_not_end_well_but_may_end_badly() -> None:
    assert Action.ADVANCE in words(begun(), range(1, 30), GOOD)
    assert set(words(begun(), range(1, 30), GOOD, record=said("pause"))) == {Action.CONTINUE}
    assert words(begun(), range(1, 7), BAD, record=said("pause"))[-1] is Action.ROLL_BACK


def test_who_has_no_evidence_asks_once_and_goes_back_when_nobody_answers() -> None:
    course = begun(pace={"patience": 10})
    found = words(course, range(1, 80), {})
    assert found.count(Action.ASK) == 1
    asked, back = found.index(Action.ASK), found.index(Action.ROLL_BACK)
    assert back - asked == 10


def test_an_approval_counts_only_where_it_was_asked_for() -> None:
    found = words(begun(), range(1, 70), {}, record=said("approve"))
    assert found.index(Action.ADVANCE) == 61  # the step's hour, and the two minutes before it
    assert set(found[:61]) == {Action.CONTINUE}


def test_what_is_no_signal_changes_nothing() -> None:
    course = begun()
    assert evaluate(course, seen(course, 3, GOOD, record=said("hurry"))).action is Action.CONTINUE


def test_all_traffic_has_to_go_well_for_a_while_and_an_alarm_still_ends_it() -> None:
    course = begun(step=2, pace={"final": 10})
    found = words(course, range(1, 14), {})
    assert found.index(Action.ADVANCE) == 11
    assert evaluate(course, seen(course, 3, alarms=LOUD)).action is Action.ROLL_BACK


def test_a_version_that_serves_alone_goes_back_when_it_fails_more_than_its_objective() -> None:
    course = begun(step=2, pace={"final": 10})
    for bad in ({"canary_5xx": 30}, {"balancer_504": 30}, {"canary_refused": 30}):
        failing = {"canary_requests": 300, "canary_2xx": 270} | bad
        assert words(course, range(1, 14), failing).index(Action.ROLL_BACK) < 5
    within = {"canary_requests": 300, "canary_2xx": 297, "canary_5xx": 3}
    assert Action.ROLL_BACK not in words(course, range(1, 14), within)


def test_an_execution_hands_over_after_so_many_looks() -> None:
    course = replace(begun(pace={"patience": 100_000}), looks_here=EVALUATIONS_PER_EXECUTION - 1)
    found = evaluate(course, seen(course, 3, GOOD))
    assert (found.action, found.state.looks_here) == (Action.WATCH, 0)


# The function


def test_what_is_remembered_passes_as_a_text_that_says_all() -> None:
    course = evaluate(begun(), seen(begun(), 9, GOOD)).state
    assert RolloutState.from_text(course.text()) == course
    alone = replace(course, alone=FullTrafficTest(12, 3))
    assert RolloutState.from_text(alone.text()) == alone
    assert RolloutState.from_text(json.loads(json.dumps(course.text()))).text() == course.text()


def test_each_record_has_the_digest_of_the_one_before() -> None:
    result, records = handle({"begins": {"carried": opened()["carried"], "step": 0, "at": at(0)}}, None), []
    for minute in range(1, 12):
        course = RolloutState.from_text(result["carried"])
        result = handle({"looks": seen(course, minute, GOOD) | {"carried": result["carried"]}}, None)
        records.append(json.loads(result["record"]["text"]))
        assert result["key"] == f"r1/{minute:06}.json"
    assert [record["previous"] for record in records] == [None, *map(digest_of, records[:-1])]


def test_the_function_answers_the_same_to_the_same_question() -> None:
    course = begun()
    document = {"looks": seen(course, 9, GOOD) | {"carried": course.text()}}
    assert handle(document, None) == handle(json.loads(json.dumps(document)), None)


def test_a_pace_is_what_it_says_or_the_usual() -> None:
    assert Schedule.from_json({"poll": 1}) == Schedule(poll=1)
