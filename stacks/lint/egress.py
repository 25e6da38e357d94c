"""Egress analysis: which AWS services are called from inside the network, and by which role, read from templates.

Callers are the roles of instances and containers, agents of AWS Batch, image pulls, and scripts that run at boot. A
call that a service makes on a caller's behalf, as S3 to KMS, is not a call from the network.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Resources: TypeAlias = Mapping[str, Mapping[str, Any]]  # those of one template
_Call: TypeAlias = tuple[str, str]  # what is done, as a person would look for it, and the service that it is done to

# The endpoints that the actions of a service take, as they are called after com.amazonaws.REGION.
_ENDPOINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "autoscaling": ("autoscaling",),
    "batch": ("batch",),
    "cloudformation": ("cloudformation",),
    "cloudwatch": ("monitoring",),
    "dynamodb": ("dynamodb",),
    "ec2": ("ec2",),
    "ec2messages": ("ec2messages",),
    "ecr": ("ecr.api", "ecr.dkr", "s3"),  # S3 has the layers
    "ecs": ("ecs", "ecs-agent", "ecs-telemetry"),
    "eks": ("eks",),
    "eks-auth": ("eks-auth",),
    "elasticfilesystem": ("elasticfilesystem",),
    "elasticloadbalancing": ("elasticloadbalancing",),
    "events": ("events",),
    "fsx": ("fsx",),
    "kms": ("kms",),
    "logs": ("logs",),
    "s3": ("s3",),
    "sagemaker": ("sagemaker.api",),
    "sagemaker:InvokeEndpoint": ("sagemaker.runtime",),  # a service of its own, whose permissions are not
    "secretsmanager": ("secretsmanager",),
    "sns": ("sns",),
    "sqs": ("sqs",),
    "ssm": ("ssm",),
    "ssmmessages": ("ssmmessages",),
    "states": ("states",),
    "sts": ("sts",),
    "xray": ("xray",),
}
GATEWAYS: Final = ("dynamodb", "s3")  # the others are interfaces

# Permissions that another service looks at when it is called, or a file server when it is mounted in its subnet.
_NEVER_CALLED: Final = re.compile(r"elasticfilesystem:Client\w+|iam:PassRole")

_MANAGED: Final[Mapping[str, tuple[str, ...]]] = {
    "AmazonEC2ContainerRegistryPullOnly": ("ecr",),
    "AmazonEC2ContainerRegistryReadOnly": ("ecr",),
    "AmazonEKS_CNI_Policy": ("ec2",),
    "AmazonEKSWorkerNodeMinimalPolicy": ("ec2", "eks", "eks-auth"),
    "AmazonEKSWorkerNodePolicy": ("ec2", "eks", "eks-auth"),
    "AmazonSSMManagedInstanceCore": ("ec2messages", "ssm", "ssmmessages"),
    "CloudWatchAgentServerPolicy": ("cloudwatch", "ec2", "logs", "ssm"),
    "service-role/AmazonEC2ContainerServiceforEC2Role": ("ecr", "ecs", "logs"),
}
_INSIDE: Final = ("ec2.", "ecs-tasks.", "pods.eks.")  # who takes on the roles of what runs in subnets

_COMMANDS: Final = {
    "efs": "elasticfilesystem",
    "elbv2": "elasticloadbalancing",
    "s3api": "s3",
    "stepfunctions": "states",
}
_COMMAND: Final = re.compile(r"(?<![\w/.:-])aws\s+(?:--[\w-]+(?:[=\s]+[^\s-]\S*)?\s+)*([a-z][a-z0-9-]*)\s+[a-z]")
_URL: Final = re.compile(r"https?://([^\s/:\"'<>]+)")
_LOCAL: Final = ("127.0.0.1", "localhost", "169.254.169.254", "169.254.170.2")
_OF_AWS: Final = re.compile(r"(?:.*\.)?([a-z0-9-]+)\.[^.]+\.amazonaws\.com(?:\.cn)?")
_UNKNOWN: Final = "${}"  # in the place of what is known only at deployment


class Unreachable(Exception):
    """Something inside a closed network calls what no endpoint leads to."""


@dataclass(frozen=True, order=True)
class Need:
    endpoint: str
    caller: str  # the stack and the logical id
    call: str

    def __str__(self) -> str:
        return f"{self.caller} needs the endpoint {self.endpoint} ({self.call})"


def needs(stack: str, resources: Resources) -> Iterator[Need]:
    """All that the resources of one template need of a network without a way out."""
    inside = {name for name, one in resources.items() if _is(one, "IAM::Role") and _runs_inside(one)}
    for name, one in resources.items():
        caller = f"{stack}/{name}"
        calls = _of_role(caller, one, resources) if name in inside else _of_other(caller, one, inside)
        for call, service in calls:
            if service not in _ENDPOINTS:
                raise Unreachable(
                    f"{caller} calls {service} ({call}), which has no endpoint in a closed network; take the call away,"
                    ' or set network.kind to "nat"'
                )
            for endpoint in _ENDPOINTS[service]:
                yield Need(endpoint, caller, call)


def missing_endpoints(wanted: Collection[Need], there: Collection[str]) -> list[str]:
    """A sentence for each call that leads nowhere."""
    return [f"{need}, which the network does not have" for need in sorted(wanted) if need.endpoint not in there]


def unused_endpoints(wanted: Collection[Need], there: Collection[str]) -> list[str]:
    """The endpoints that cost money and that nothing calls."""
    return sorted(set(there) - {need.endpoint for need in wanted})


def _of_role(caller: str, role: Mapping[str, Any], beside: Resources) -> Iterator[_Call]:
    for policy in role["Properties"].get("Policies", ()):
        yield from _of_policy(caller, policy["PolicyDocument"])
    for policy in role["Properties"].get("ManagedPolicyArns", ()):
        for own in _refs([policy]) & set(beside):
            yield from _of_policy(caller, beside[own]["Properties"]["PolicyDocument"])
        if not _refs([policy]):
            yield from _of_managed(caller, _text(policy).rpartition(":policy/")[2])


def _of_other(caller: str, one: Mapping[str, Any], inside: Collection[str]) -> Iterator[_Call]:
    properties = one.get("Properties", {})
    if _is(one, "IAM::Policy", "IAM::ManagedPolicy") and _refs(properties.get("Roles", ())) & set(inside):
        yield from _of_policy(caller, properties["PolicyDocument"])
    elif _is(one, "Batch::ComputeEnvironment"):
        yield "the agent of ECS on its instances", "ecs"
    elif _is(one, "Batch::JobDefinition"):
        yield "the output of its jobs", "logs"
        for image in _values(properties, "Image"):
            yield from _of_image(caller, _text(image))
    elif _is(one, "SageMaker::Model") and "VpcConfig" in properties:
        yield "the artifact that SageMaker fetches", "s3"
    elif _is(one, "EC2::LaunchTemplate"):
        yield from _of_script(caller, _text(properties["LaunchTemplateData"].get("UserData", "")))


def _of_policy(caller: str, document: Mapping[str, Any]) -> Iterator[_Call]:
    for statement in _listed(document["Statement"]):
        on_behalf = "kms:ViaService" in {key for each in statement.get("Condition", {}).values() for key in each}
        if statement["Effect"] != "Allow" or on_behalf:
            continue
        for action in _listed(statement["Action"]):
            if action == "*":
                raise Unreachable(f"{caller} may do everything, so that nobody can say what it calls; list its actions")
            if not _NEVER_CALLED.fullmatch(action):
                yield action, action if action in _ENDPOINTS else action.partition(":")[0]


def _of_managed(caller: str, policy: str) -> Iterator[_Call]:
    if policy not in _MANAGED:
        raise Unreachable(f"{caller} has the policy {policy}, whose calls are not known here; write its actions out")
    for service in _MANAGED[policy]:
        yield policy, service


def _of_image(caller: str, image: str) -> Iterator[_Call]:
    registry, _, name = image.rpartition("/")
    if ".dkr.ecr." not in registry:
        raise Unreachable(
            f"{caller} runs {image}, whose registry a closed network does not reach; copy it into the project's own"
            " repository"
        )
    yield f"the image {name}", "ecr"


def _of_script(caller: str, script: str) -> Iterator[_Call]:
    lines = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    for command in _COMMAND.findall(lines):
        if command != "configure":
            yield f"aws {command}", _COMMANDS.get(command, command)
    for host in _URL.findall(lines):
        if (of_aws := _OF_AWS.fullmatch(host)) is not None:
            yield f"https://{host}", of_aws[1]
        elif host not in _LOCAL and not host.startswith("$"):
            raise Unreachable(f"{caller} calls {host} at boot, which a closed network does not reach; take it from S3")


def _runs_inside(role: Mapping[str, Any]) -> bool:
    trust = role["Properties"]["AssumeRolePolicyDocument"]
    services = [_text(each) for one in _values(trust, "Service") for each in _listed(one)]
    return any(service.startswith(_INSIDE) for service in services)


def _is(one: Mapping[str, Any], *types: str) -> bool:
    return one["Type"].removeprefix("AWS::") in types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refs(values: Any) -> set[str]:
    return {each["Ref"] for each in values if isinstance(each, Mapping) and "Ref" in each}


def _values(value: Any, key: str) -> Iterator[Any]:
    """Whatever stands under a key, at any depth."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == key:
                yield each
            else:
                yield from _values(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, key)


def _text(value: Any) -> str:
    """The text that a value of a template will be, as far as it is known."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        return _UNKNOWN
    (name, inner), *_ = value.items()
    if name == "Fn::Join":
        return str(inner[0]).join(map(_text, inner[1]))
    if name in ("Fn::Base64", "Fn::Sub"):
        return _text(inner[0] if isinstance(inner, list) else inner)
    known = {"AWS::Partition": "aws", "AWS::URLSuffix": "amazonaws.com", "AWS::Region": "region"}
    return known.get(inner, _UNKNOWN) if name == "Ref" else _UNKNOWN
