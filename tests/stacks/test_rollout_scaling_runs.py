"""Target tracking and rollouts on the local AWS: who scales after each end of a rollout."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import boto3
import pytest

from tests.canary.samples import plan_with
from tests.localaws.census import census
from tests.localaws.moto_patches.events import strike
from tests.localaws.visitors import Fleet, visitors
from tests.stacks.fleet_world import SIZE
from tests.stacks.local import REGION
from tests.stacks.rollout_faults import Fault, Kind, Machine, injected, meanwhile
from tests.stacks.rollout_world import (
    CLOCK,
    NEVER_SURE,
    QUICK,
    SCALING,
    WHO,
    deploy_again,
    ended,
    fleet_there,
    other,
    outcome,
    passed,
    record,
    stable,
    start,
    stop,
    until,
    wake_the_clock,
    watched,
)

pytestmark = [pytest.mark.runs, pytest.mark.sample(24)]

HEALTHY: Final = {"blue": 0.0, "green": 0.0}
ONE_STEP: Final = plan_with((100,), bake_min=1, bake_max=20).as_json()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all tests: each rollout begins where the one before has ended."""
    with fleet_there(tmp_path_factory.mktemp("fleet"), SCALING) as front:
        yield front


@pytest.fixture
def front(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet that scales where it serves, before and after each test."""
    for name, value in WHO.items():
        monkeypatch.setenv(name, value)
    strike(CLOCK)  # the deployment has left it on
    until(settled)
    yield fleet
    until(settled)
    assert fleet.weights() == {stable(): 100, other(stable()): 0}
    assert fleet.sizes() == {stable(): 2, other(stable()): 0}


def groups() -> dict[str, tuple[int, bool]]:
    """The minimum of each environment, and whether it scales."""
    names = [f"demo-search-{colour}" for colour in ("blue", "green")]
    found = boto3.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=names)["AutoScalingGroups"]
    return {
        group["AutoScalingGroupName"].rpartition("-")[2]: (
            group["MinSize"],
            "AlarmNotification" not in {process["ProcessName"] for process in group["SuspendedProcesses"]},
        )
        for group in found
    }


def serving() -> dict[str, tuple[int, bool]]:
    return {stable(): (1, True), other(stable()): (0, False)}


def clock() -> str:
    return str(boto3.client("events").describe_rule(Name=CLOCK)["State"])


def settled() -> bool:
    return "owner" not in record() and clock() == "DISABLED" and groups() == serving()


def test_a_promotion_moves_scaling_and_the_minimum_to_the_new_environment(front: Fleet) -> None:
    new = other(stable())
    seen: list[dict[str, tuple[int, bool]]] = []
    with visitors(front, errors=HEALTHY), meanwhile("rollout", "Open", lambda: seen.append(groups())):
        assert outcome(start(plan=ONE_STEP)) == "promoted"
    assert {scales for state in seen for _, scales in state.values()} == {False}
    assert stable() == new
    assert groups() == serving()
    assert clock() == "DISABLED"
    assert [str(entry) for entry in census(REGION) if "ScalingPolicy" in str(entry)] == []


def test_the_candidate_gets_as_many_instances_as_scaling_has_given_the_baseline(front: Fleet) -> None:
    """The configuration has `desired = 2`."""
    scaling, new = boto3.client("autoscaling"), other(stable())
    scaling.set_desired_capacity(AutoScalingGroupName=f"demo-search-{stable()}", DesiredCapacity=3)
    filled: list[int] = []
    with (
        visitors(front, errors=HEALTHY | {new: 0.5}),
        meanwhile("rollout", "Cold", lambda: filled.append(front.sizes()[new])),
    ):
        assert outcome(start(plan=ONE_STEP)) == "roll_back"
    assert filled == [3]
    assert front.sizes() == {stable(): 3, new: 0}
    assert groups() == serving()
    scaling.set_desired_capacity(AutoScalingGroupName=f"demo-search-{stable()}", DesiredCapacity=2)


def test_a_deployment_keeps_the_size_that_scaling_has_set_and_has_a_new_minimum_set(
    front: Fleet, tmp_path: Path
) -> None:
    group = f"demo-search-{stable()}"
    boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=3)
    deploy_again(tmp_path, more=SCALING, size="{ min = 2, desired = 2, max = 5 }")
    assert front.sizes() == {stable(): 3, other(stable()): 0}
    assert (clock(), groups()) == ("ENABLED", serving())
    strike(CLOCK)
    until(lambda: clock() == "DISABLED")
    assert groups() == {stable(): (2, True), other(stable()): (0, False)}
    boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=2)
    deploy_again(tmp_path, more=SCALING, size=SIZE)
    strike(CLOCK)


def test_a_refused_rollout_leaves_the_fleet_scaling(front: Fleet) -> None:
    execution = start(plan={})
    assert ended(execution)["status"] == "FAILED"
    assert "Pause-green" in passed(execution)
    until(settled)


def test_a_killed_rollout_leaves_the_fleet_scaling(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY):
        execution = start(plan=NEVER_SURE)
        until(lambda: "Watch" in passed(execution))
        assert {scales for _, scales in groups().values()} == {False}
        stop(execution)
        until(settled)


def test_the_watchdog_resumes_scaling_that_the_rollout_could_not_resume(front: Fleet) -> None:
    with visitors(front, errors=HEALTHY), injected(Fault("rollout", f"Scale-{other(stable())}", "stays broken")):
        assert outcome(start(plan=ONE_STEP)) == "promoted"
    assert clock() == "ENABLED"
    assert groups() != serving()
    strike(CLOCK)
    until(settled)


def test_a_fleet_that_no_longer_scales_is_rolled_out_as_before(front: Fleet, tmp_path: Path) -> None:
    """The minimum of the environment that served stays when the policies go; it can be emptied all the same."""
    old = stable()
    deploy_again(tmp_path, more=QUICK, size=SIZE)
    assert groups()[old][0] == 1
    with visitors(front, errors=HEALTHY):
        execution = start(plan=ONE_STEP)
        assert outcome(execution) == "promoted"
    assert "Pause-blue" not in passed(execution)
    assert front.sizes() == {old: 0, other(old): 2}
    deploy_again(tmp_path, more=SCALING, size=SIZE)
    strike(CLOCK)


SETTLING: Final = ("SeeServing", "Rest-idle", "Free-idle", "Limit-home", "Scale-home")
STATES: Final[dict[Machine, tuple[str, ...]]] = {
    "rollout": ("Pause-blue", "Pause-green", *SETTLING, "Sleep"),
    "watchdog": ("Hold", *SETTLING, "Unlock", "Idle"),
}
FAULTS: Final = [
    Fault(machine, state, kind) for machine, states in STATES.items() for state in states for kind in get_args(Kind)
]


def settled_after_a_strike() -> bool:
    strike(CLOCK)
    until(lambda: not watched())
    return settled()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_fleet_scales_after_every_failure_at_every_state(front: Fleet, fault: Fault) -> None:
    """Only the clock's strikes help; a call fails or the execution is killed."""
    home = stable()
    state = fault.state.replace("home", home).replace("idle", other(home))
    with injected(replace(fault, state=state)) as met, visitors(front, errors=HEALTHY, answers=False):
        if fault.machine == "rollout":
            ended(start(plan=ONE_STEP))  # without healthy instances it ends before it moves traffic
        else:
            wake_the_clock()
            strike(CLOCK)
        until(met.is_set)
        until(lambda: not watched())
        until(settled_after_a_strike)


def test_while_traffic_is_split_by_hand_the_watchdog_waits_and_then_goes_by_the_weights(front: Fleet) -> None:
    home, before = front.weights(), groups()
    front.weigh({"blue": 50, "green": 50})
    wake_the_clock()
    strike(CLOCK)
    until(lambda: "owner" not in record())
    assert (clock(), groups()) == ("ENABLED", before)
    new = other(stable())
    front.weigh({stable(): 0, new: 100})
    strike(CLOCK)
    until(lambda: clock() == "DISABLED")
    assert groups() == {stable(): (0, False), new: (1, True)}  # who needs the old one's capacity no more sets it to 0
    boto3.client("autoscaling").update_auto_scaling_group(
        AutoScalingGroupName=f"demo-search-{new}", MinSize=0, DesiredCapacity=0
    )
    wake_the_clock()
    front.weigh(home)
    strike(CLOCK)
    until(settled)
