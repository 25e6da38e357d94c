"""Rollouts with a shadow phase on the local AWS: requests are mirrored, and no traffic moves."""

from collections.abc import Iterator
from typing import Any

import pytest

from nxpipe.pipeline.canary.plan import CanaryPlan, ShadowPhase
from nxpipe.pipeline.canary.record import replay
from tests.canary.samples import plan_with
from tests.localaws.moto_patches.events import strike
from tests.localaws.visitors import Fleet, visitors
from tests.stacks.rollout_world import (
    CLOCK,
    SHADOW,
    WHO,
    ended,
    evidence,
    fleet_there,
    mirror,
    mirrored,
    other,
    outcome,
    passed,
    record,
    signal,
    stable,
    start,
    stop,
    until,
)

pytestmark = [pytest.mark.runs, pytest.mark.sample(12, "shadowed")]

HEALTHY = {"blue": 0.0, "green": 0.0}
OFF = {"mirror": {"percent": 0}, "hosts": []}


def shadowed(**changes: Any) -> dict[str, Any]:
    return plan_with((50, 100), bake_min=1, bake_max=20, shadow=ShadowPhase(50, 2, 20), **changes).as_json()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_there(tmp_path_factory.mktemp("fleet"), SHADOW) as front:
        yield front


@pytest.fixture
def front(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose instances mirror nothing after each test."""
    for name, value in WHO.items():
        monkeypatch.setenv(name, value)
    yield fleet
    until(lambda: "owner" not in record())
    assert fleet.weights() == {stable(): 100, other(stable()): 0}
    assert mirror().get("mirror") in (None, {"percent": 0})


def test_a_version_that_answers_otherwise_is_refused_before_it_gets_traffic(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY) as people, mirrored(differs=0.05) as told:
        execution = start(plan=shadowed())
        assert outcome(execution) == "roll_back"
        until(lambda: told[-1] == OFF)
    assert people.weight_history == [front.weights()]
    (on,) = [entry for entry in told if entry["mirror"]["percent"]]
    assert (on["mirror"]["percent"], on["mirror"]["from"], on["mirror"]["to"]) == (50, stable(), other(stable()))
    assert len(on["hosts"]) == 2
    plan, *looks = evidence(execution)
    again = list(replay(CanaryPlan.from_json(plan), looks))
    assert [entry.wrong for entry in again] == [None] * len(looks)
    assert looks[-1]["reason"].startswith("Refused in the shadow phase after ")


def test_a_version_that_answers_alike_goes_on_to_the_steps_and_nothing_is_mirrored_in_them(front: Fleet) -> None:
    new = other(stable())
    with visitors(front, errors=HEALTHY) as people, mirrored(differs=0.0) as told:
        execution = start(plan=shadowed())
        assert outcome(execution) == "promoted"
        until(lambda: told[-1]["mirror"] == {"percent": 0})
    assert [entry[new] for entry in people.weight_history] == [0, 50, 95, 100]
    assert sum(entry["mirror"]["percent"] > 0 for entry in told) == 1
    looks = evidence(execution)[1:]
    pairs = [
        look["moment"]["step"] for look in looks if "moment" in look and any("pairs" in b for b in look["batches"])
    ]
    assert set(pairs) <= {0, 1}  # counts of the phase that had not settled at its end
    assert 0 in pairs


def test_without_pairs_a_person_is_asked_and_no_traffic_moves(front: Fleet) -> None:
    plan = plan_with((50, 100), bake_min=1, bake_max=20, shadow=ShadowPhase(50, 1, 2)).as_json()
    with visitors(front, errors=HEALTHY) as people:
        execution = start(plan=plan)
        until(lambda: "AskPeople" in passed(execution))
        assert mirror()["mirror"]["percent"] == 50
        signal("abort")
        assert outcome(execution) == "roll_back"
    assert len(people.weight_history) == 1
    assert any("No pair was recorded" in look["reason"] for look in evidence(execution)[1:])
    assert mirror() == OFF


def test_a_rollout_that_is_killed_in_the_phase_mirrors_nothing_any_more(front: Fleet) -> None:
    home = front.weights()
    with visitors(front, errors=HEALTHY) as people:
        execution = start(plan=shadowed())
        until(lambda: mirror().get("mirror", {}).get("percent") == 50)
        stop(execution)
        ended(execution)
        strike(CLOCK)
        until(lambda: "owner" not in record())
    assert mirror() == OFF
    assert [*people.weight_history] == [home]


def test_a_plan_without_the_phase_plays_as_before(front: Fleet) -> None:
    new = other(stable())
    with visitors(front, errors=HEALTHY) as people:
        assert outcome(start()) == "promoted"
    assert [entry[new] for entry in people.weight_history] == [0, 50, 95, 100]
    assert mirror()["mirror"] == {"percent": 0}
