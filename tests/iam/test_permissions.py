"""Every role may do what its users and machines call, and nothing else; seeded faults of its policies are found.

`checks.py` names the covered roles, and gives a reason for each granted action that no recorded call needs.
"""

import copy
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest

from tests.iam.checks import duties, faults
from tests.iam.project import Recorded
from tests.iam.templates import Templates

Template: TypeAlias = dict[str, Any]


def test_every_recorded_call_is_permitted_and_every_permission_is_needed(project: Recorded) -> None:
    assert faults(project.templates, project.calls) == []


def test_every_covered_role_is_checked_with_calls(project: Recorded) -> None:
    assert {duty.name for duty in duties(project.templates, project.calls) if duty.calls} == {
        *("publish", "plan", "promote staging", "promote production"),  # GitHub's jobs
        *("farm job", "instance", "pod", "training job", "training job on spot"),
        *("RolesRelease", "RolesWatch", "RolesWatchdog", "Waker", "JudgeRole"),  # of a rollout
    }


# Seeded faults


def _policy(stack: Template, start: str) -> list[dict[str, Any]]:
    """The statements of the policy whose logical id begins so."""
    (properties,) = (
        entry["Properties"]
        for id_, entry in stack["Resources"].items()
        if id_.startswith(start) and "PolicyDocument" in entry["Properties"]
    )
    statements: list[dict[str, Any]] = properties["PolicyDocument"]["Statement"]
    return statements


def _statement(stack: Template, start: str, action: str) -> dict[str, Any]:
    """The first statement of a policy with an action."""
    return next(entry for entry in _policy(stack, start) if action in (entry["Action"], *entry["Action"]))


def _without_action(start: str, action: str) -> Callable[[Template], None]:
    def change(stack: Template) -> None:
        statement = _statement(stack, start, action)
        if isinstance(statement["Action"], list):
            statement["Action"].remove(action)
        else:
            _policy(stack, start).remove(statement)

    return change


def _in_resource(start: str, action: str, old: str, new: str) -> Callable[[Template], None]:
    """Replace a text in the resources of a statement."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [replaced(entry) for entry in value]
        return value.replace(old, new)

    def change(stack: Template) -> None:
        statement = _statement(stack, start, action)
        before = copy.deepcopy(statement["Resource"])
        statement["Resource"] = replaced(before)
        assert statement["Resource"] != before

    return change


def _set(start: str, action: str, element: str, value: Any) -> Callable[[Template], None]:
    def change(stack: Template) -> None:
        _statement(stack, start, action)[element] = value

    return change


def _without_condition(start: str, action: str) -> Callable[[Template], None]:
    return lambda stack: _statement(stack, start, action).pop("Condition") and None


def _trust(change: Callable[[dict[str, Any]], None]) -> Callable[[Template], None]:
    def changed(stack: Template) -> None:
        (role,) = (entry for id_, entry in stack["Resources"].items() if id_.startswith("PromoteProductionRole"))
        (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        change(statement)

    return changed


def _by_name(statement: dict[str, Any]) -> None:
    """As before the ids: a deleted and registered again OWNER/NAME would be trusted."""
    claims = statement["Condition"]["StringEquals"]
    claims["token.actions.githubusercontent.com:sub"] = "repo:example/models:environment:production"


def _any_environment(statement: dict[str, Any]) -> None:
    claims = statement["Condition"].pop("StringEquals")
    claims["token.actions.githubusercontent.com:sub"] = "repo:example@1/models@2:environment:*"
    statement["Condition"]["StringLike"] = claims


def _detached(stack: Template) -> None:
    for id_, entry in stack["Resources"].items():
        if id_.startswith("RolesReleasing"):
            del entry["Properties"]["Roles"]


def _no_deny(stack: Template) -> None:
    statements = _policy(stack, "ArtifactsPolicy")
    statements.remove(next(entry for entry in statements if "Bool" in entry["Condition"]))


def _any_account(stack: Template) -> None:
    """The confused deputy: alarms of another account would use the topic."""
    for statement in _policy(stack, "TopicPolicy"):
        if statement["Effect"] == "Allow":
            del statement["Condition"]


_RELEASE, _ROLLOUT, _SERVE, _STORE = "demo-release", "demo-rollout-search", "demo-serve-search", "demo-storage"
_ANY_GROUP: Final = "arn:aws:autoscaling:us-east-2:123456789012:autoScalingGroup:*:autoScalingGroupName/*"
SEEDED: Final = {
    "a rollout's channel is missing (F8)": (
        _RELEASE,
        _in_resource("PromoteProductionPolicy", "s3:PutObject", "search--green", "search--grey"),
        "promote production may not s3:PutObject",
    ),
    "the policy of releases is attached to no role (F8)": (
        _ROLLOUT,
        _detached,
        "promote production may not states:StartExecution",
    ),
    "instances read the whole bucket (S3.2)": (
        _SERVE,
        _in_resource("RoleDefaultPolicy", "s3:GetObject", "/models/*", "/*"),
        "instance may also s3:GetObject",
    ),
    "the subject has no ids (F5)": (_RELEASE, _trust(_by_name), "PromoteProductionRole trusts"),
    "the subject is of any environment": (_RELEASE, _trust(_any_environment), "PromoteProductionRole trusts"),
    "a permission to delete pins is missing": (
        _RELEASE,
        _without_action("PromoteStagingPolicy", "s3:DeleteObject"),
        "promote staging may not s3:DeleteObject",
    ),
    "generations may be replaced": (
        _RELEASE,
        _without_condition("PromoteProductionPolicy", "s3:PutObject"),
        "promote production may also s3:PutObject",
    ),
    "the key serves more than S3": (
        _RELEASE,
        _without_condition("ReadPolicy", "kms:Decrypt"),
        "plan may also kms:Decrypt",
    ),
    "jobs of others may be terminated": (
        "demo-build-farm",
        _without_condition("Submitting", "batch:TerminateJob"),
        "publish may also batch:TerminateJob",
    ),
    "an action has a wildcard": (
        _RELEASE,
        _set("ReadPolicy", "s3:GetObject", "Action", "s3:Get*"),
        "plan is granted s3:Get*",
    ),
    "traffic of another fleet may be moved": (
        _ROLLOUT,
        _set("RolesReleaseDefaultPolicy", "autoscaling:SetDesiredCapacity", "Resource", _ANY_GROUP),
        "RolesRelease may also autoscaling:SetDesiredCapacity",
    ),
    "the watchdog may not scale the failed environment down": (
        _ROLLOUT,
        _without_action("RolesWatchdogDefaultPolicy", "autoscaling:SetDesiredCapacity"),
        "RolesWatchdog may not autoscaling:SetDesiredCapacity",
    ),
    "people may write which environment is stable": (
        _ROLLOUT,
        _without_condition("RolesReleasing", "dynamodb:UpdateItem"),
        "promote production may also dynamodb:UpdateItem",
    ),
    "the bucket answers requests without TLS": (_STORE, _no_deny, "answers requests with aws:SecureTransport false"),
    "alarms of any account use the topic": (
        "demo-observe",
        _any_account,
        "cloudwatch may sns:Publish on arn:aws:sns:us-east-2:123456789012:demo-alarms for another account",
    ),
    "a superfluous permission is granted": (
        _SERVE,
        lambda stack: _policy(stack, "RoleDefaultPolicy").append(
            {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"}
        ),
        "instance is granted ec2:DescribeInstances",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_of_a_policy_is_found(project: Recorded, name: str) -> None:
    stack, change, fault = SEEDED[name]
    stacks = {**project.templates.stacks, stack: copy.deepcopy(project.templates.stacks[stack])}
    change(stacks[stack])
    found = faults(Templates(stacks), project.calls)
    assert any(fault in entry for entry in found), found
