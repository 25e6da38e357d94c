"""Every role may do what its users and machines call, and nothing else; seeded faults of policies are found.

`checks.py` has the duty of each role, and a reason for each granted action that no call needs. `documented.py` has the
calls of AWS's services, which no test can record, and the AWS managed policies that roles may have.
"""

import copy
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest

from tests.iam.checks import duties, faults
from tests.iam.project import Recorded
from tests.iam.templates import Templates

Template: TypeAlias = dict[str, Any]

pytestmark = pytest.mark.sample(2, "iam")  # the calls of a whole project take 15 seconds to record


def test_every_call_is_permitted_and_every_permission_is_needed(project: Recorded) -> None:
    assert faults(project.templates, project.calls) == []


def test_every_role_is_checked_with_calls(project: Recorded) -> None:
    every = duties(project.templates, project.calls)
    assert {duty.name for duty in every} == {
        *("publish", "plan", "promote staging", "promote production"),  # GitHub's jobs
        *(
            "farm job",
            "prove job",
            "instance",
            "pod",
            "training job",
            "training job on spot",
            "training job in a block",
        ),
        *(f"rollout-search {name}" for name in ("RolesRelease", "RolesWatch", "RolesWatchdog", "Waker", "JudgeRole")),
        *(f"cluster {name}" for name in ("ControlRole", "NodeRole", "AddonsAddresses", "AddonsFiles")),
        *(f"{stack} InstanceRole" for stack in ("build-farm", "prove", "train-tune", "train-spare", "train-block")),
        *("cluster NodesreservedClockRole", "train-block ClockRole"),  # schedules of capacity blocks
        *("endpoint-answers Role", "network FlowRole", "observe Publisher", "standby instance"),
    }
    assert len(every) == len(project.templates.roles)
    assert [duty.name for duty in every if not duty.calls] == ["standby instance"]


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


def _resource(stack: Template, start: str) -> dict[str, Any]:
    """The first resource whose logical id begins so."""
    found: dict[str, Any] = next(entry for id_, entry in stack["Resources"].items() if id_.startswith(start))
    return found


def _with(id_: str, type_: str, properties: dict[str, Any]) -> Callable[[Template], None]:
    return lambda stack: stack["Resources"].update({id_: {"Type": type_, "Properties": properties}})


def _managed(start: str, *names: str) -> Callable[[Template], None]:
    """The AWS managed policies of a role."""
    arns = [f"arn:aws:iam::aws:policy/{name}" for name in names]
    return lambda stack: _resource(stack, start)["Properties"].update({"ManagedPolicyArns": arns})


def _trusts(start: str, statement: dict[str, Any]) -> Callable[[Template], None]:
    """Replace elements of the only statement of a role's trust policy."""

    def change(stack: Template) -> None:
        (entry,) = _resource(stack, start)["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        entry.update(statement)

    return change


def _hurried(start: str) -> Callable[[Template], None]:
    return lambda stack: _resource(stack, start).pop("DependsOn") and None


def _by_topic_policy(stack: Template) -> None:
    for target in _resource(stack, "searchlaunches")["Properties"]["Targets"]:
        del target["RoleArn"]


def _any_balancer(stack: Template) -> None:
    """Load balancers of all accounts would write logs."""
    statement = next(entry for entry in _policy(stack, "LogsPolicy") if "logdelivery" in str(entry["Principal"]))
    statement["Resource"] = "arn:aws:s3:::demo-storage-logs/balancers/*"


_EVERYBODY: Final = {"Effect": "Allow", "Action": "sqs:*", "Resource": "*", "Principal": "*"}
_OF_LAMBDA: Final = {
    "AssumeRolePolicyDocument": {
        "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "lambda.amazonaws.com"}}]
    }
}
_RELEASE, _ROLLOUT, _SERVE, _STORE = "demo-release", "demo-rollout-search", "demo-serve-search", "demo-storage"
_CLUSTER, _ENDPOINT = "demo-cluster", "demo-endpoint-answers"
_NODES: Final = ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly")
_LOG_GROUPS: Final = "arn:aws:logs:us-east-2:123456789012:log-group:"
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
        _without_action("RolesWatchdogDefaultPolicy", "autoscaling:UpdateAutoScalingGroup"),
        "RolesWatchdog may not autoscaling:UpdateAutoScalingGroup",
    ),
    "the watchdog may not resume scaling": (
        _ROLLOUT,
        _without_action("RolesWatchdogDefaultPolicy", "autoscaling:ResumeProcesses"),
        "RolesWatchdog may not autoscaling:ResumeProcesses",
    ),
    "a rollout may change all of a group's sizes": (
        _ROLLOUT,
        _without_condition("RolesReleaseDefaultPolicy", "autoscaling:UpdateAutoScalingGroup"),
        "RolesRelease may also autoscaling:UpdateAutoScalingGroup",
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
    "instances cannot write their log (F12)": (
        _SERVE,
        _without_action("RoleDefaultPolicy", "logs:PutLogEvents"),
        "instance may not logs:PutLogEvents",
    ),
    "instances write into every log (F12)": (
        _SERVE,
        _set("RoleDefaultPolicy", "logs:PutLogEvents", "Resource", "arn:aws:logs:us-east-2:123456789012:log-group:*"),
        "instance may also logs:PutLogEvents",
    ),
    "an agent may not read its lifecycle state (S3.9)": (
        _SERVE,
        _without_action("RoleDefaultPolicy", "autoscaling:DescribeAutoScalingInstances"),
        "instance may not autoscaling:DescribeAutoScalingInstances",
    ),
    "a superfluous permission is granted": (
        _SERVE,
        lambda stack: _policy(stack, "RoleDefaultPolicy").append(
            {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"}
        ),
        "instance is granted ec2:DescribeInstances",
    ),
    "a role has no duty": (_ROLLOUT, _with("New", "AWS::IAM::Role", _OF_LAMBDA), "no duty is stated for the role"),
    "a policy is of a type that is not read": (
        _ROLLOUT,
        _with("New", "AWS::SQS::QueuePolicy", {"Queues": ["q"], "PolicyDocument": {"Statement": [_EVERYBODY]}}),
        "which the evaluation does not read",
    ),
    "a resource policy grants what nothing needs": (
        "demo-observe",
        lambda stack: _policy(stack, "TopicPolicy").append(
            {"Effect": "Allow", "Action": "sns:Publish", "Principal": {"Service": "s3.amazonaws.com"}, "Resource": "*"}
        ),
        "lets s3.amazonaws.com sns:Publish",
    ),
    "an AWS managed policy is not accepted": (
        _CLUSTER,
        _managed("ControlRole", "AmazonEKSClusterPolicy"),
        "AmazonEKSClusterPolicy, which is not accepted",
    ),
    "an AWS managed policy is not needed": (
        _CLUSTER,
        _managed("NodeRole", *_NODES, "AmazonEKS_CNI_Policy"),
        "cluster NodeRole has the AWS managed policy AmazonEKS_CNI_Policy, which none of its calls needs",
    ),
    "nodes may not pull images": (
        _CLUSTER,
        _managed("NodeRole", "AmazonEKSWorkerNodePolicy"),
        "cluster NodeRole may not ecr:BatchGetImage",
    ),
    "the agent of ECS may not register its instance": (
        "demo-build-farm",
        _managed("InstanceRole"),
        "build-farm InstanceRole may not ecs:RegisterContainerInstance",
    ),
    "hosts may not fetch the installer of EFA": (
        "demo-train-tune",
        _without_action("InstanceRoleDefaultPolicy", "s3:GetObject"),
        "train-tune InstanceRole may not s3:GetObject",
    ),
    "SageMaker makes interfaces in any subnet": (
        _ENDPOINT,
        _without_condition("RoleDefaultPolicy", "ec2:DeleteNetworkInterface"),
        "endpoint-answers Role may also ec2:CreateNetworkInterface",
    ),
    "SageMaker grants the key to anybody": (
        _ENDPOINT,
        _without_condition("RoleDefaultPolicy", "kms:CreateGrant"),
        "endpoint-answers Role may also kms:CreateGrant",
    ),
    "the log group is named without its streams": (
        _ENDPOINT,
        _set(
            "RoleDefaultPolicy",
            "logs:CreateLogGroup",
            "Resource",
            f"{_LOG_GROUPS}/aws/sagemaker/Endpoints/demo-answers",
        ),
        "endpoint-answers Role may not logs:PutLogEvents",
    ),
    "flow logs may create their group": (
        "demo-network",
        _set("FlowRoleDefaultPolicy", "logs:PutLogEvents", "Action", ["logs:CreateLogGroup", "logs:PutLogEvents"]),
        "network FlowRole may logs:CreateLogGroup, which is documented and not to be granted",
    ),
    "schedules change any queue": (
        "demo-train-block",
        _set("ClockRoleDefaultPolicy", "batch:UpdateJobQueue", "Resource", "*"),
        "train-block ClockRole may also batch:UpdateJobQueue",
    ),
    "EventBridge publishes by the policy of the topic": (
        "demo-observe",
        _by_topic_policy,
        "events may not sns:Publish",
    ),
    "load balancers of any account write logs": (_STORE, _any_balancer, "may s3:PutObject on"),
    "EKS of another account takes the role": (
        _CLUSTER,
        _trusts("ControlRole", {"Condition": {}}),
        "eks may take demo-cluster/ControlRole",
    ),
    "the wrong service takes the role": (
        "demo-network",
        _trusts("FlowRole", {"Principal": {"Service": "logs.amazonaws.com"}}),
        "vpc-flow-logs may not take demo-network/FlowRole",
    ),
    "a machine does not wait for its policy (S3.12)": (
        _ROLLOUT,
        _hurried("Release"),
        "demo-rollout-search/Release takes RolesRelease",
    ),
    "a profile does not wait for its policy (S3.12)": (
        _SERVE,
        _hurried("Profile"),
        "demo-serve-search/Profile takes Role",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_of_a_policy_is_found(project: Recorded, name: str) -> None:
    stack, change, fault = SEEDED[name]
    changed = copy.deepcopy(dict(project.templates.stacks[stack]))
    change(changed)
    found = faults(Templates({**project.templates.stacks, stack: changed}), project.calls)
    assert any(fault in entry for entry in found), found
