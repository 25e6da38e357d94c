"""Egress analysis: which AWS services are called from inside the network, and by which role, read from templates.

Callers are roles of instances and containers, agents of AWS Batch, image pulls, and scripts that run at boot. A call
that a service makes on a caller's behalf, such as S3 to KMS, is not a call from the network.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Resources: TypeAlias = Mapping[str, Mapping[str, Any]]  # of one template, by logical id
_Call: TypeAlias = tuple[str, str]  # the call, as text for messages, and the service

# VPC endpoints by service prefix of IAM actions. Names are without com.amazonaws.REGION.
_ENDPOINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "autoscaling": ("autoscaling",),
    "batch": ("batch",),
    "cloudformation": ("cloudformation",),
    "cloudwatch": ("monitoring",),
    "dynamodb": ("dynamodb",),
    "ec2": ("ec2",),
    "ec2messages": ("ec2messages",),
    "ecr": ("ecr.api", "ecr.dkr", "s3"),  # layers are in S3
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
    "sagemaker:InvokeEndpoint": (
        "sagemaker.runtime",
    ),  # an endpoint of its own, although its actions have the prefix `sagemaker`
    "secretsmanager": ("secretsmanager",),
    "sns": ("sns",),
    "sqs": ("sqs",),
    "ssm": ("ssm",),
    "ssmmessages": ("ssmmessages",),
    "states": ("states",),
    "sts": ("sts",),
    "xray": ("xray",),
}
GATEWAYS: Final = ("dynamodb", "s3")  # all others are interface endpoints

# Permissions that are no API calls of the caller: services check iam:PassRole, and EFS checks Client* at the mount.
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
_INSIDE: Final = ("ec2.", "ecs-tasks.", "pods.eks.")  # principals of roles whose users run in subnets

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
_UNKNOWN: Final = "${}"  # in place of a value known at deployment


class Unreachable(Exception):
    """A caller in a closed network uses a service without a known VPC endpoint."""


@dataclass(frozen=True, order=True)
class Need:
    """A VPC endpoint that a resource needs, and the call that needs it."""

    endpoint: str
    caller: str  # the stack and the logical id
    call: str

    def __str__(self) -> str:
        return f"{self.caller} needs the endpoint {self.endpoint} ({self.call})"


def needs(stack: str, resources: Resources) -> Iterator[Need]:
    """VPC endpoints that the resources of one template need in a network without internet access."""
    inside = {name for name, resource in resources.items() if _is(resource, "IAM::Role") and _runs_inside(resource)}
    for name, resource in resources.items():
        caller = f"{stack}/{name}"
        calls = _of_role(caller, resource, resources) if name in inside else _of_other(caller, resource, inside)
        for call, service in calls:
            if service not in _ENDPOINTS:
                raise Unreachable(
                    f"{caller} calls {service} ({call}), which has no endpoint in a closed network; remove the call,"
                    ' or set network.kind to "nat"'
                )
            for endpoint in _ENDPOINTS[service]:
                yield Need(endpoint, caller, call)


def missing_endpoints(required: Collection[Need], endpoints: Collection[str]) -> list[str]:
    """A message for each call whose endpoint is missing."""
    return [f"{need}, which the network does not have" for need in sorted(required) if need.endpoint not in endpoints]


def unused_endpoints(required: Collection[Need], endpoints: Collection[str]) -> list[str]:
    """Endpoints without a caller."""
    return sorted(set(endpoints) - {need.endpoint for need in required})


def _of_role(caller: str, role: Mapping[str, Any], resources: Resources) -> Iterator[_Call]:
    for policy in role["Properties"].get("Policies", ()):
        yield from _of_policy(caller, policy["PolicyDocument"])
    for policy in role["Properties"].get("ManagedPolicyArns", ()):
        for own in _refs([policy]) & set(resources):
            yield from _of_policy(caller, resources[own]["Properties"]["PolicyDocument"])
        if not _refs([policy]):
            yield from _of_managed(caller, _text(policy).rpartition(":policy/")[2])


def _of_other(caller: str, resource: Mapping[str, Any], inside: Collection[str]) -> Iterator[_Call]:
    properties = resource.get("Properties", {})
    if _is(resource, "IAM::Policy", "IAM::ManagedPolicy") and _refs(properties.get("Roles", ())) & set(inside):
        yield from _of_policy(caller, properties["PolicyDocument"])
    elif _is(resource, "Batch::ComputeEnvironment"):
        yield "the ECS agent of its instances", "ecs"
    elif _is(resource, "Batch::JobDefinition"):
        yield "the log of its jobs", "logs"
        for image in _values(properties, "Image"):
            yield from _of_image(caller, _text(image))
    elif _is(resource, "SageMaker::Model") and "VpcConfig" in properties:
        yield "the artifact that SageMaker downloads", "s3"
    elif _is(resource, "EC2::LaunchTemplate"):
        yield from _of_script(caller, _text(properties["LaunchTemplateData"].get("UserData", "")))


def _of_policy(caller: str, document: Mapping[str, Any]) -> Iterator[_Call]:
    for statement in _listed(document["Statement"]):
        on_behalf = "kms:ViaService" in {key for keys in statement.get("Condition", {}).values() for key in keys}
        if statement["Effect"] != "Allow" or on_behalf:
            continue
        for action in _listed(statement["Action"]):
            if action == "*":
                raise Unreachable(
                    f"{caller} has permission for every action, so its calls are unknown; list its actions"
                )
            if not _NEVER_CALLED.fullmatch(action):
                yield action, action if action in _ENDPOINTS else action.partition(":")[0]


def _of_managed(caller: str, policy: str) -> Iterator[_Call]:
    if policy not in _MANAGED:
        raise Unreachable(
            f"{caller} has the policy {policy}, whose actions are unknown here; list the actions in a policy"
        )
    for service in _MANAGED[policy]:
        yield policy, service


def _of_image(caller: str, image: str) -> Iterator[_Call]:
    registry, _, name = image.rpartition("/")
    if ".dkr.ecr." not in registry:
        raise Unreachable(
            f"{caller} runs {image}, whose registry a closed network cannot reach; copy it into the project's own"
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
            raise Unreachable(f"{caller} calls {host} at boot, which a closed network cannot reach; use S3 instead")


def _runs_inside(role: Mapping[str, Any]) -> bool:
    trust = role["Properties"]["AssumeRolePolicyDocument"]
    services = [_text(service) for principal in _values(trust, "Service") for service in _listed(principal)]
    return any(service.startswith(_INSIDE) for service in services)


def _is(resource: Mapping[str, Any], *types: str) -> bool:
    return resource["Type"].removeprefix("AWS::") in types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refs(values: Any) -> set[str]:
    return {value["Ref"] for value in values if isinstance(value, Mapping) and "Ref" in value}


def _values(value: Any, key: str) -> Iterator[Any]:
    """All values of a key, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from _values(inner, key)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, key)


def _text(value: Any) -> str:
    """The text of a template's value, with ${} for parts known at deployment."""
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
