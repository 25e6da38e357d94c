"""Rollouts from start to end on the local AWS: the deployed machines, with a second for a minute."""

import json
import re
from collections.abc import Iterator

import boto3
import pytest

from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.canary.record import replay
from tests.canary.samples import plan_with
from tests.localaws.census import census
from tests.localaws.moto_patches.events import strike
from tests.localaws.visitors import Fleet, visitors
from tests.stacks.local import REGION
from tests.stacks.rollout_faults import meanwhile
from tests.stacks.rollout_world import (
    BAD,
    CLOCK,
    ENDED,
    NEVER_SURE,
    PACE,
    WHO,
    ended,
    evidence,
    fleet_there,
    given_away,
    other,
    outcome,
    passed,
    record,
    signal,
    stable,
    start,
    stop,
    taken_back,
    until,
    wake_the_clock,
    watched,
)

pytestmark = [pytest.mark.runs, pytest.mark.sample(12)]

HEALTHY = {"blue": 0.0, "green": 0.0}
ALARM = "demo-search-refused"
TIMED = plan_with((50, 100), bake_min=1, bake_max=20, latencies=(0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)).as_json()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all tests: each rollout begins where the one before has ended."""
    with fleet_there(tmp_path_factory.mktemp("fleet")) as front:
        yield front


@pytest.fixture
def front(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet that is complete again after each test."""
    for name, value in WHO.items():
        monkeypatch.setenv(name, value)
    yield fleet
    until(lambda: "owner" not in record())
    assert fleet.weights() == {stable(): 100, other(stable()): 0}
    assert fleet.sizes() == {stable(): 2, other(stable()): 0}


def test_every_property_is_told_by_its_service_as_it_was_wanted(front: Fleet) -> None:
    assert [str(entry) for entry in census(REGION) if entry.stack == "demo-rollout-search"] == []


def rolled_back(execution: str) -> str:
    """The reason of the rollback."""
    result = ended(execution)
    found = json.loads(result["output"])
    assert found["outcome"] != "promoted"
    return str(found["reason"])


def test_a_healthy_version_gets_all_traffic_step_by_step(front: Fleet) -> None:
    old, new = stable(), other(stable())
    with visitors(front, errors=HEALTHY) as people:
        assert outcome(start()) == "promoted"
    assert [entry[new] for entry in people.weight_history] == [0, 50, 95, 100]
    assert record() == {"fleet": "search", "stable": new}
    assert front.sizes() == {old: 0, new: 2}


def test_a_bad_version_goes_back_by_two_calls_and_each_look_is_kept(front: Fleet) -> None:
    new = other(stable())
    with visitors(front, errors={stable(): 0.0, new: 0.3}) as people:
        execution = start()
        assert outcome(execution) == "roll_back"
    assert [entry[new] for entry in people.weight_history] == [0, 50, 0]
    states = passed(execution)
    assert states[states.index("Verdict") :][:5] == ["Verdict", "Because", "Back", "SeeBack", "IsBack"]
    plan, *looks = evidence(execution)
    assert [look["number"] for look in looks] == list(range(1, len(looks) + 1))
    assert looks[-1]["word"] == "roll_back"
    again = list(replay(CanaryPlan.from_json(plan), looks))
    assert [entry.wrong for entry in again] == [None] * len(looks)
    assert again[-1].judged.verdict.decision == "roll_back"


@pytest.mark.parametrize("way", ["crashes", "hangs"])
def test_a_version_that_sends_no_response_to_a_third_of_its_requests_goes_back(front: Fleet, way: str) -> None:
    """Its target group has neither 5XX nor response times of these requests: the load balancer returns 502 or 504."""
    new = other(stable())
    share = {new: 0.3}
    crashes, hangs = (share, {}) if way == "crashes" else ({}, share)
    with visitors(front, errors=HEALTHY, crashes=crashes, hangs=hangs) as people:
        execution = start(plan=TIMED)
        assert outcome(execution) == "roll_back"
    assert [entry[new] for entry in people.weight_history] == [0, 50, 0]
    errors = [batch["canary"]["errors"] for look in evidence(execution)[1:] for batch in look["batches"]]
    assert sum(errors) >= 30


def test_a_version_whose_instances_do_not_come_gets_no_traffic(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY, answers=False) as people:
        assert outcome(start()) == "capacity_blocked"
    assert len(people.weight_history) == 1


@pytest.mark.slow
def test_an_alarm_ends_a_rollout_whatever_the_evidence_is(front: Fleet) -> None:
    cloudwatch = boto3.client("cloudwatch")
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE)
        until(lambda: "Watch" in passed(execution))
        cloudwatch.set_alarm_state(AlarmName=ALARM, StateValue="ALARM", StateReason="a test")
        try:
            reason = rolled_back(execution)
            assert re.fullmatch(rf"Rolled back at \d+ % after \d+ min: alarm {BAD} is active; .*", reason)
        finally:
            cloudwatch.set_alarm_state(AlarmName=ALARM, StateValue="OK", StateReason="a test")


@pytest.mark.slow
def test_where_there_is_no_evidence_a_person_decides(front: Fleet) -> None:
    new = other(stable())
    with visitors(front, errors=HEALTHY) as people:
        execution = start(plan=NEVER_SURE)
        until(lambda: passed(execution).count("AskPeople") == 1)
        signal("approve")
        until(lambda: passed(execution).count("AskPeople") == 2)
        signal("abort")
        assert re.match(r"Aborted .*by an operator", rolled_back(execution))
    assert [entry[new] for entry in people.weight_history] == [0, 50, 95, 0]


def test_of_two_rollouts_at_once_one_is_refused_and_disturbs_nothing(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY):
        first = start(plan=NEVER_SURE)
        until(lambda: "owner" in record())
        result = ended(start())
        assert (result["status"], result["error"]) == ("FAILED", "Rollout.Busy")
        assert record()["owner"] == first
        signal("abort")
        ended(first)


@pytest.mark.parametrize("word", ["arrives", pytest.param("is lost", marks=pytest.mark.slow)])
def test_a_rollout_that_is_killed_is_brought_home(front: Fleet, word: str) -> None:
    home, events = front.weights(), boto3.client("events")
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE)
        until(lambda: "Watch" in passed(execution))
        assert front.weights() != home
        if word == "is lost":
            events.disable_rule(Name=ENDED)
        stop(execution)
        ended(execution)
        if word == "is lost":
            strike(CLOCK)
            events.enable_rule(Name=ENDED)
        until(lambda: "owner" not in record())
    assert front.weights() == home
    assert events.describe_rule(Name=CLOCK)["State"] == "DISABLED"


def test_without_a_rollout_the_watchdog_switches_its_clock_off(front: Fleet) -> None:
    """A deployment leaves the clock on."""
    events, home = boto3.client("events"), front.weights()
    wake_the_clock()
    strike(CLOCK)
    until(lambda: events.describe_rule(Name=CLOCK)["State"] == "DISABLED")
    assert front.weights() == home


def test_a_rollout_that_starts_while_the_watchdog_goes_to_rest_keeps_its_clock(front: Fleet) -> None:
    wake_the_clock()
    with meanwhile("watchdog", "LookAgain", given_away):
        strike(CLOCK)
        until(lambda: "owner" in record() and not watched())
    assert boto3.client("events").describe_rule(Name=CLOCK)["State"] == "ENABLED"
    taken_back()


@pytest.mark.slow
def test_a_rollout_that_runs_is_none_of_the_watchdogs_business(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE, pace=PACE | {"poll": 2})
        until(lambda: "Watch" in passed(execution))
        strike(CLOCK)
        assert boto3.client("events").describe_rule(Name=CLOCK)["State"] == "ENABLED"
        signal("abort")
        ended(execution)
    assert passed(execution)[-1] == "Done"


@pytest.mark.slow
def test_who_has_lost_the_lock_leaves_the_traffic_to_whoever_has_it(front: Fleet) -> None:
    home = front.weights()
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE)
        until(lambda: "AskPeople" in passed(execution))
        signal("approve")
        given_away()
        assert ended(execution)["status"] == "FAILED"
        until(lambda: "owner" not in record())  # the watchdog finds that the new owner is none
    assert passed(execution)[-1] == "Unfinished"
    assert "Back" not in passed(execution)
    assert front.weights() == home


@pytest.mark.slow
def test_a_pause_outlasts_the_step_that_it_was_said_in(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE)
        until(lambda: "AskPeople" in passed(execution))
        signal("approve")
        until(lambda: "UseUp" in passed(execution))
        signal("pause")
        until(lambda: passed(execution).count("AskPeople") == 2)
        assert record()["signal"] == "pause"
        signal("abort")
        ended(execution)
