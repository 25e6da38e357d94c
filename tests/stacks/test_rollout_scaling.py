"""Target tracking in the template of a rollout: one environment scales, and none during a rollout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.stacks.lint.launches import scaled_groups
from nxpipe.stacks.lint.template import Templates, read
from nxpipe.stacks.rollout.states import State, States
from tests.stacks.local import template_of
from tests.stacks.rollout_faults import machines_of
from tests.stacks.rollout_world import QUICK, SCALING, other, rolled


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return template_of(rolled(tmp_path_factory.mktemp("fleet"), more=SCALING).rollout)


def of(template: dict[str, Any], type_: str) -> dict[str, dict[str, Any]]:
    return {id_: entry for id_, entry in template["Resources"].items() if entry["Type"] == type_}


def test_each_environment_tracks_the_requests_of_its_own_target_group(template: dict[str, Any]) -> None:
    policies = of(template, "AWS::AutoScaling::ScalingPolicy")
    assert len(policies) == 2
    for colour, policy in zip(("blue", "green"), policies.values(), strict=True):
        properties = policy["Properties"]
        tracking = properties["TargetTrackingConfiguration"]
        assert properties["PolicyType"] == "TargetTrackingScaling"
        assert properties["EstimatedInstanceWarmup"] == 60
        assert (tracking["TargetValue"], tracking["DisableScaleIn"]) == (600, False)
        metric = tracking["PredefinedMetricSpecification"]
        assert metric["PredefinedMetricType"] == "ALBRequestCountPerTarget"
        label = json.dumps(metric["ResourceLabel"])
        assert "LoadBalancerFullName" in label
        assert label.index("LoadBalancerFullName") < label.index("TargetGroupFullName")
        assert colour in label
        assert colour in json.dumps(properties["AutoScalingGroupName"]).lower()


def test_the_estimate_of_costs_knows_both_sizes_of_the_environment_that_serves(tmp_path: Path) -> None:
    made = rolled(tmp_path, more=SCALING)
    read_all = [read(stack.stack_name, template_of(stack), "us-east-2") for stack in (made.fleet.serve, made.rollout)]
    found = scaled_groups(Templates(tuple(read_all)))
    assert sorted(found.values()) == [(1, 4), (1, 4)]


def test_launches_of_a_fleet_that_scales_may_overlap_before_the_alarm_on_missing_instances(tmp_path: Path) -> None:
    usual, scaled = (rolled(tmp_path, more=more).fleet.serve.handle.ready_within for more in (QUICK, SCALING))
    assert (usual, scaled) == (40, 80)  # ready_within and ten minutes for the boot


def test_a_fleet_without_scaling_has_no_policy_and_no_permission_for_it(tmp_path: Path) -> None:
    text = json.dumps(template_of(rolled(tmp_path).rollout))
    assert "ScalingPolicy" not in text
    assert "Processes" not in text


def test_the_clock_starts_after_what_it_settles_and_again_when_the_sizes_change(
    template: dict[str, Any], tmp_path: Path
) -> None:
    (clock,) = (entry for id_, entry in of(template, "AWS::Events::Rule").items() if id_ == "Clock")
    assert {*of(template, "AWS::AutoScaling::ScalingPolicy"), "Watchdog"} <= {*clock["DependsOn"]}
    assert "1 to 4" in clock["Properties"]["Description"]
    assert "1 to 4" not in json.dumps(template_of(rolled(tmp_path).rollout))


# The graphs of the machines: what every path does, also those on which calls fail


def successors(state: State) -> set[str]:
    branches = (state, *state.get("Choices", ()), *state.get("Catch", ()))
    return {branch["Next"] for branch in branches if "Next" in branch} | {*filter(None, [state.get("Default")])}


def reached(states: States, start: str, *, without: Callable[[State], bool]) -> set[str]:
    """The states that a path from `start` reaches without a success of such a state; its failures count as paths."""
    found, todo = set[str](), [start]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        state = states[name]
        todo += successors({**state, "Next": None} if without(state) else state) - {None}
    return found


def calling(verb: str, group: str | None = None) -> Callable[[State], bool]:
    def matches(state: State) -> bool:
        parameters = state.get("Parameters", {})
        named = group is None or parameters.get("AutoScalingGroupName") == group
        return str(state.get("Resource", "")).endswith(f":{verb}") and named

    return matches


MACHINES: Final = machines_of(scaling=True)


@pytest.mark.parametrize("colour", ["blue", "green"])
def test_nothing_is_read_or_changed_before_both_environments_are_paused(colour: str) -> None:
    states = MACHINES["rollout"]
    before = reached(states, "Lock", without=calling("suspendProcesses", colour))
    for verb in ("describeAutoScalingGroups", "setDesiredCapacity", "updateAutoScalingGroup", "modifyRule"):
        assert not [name for name in before if calling(verb)(states[name])], verb


@pytest.mark.parametrize("machine", ["rollout", "watchdog"])
def test_the_clock_stays_on_until_an_environment_scales_again(machine: Any) -> None:
    """So each other end of an execution, failure of a call or kill is followed by the watchdog."""
    states = MACHINES[machine]
    unsettled = reached(states, states_start(machine), without=calling("resumeProcesses"))
    assert not [name for name in unsettled if calling("disableRule")(states[name])]
    assert [name for name in states if calling("disableRule")(states[name])]


@pytest.mark.parametrize("machine", ["rollout", "watchdog"])
@pytest.mark.parametrize("colour", ["blue", "green"])
def test_an_environment_scales_only_while_the_other_one_is_paused_and_has_no_traffic(machine: Any, colour: str) -> None:
    states, idle = MACHINES[machine], other(colour)
    resumes = {name for name in states if calling("resumeProcesses", colour)(states[name])}
    assert resumes
    assert not resumes & reached(states, "SeeServing", without=calling("suspendProcesses", idle))
    ways = [name for name, state in states.items() if f"Rest-{idle}" in successors(state)]
    assert ways == [f"Serves-{colour}"]


def states_start(machine: str) -> str:
    return {"rollout": "Lock", "watchdog": "Look"}[machine]
