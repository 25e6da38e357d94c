"""The stacks of a smoke test: a hard stop in the account, a probe inside of the network, and tags on all of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.load import load, read_source
from nxpipe.stacks.app import add_stacks
from nxpipe.stacks.names import PROBE, SMOKE_END, SMOKE_TAG
from tests.stacks.local import new_app, template_of

CONFIG = """\
[project]
name = "demo-smoke"
account = "123456789012"
region = "us-east-2"

[[models]]
name = "bert"
id = "acme/tiny-bert"
task = "fill-mask"
target = "inf2.xlarge"

[[fleets]]
kind = "serving"
name = "one"
model = "bert"
channel = "smoke"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 0, desired = 1, max = 1 }
health = "/manifest.json"
"""
Templates = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("smoke") / "nxpipe.toml"
    path.write_text(CONFIG)
    return load(read_source(path, {}))


def stacks_of(config: Config, context: Mapping[str, str]) -> dict[str, Any]:
    app = new_app(context)
    add_stacks(app, config, Path())
    return {stack.node.id: stack for stack in app.node.children if hasattr(stack, "stack_name")}


@pytest.fixture(scope="module")
def smoke(config: Config) -> dict[str, Any]:
    return stacks_of(config, {SMOKE_TAG: "true"})


def resources(stack: Any, kind: str) -> list[dict[str, Any]]:
    found = template_of(stack)["Resources"].values()
    return [entry["Properties"] for entry in found if entry["Type"] == f"AWS::{kind}"]


def test_ec2_auto_scaling_empties_both_groups_at_the_time_of_the_parameter(smoke: dict[str, Any]) -> None:
    stack = smoke["demo-smoke-serve-one"]
    actions = resources(stack, "AutoScaling::ScheduledAction")
    assert {action["AutoScalingGroupName"]["Ref"] for action in actions} == {"Blue", "Green"}
    for action in actions:
        assert action["StartTime"] == {"Ref": SMOKE_END}
        assert (action["MinSize"], action["MaxSize"], action["DesiredCapacity"]) == (0, 0, 0)
    assert "Default" not in template_of(stack)["Parameters"][SMOKE_END]  # a deployment without a time fails


def test_the_probe_reaches_the_load_balancer_and_nothing_else(smoke: dict[str, Any]) -> None:
    stack = smoke["demo-smoke-probe"]
    (function,) = resources(stack, "Lambda::Function")
    assert len(function["VpcConfig"]["SubnetIds"]) == 2
    (group,) = resources(stack, "EC2::SecurityGroup")
    assert "SecurityGroupIngress" not in group
    (way,) = group["SecurityGroupEgress"]
    assert (way["CidrIp"], way["FromPort"], way["ToPort"]) == ("10.20.0.0/16", 80, 80)
    (policy,) = resources(stack, "IAM::Policy")
    allowed = {
        action
        for statement in policy["PolicyDocument"]["Statement"]
        if statement["Effect"] == "Allow"
        for action in statement["Action"]
    }
    denied = [entry for entry in policy["PolicyDocument"]["Statement"] if entry["Effect"] == "Deny"]
    of_logs = {"logs:CreateLogStream", "logs:PutLogEvents"}
    assert {action for action in allowed if not action.startswith("ec2:")} == of_logs
    assert set(denied[0]["Action"]) == allowed - of_logs  # for the code of the function
    assert template_of(stack)["Outputs"][PROBE]["Value"] == {"Ref": "Function"}


def test_each_stack_of_a_smoke_test_has_the_tag_that_permits_its_deletion(smoke: dict[str, Any]) -> None:
    tags = {name: stack.tags.tag_values().get(SMOKE_TAG) for name, stack in smoke.items()}
    assert tags == dict.fromkeys(smoke, "true")
    (bucket, *_) = resources(smoke["demo-smoke-storage"], "S3::Bucket")
    assert {"Key": SMOKE_TAG, "Value": "true"} in bucket["Tags"]


def test_a_project_without_the_context_has_no_hard_stop_no_probe_and_no_tag(config: Config) -> None:
    usual = stacks_of(config, {})
    assert "demo-smoke-probe" not in usual
    serving = usual["demo-smoke-serve-one"]
    assert resources(serving, "AutoScaling::ScheduledAction") == []
    assert SMOKE_END not in template_of(serving).get("Parameters", {})
    assert SMOKE_TAG not in str(template_of(usual["demo-smoke-storage"]))
