"""The template of a rollout: permissions, and bounds on its duration."""

import json
import subprocess
import sysconfig
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.canary.constants import EVALUATIONS_PER_EXECUTION
from nxpipe.pipeline.canary.handler import NO_MIRROR
from nxpipe.pipeline.fleet.agent.shadow import mirror_path
from nxpipe.pipeline.rollout.aws import ListenerRule
from nxpipe.pipeline.rollout.input import schedule_of
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.rollout.stack import archive
from nxpipe.stacks.rollout.state_machine import MIRROR
from tests.stacks.local import template_of
from tests.stacks.rollout_world import SHADOW, rolled

WRITES = {
    "autoscaling:SetDesiredCapacity",
    "autoscaling:UpdateAutoScalingGroup",
    "dynamodb:UpdateItem",
    "elasticloadbalancing:ModifyRule",
    "events:DisableRule",
    "events:EnableRule",
    "events:PutRule",
    "events:PutTargets",
    "lambda:InvokeFunction",
    "logs:CreateLogStream",
    "logs:PutLogEvents",
    "s3:PutObject",
    "sns:Publish",
    "states:StartExecution",
    "states:StopExecution",
}
USES_OF_KEYS = {"kms:Decrypt", "kms:GenerateDataKey"}
HISTORY = 25_000  # events that AWS keeps of an execution; one more, and it fails
STANDBY = 'standby = { instance_type = "g5.xlarge", image = "ami-0123456789abcdef0", size = { min = 1, max = 2 } }'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return template_of(rolled(tmp_path_factory.mktemp("fleet"), more=f'command = ["server"]\n{STANDBY}').rollout)


def of(template: dict[str, Any], type_: str) -> dict[str, dict[str, Any]]:
    found = template["Resources"].items()
    return {id_: value["Properties"] for id_, value in found if value["Type"] == type_}


def test_the_machine_knows_the_limits_of_its_fleet(tmp_path: Path) -> None:
    more = 'command = ["server"]\nidle_timeout = "2m"\ndraining = "20m"'
    machines = of(template_of(rolled(tmp_path, more=more).rollout), "AWS::StepFunctions::StateMachine").values()
    text = json.dumps(next(entry for entry in machines if entry["StateMachineName"].endswith("-rollout")))
    assert '"idle_timeout": 120' in text.replace("\\", "")
    assert '"draining": 1200' in text.replace("\\", "")


def grants(template: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Role, action, resource; a reference as JSON."""
    for policy in of(template, "AWS::IAM::Policy").values():
        for statement in policy["PolicyDocument"]["Statement"]:
            assert statement["Effect"] == "Allow"
            for action in listed(statement["Action"]):
                for resource in listed(statement["Resource"]):
                    yield policy["Roles"][0]["Ref"], action, json.dumps(resource)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def machines(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = of(template, "AWS::StepFunctions::StateMachine").values()
    return {entry["StateMachineName"].rpartition("-")[2]: definition(entry["DefinitionString"]) for entry in found}


def definition(text: Any) -> dict[str, Any]:
    parts = text["Fn::Join"][1]
    document: dict[str, Any] = json.loads("".join(part if isinstance(part, str) else "REFERENCE" for part in parts))
    return document


def test_what_a_machine_changes_it_names(template: dict[str, Any]) -> None:
    """Where a name has a star, only AWS knows the rest of it: executions of one machine, the objects of one folder, a
    group by its name.
    """
    for role, action, resource in grants(template):
        reads = action.partition(":")[2].startswith(("Get", "Describe"))
        assert reads or action in WRITES | USES_OF_KEYS, (role, action)
        if "*" in resource and action in WRITES:
            forms = (":execution:demo-search-watch:*", "rollouts/search/*", "autoScalingGroup:*:autoScalingGroupName/")
            assert any(form in resource for form in forms), (role, action, resource)


def test_weights_are_moved_by_two_machines_at_one_rule_and_listeners_by_none(template: dict[str, Any]) -> None:
    moving = [(role, resource) for role, action, resource in grants(template) if action.endswith(":ModifyRule")]
    assert {role[:12] for role, _ in moving} == {"RolesRelease", "RolesWatchdo"}
    (rule,) = {resource for _, resource in moving}
    assert "FrontWeights" in rule
    assert not [action for _, action, _ in grants(template) if "Listener" in action or "PassRole" in action]


def test_the_judge_may_write_its_log_and_nothing_else(template: dict[str, Any]) -> None:
    (function,) = of(template, "AWS::Lambda::Function").values()
    own = function["Role"]["Fn::GetAtt"][0]
    actions = {action for role, action, _ in grants(template) if role == own}
    assert actions == {"logs:CreateLogStream", "logs:PutLogEvents"}


def test_the_machine_that_looks_can_move_nothing(template: dict[str, Any]) -> None:
    actions = {action for role, action, _ in grants(template) if role.startswith("RolesWatch") and "dog" not in role}
    assert actions & WRITES == {"lambda:InvokeFunction", "s3:PutObject"}


def test_who_releases_starts_this_machine_and_writes_this_record_and_changes_nothing_else(
    template: dict[str, Any],
) -> None:
    (policy,) = of(template, "AWS::IAM::ManagedPolicy").values()
    writes = {}
    for statement in policy["PolicyDocument"]["Statement"]:
        for action in listed(statement["Action"]):
            if not action.partition(":")[2].startswith(("Get", "Describe", "List")):
                writes[action] = json.dumps(statement["Resource"])
    assert writes.keys() == {"states:StartExecution", "dynamodb:UpdateItem"}
    assert writes["states:StartExecution"].endswith(':stateMachine:demo-search-rollout"')
    assert writes["dynamodb:UpdateItem"] == json.dumps({"Fn::GetAtt": [*of(template, "AWS::DynamoDB::Table"), "Arn"]})


def test_every_call_is_bounded_tried_again_and_leads_somewhere_when_it_fails(template: dict[str, Any]) -> None:
    release = machines(template)["rollout"]["States"]
    for name, state in release.items():
        if state["Type"] != "Task":
            continue
        assert state["Retry"], name
        assert "TimeoutSeconds" in state or name == "Watch", name
        assert "Catch" in state or name in ("Refuse", "Unlock"), name  # the watchdog unlocks what they could not


def test_whatever_fails_after_traffic_has_begun_to_move_leads_back(template: dict[str, Any]) -> None:
    release = machines(template)["rollout"]["States"]
    for name in ("Claim", "Shift", "SeeShift", "BeginStep", "Watch", "AskPeople"):
        assert release[name]["Catch"][-1] == {"ErrorEquals": ["States.ALL"], "ResultPath": "$.why", "Next": "Back"}


def test_a_word_to_end_it_is_not_forgotten_between_two_steps(template: dict[str, Any]) -> None:
    release = machines(template)["rollout"]["States"]
    assert "#signal <> :end" in release["Claim"]["Parameters"]["ConditionExpression"]
    assert (release["Claim"]["Catch"][0]["Next"], release["Ended"]["Next"]) == ("SeeOwner", "Back")
    assert release["Mine"]["Default"] == "Unfinished"  # whoever has the lock now moves the traffic


def test_the_commands_find_in_the_machines_text_what_it_moves(template: dict[str, Any]) -> None:
    front = ListenerRule.of(json.dumps(machines(template)["rollout"]))
    assert set(front.colours) == {"blue", "green", "standby"}
    assert (front.rule, set(front.colours["green"])) == ("REFERENCE", {"group", "targets", "series"})


def test_from_the_decision_to_verified_weights_there_are_two_calls(template: dict[str, Any]) -> None:
    release = machines(template)["rollout"]["States"]
    assert release["Because"]["Next"] == "Back"
    assert release["Back"]["Resource"].endswith(":modifyRule")
    assert release["SeeBack"]["Resource"].endswith(":describeRules")
    assert (release["Back"]["Next"], release["SeeBack"]["Next"]) == ("SeeBack", "IsBack")


def test_a_colour_is_emptied_only_after_the_record_names_the_other_one(template: dict[str, Any]) -> None:
    release = machines(template)["rollout"]["States"]
    before = {"Drain": "Promote", "EmptyAgain": "PointBack"}
    for name, pointing in before.items():
        assert release[name]["Resource"].endswith(":updateAutoScalingGroup")
        assert (release[name]["Parameters"]["MinSize"], release[name]["Parameters"]["DesiredCapacity"]) == (0, 0)
        assert [value for value, state in release.items() if leads(state, name)] == [pointing]
        assert release[pointing]["Parameters"]["UpdateExpression"] == "SET #stable = :colour"


def leads(state: dict[str, Any], to: str) -> bool:
    branches = (state, *state.get("Choices", ()), *state.get("Catch", ()))
    return to in [branch.get("Next") for branch in branches] or state.get("Default") == to


def test_all_weights_are_said_each_time(template: dict[str, Any]) -> None:
    for machine in ("rollout", "watchdog"):
        for state in machines(template)[machine]["States"].values():
            if state.get("Resource", "").endswith(":modifyRule"):
                groups = state["Parameters"]["Actions"][0]["ForwardConfig"]["TargetGroups"]
                assert len(groups) == 3  # blue, green, standby
                assert all("Weight" in group or "Weight.$" in group for group in groups)


def test_the_watchdog_shares_no_state_and_no_judge_with_what_it_watches(template: dict[str, Any]) -> None:
    watchdog, release = (machines(template)[name]["States"] for name in ("watchdog", "rollout"))
    assert not [entry for entry in watchdog.values() if ":lambda:" in entry.get("Resource", "")]
    moving = {name for name, value in watchdog.items() if value.get("Resource", "").endswith(":modifyRule")}
    assert moving == {"To-blue", "To-green"}
    assert not moving & release.keys()


def test_a_deployment_can_switch_the_watchdogs_clock_on_but_not_off(template: dict[str, Any]) -> None:
    """CloudFormation sets the state of the template when any text of the rule changes, also during a rollout."""
    rules = {entry["Name"]: entry for entry in of(template, "AWS::Events::Rule").values()}
    assert rules["demo-search-watchdog"]["State"] == "ENABLED"
    assert rules["demo-search-watchdog"]["ScheduleExpression"] == "rate(1 minute)"
    ended = rules["demo-search-ended"]["EventPattern"]["detail"]["status"]
    assert sorted(ended) == ["ABORTED", "FAILED", "TIMED_OUT"]
    (table,) = of(template, "AWS::DynamoDB::Table").values()
    assert table["BillingMode"] == "PAY_PER_REQUEST"


def events(state: dict[str, Any]) -> int:
    """The number of events of one pass in a history, with one failed attempt."""
    if state["Type"] != "Task":
        return 2  # entered and left
    return 6 + 3 if state["Resource"].endswith(".sync:2") else 5 + 3


def test_no_history_grows_beyond_what_aws_keeps(template: dict[str, Any]) -> None:
    """A look at a step is a round in the watch; a step as long as it may be is a round in the release for as many."""
    of_machine = machines(template)
    round_ = sum(map(events, of_machine["watch"]["States"].values()))
    assert EVALUATIONS_PER_EXECUTION * round_ < HISTORY
    release = of_machine["rollout"]["States"]
    steps, minutes_of_a_week = 4, 7 * 24 * 60
    watches = steps * minutes_of_a_week // EVALUATIONS_PER_EXECUTION
    warming = sum(events(release[name]) for name in ("WarmUp", "SeeHealth", "SeeSignal", "CountHealthy", "Warm"))
    tries = max(schedule_of(minute, timedelta(hours=2)).warm_tries for minute in (1, 5, 10, 30, 60))
    others = (steps + 1) * sum(map(events, release.values()))
    assert (warming, tries) == (22, 675)
    assert watches * (events(release["Watch"]) + 2) + tries * warming + others < HISTORY


def test_no_template_knows_how_long_anything_lasts_but_its_input_does(template: dict[str, Any]) -> None:
    for machine in machines(template).values():
        for name, state in machine["States"].items():
            assert "Seconds" not in state, name


def test_requests_are_mirrored_in_a_phase_only_and_every_way_out_ends_it(tmp_path: Path) -> None:
    """In force with the weights of a step; off with those of the next one, on the way back, and by the watchdog."""
    template = template_of(rolled(tmp_path, more=SHADOW).rollout)
    of_machine = {name: machine["States"] for name, machine in machines(template).items()}
    release, watchdog = of_machine["rollout"], of_machine["watchdog"]
    assert release["Mirror"]["Parameters"]["Body"]["mirror.$"] == "$.turn.mirror"
    assert [name for name, state in release.items() if leads(state, "Mirror")] == ["Shifted"]
    assert [name for name, state in release.items() if leads(state, "PointBack")] == ["StopMirror"]
    for states in (release, watchdog):
        assert states["StopMirror"]["Parameters"]["Body"]["mirror"] == NO_MIRROR
    assert [name for name, state in watchdog.items() if leads(state, "Sleep")] == ["StopMirror"]
    assert mirror_path("search").rpartition("/")[2] == MIRROR
    assert mirror_path("search") in release["Mirror"]["Parameters"]["Key"]


def reachable(states: dict[str, Any], begin: str, without: set[str]) -> set[str]:
    """The states that an execution may come to from `begin`, by any choice or failure, if it enters none of these."""
    found, queue = {begin}, [begin]
    while queue:
        state = states[queue.pop()]
        following = {name for name in states if leads(state, name)} - found - without
        found |= following
        queue += following
    return found


def test_no_choice_and_no_failure_leads_from_the_phase_to_a_released_lock_with_the_mirror_on(tmp_path: Path) -> None:
    """Where the rollout itself cannot switch it off it keeps the lock, and the watchdog does."""
    template = template_of(rolled(tmp_path, more=SHADOW).rollout)
    of_machine = {name: machine["States"] for name, machine in machines(template).items()}
    after = reachable(of_machine["rollout"], "BeginStep", {"StopMirror", "Mirror", "Promote"})
    assert "Unlock" not in after
    assert "Unfinished" in after
    assert "Unlock" not in reachable(of_machine["watchdog"], "TakeOver", {"StopMirror"})
    assert "Catch" not in of_machine["watchdog"]["StopMirror"]


def test_the_phase_needs_one_object_of_the_watchdog_and_the_instances_own_port(tmp_path: Path) -> None:
    (folder := tmp_path / "shadow").mkdir()
    plain, shadowed = rolled(tmp_path), rolled(folder, more=SHADOW)
    before, after = (set(grants(template_of(each.rollout))) for each in (plain, shadowed))
    added = {(role[:12], action) for role, action, _ in after - before}
    assert added == {
        ("RolesRelease", "ec2:DescribeInstances"),
        ("RolesWatchdo", "s3:PutObject"),
        ("RolesWatchdo", "kms:GenerateDataKey"),
    }
    assert before <= after
    rules = {
        id_: entry["Properties"]
        for id_, entry in template_of(shadowed.fleet.serve)["Resources"].items()
        if id_ not in template_of(plain.fleet.serve)["Resources"]
    }
    assert {(entry["FromPort"], entry["ToPort"]) for entry in rules.values()} == {(8000, 8000)}


def test_the_archive_of_the_judge_is_its_source_and_has_the_same_bytes_each_time() -> None:
    first, second = archive(), archive()
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert "nxpipe/pipeline/canary/handler.py" in names
    assert all(name.endswith(".py") for name in names)


@pytest.mark.runs
def test_our_rules_and_cfn_lint_find_nothing_to_say(template: dict[str, Any], tmp_path: Path) -> None:
    from nxpipe.stacks.lint.template import Templates, read

    found = lint(Templates((read("demo-rollout-search", template, "us-east-2"),)), Facts(project="demo"))
    assert [str(entry) for entry in found] == []
    written = tmp_path / "template.json"
    written.write_text(json.dumps(template))
    program = Path(sysconfig.get_path("scripts"), "cfn-lint")
    command = [str(program), "--regions", "us-east-2", "--", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
