"""As whom SageMaker prepares instances: it fetches image and artifact, joins our network, and tells how it goes.

No container gets to this role where the model is isolated from the network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from aws_cdk import Stack, aws_ec2, aws_iam
from constructs import Construct

from nxpipe.stacks.grants import read_artifacts
from nxpipe.stacks.handles import StoreHandle
from nxpipe.stacks.trust import for_us

_METRICS: Final = ("AWS/SageMaker", "/aws/sagemaker/Endpoints")
_PULL: Final = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_INTERFACES: Final = (
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
)
_LOOKED_AT: Final = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")

_Statement = aws_iam.PolicyStatement


@dataclass(frozen=True)
class Hosted:
    """What one endpoint is made of."""

    image: str  # in ECR, maybe of another account
    artifacts: str  # the prefix in the bucket
    log_group: str
    subnets: Sequence[str]
    group: aws_ec2.ISecurityGroup


def hosting_role(scope: Construct, hosted: Hosted, store: StoreHandle) -> aws_iam.Role:
    role = aws_iam.Role(
        scope,
        "Role",
        description="Taken by SageMaker, to prepare the instances of an endpoint",
        path="/nxpipe/",
        assumed_by=for_us(scope, "sagemaker"),
    )
    read_artifacts(store, role, hosted.artifacts)
    stack = Stack.of(scope)
    for statement in (*_image(stack, hosted), *_network(stack, hosted), *_telling(stack, hosted), _volumes(store)):
        role.add_to_principal_policy(statement)
    return role


def _image(stack: Stack, hosted: Hosted) -> Iterator[aws_iam.PolicyStatement]:
    registry, _, rest = hosted.image.partition("/")
    account, repository = registry.partition(".")[0], rest.partition("@")[0]
    arn = f"arn:{stack.partition}:ecr:{stack.region}:{account}:repository/{repository}"
    yield _Statement(actions=list(_PULL), resources=[arn])
    yield _Statement(actions=["ecr:GetAuthorizationToken"], resources=["*"])


def _network(stack: Stack, hosted: Hosted) -> Iterator[aws_iam.PolicyStatement]:
    """An interface has no name before it is made: meant are those in our subnets."""
    here = f"arn:{stack.partition}:ec2:{stack.region}:{stack.account}"
    subnets = [f"{here}:subnet/{each}" for each in hosted.subnets]
    group = f"{here}:security-group/{hosted.group.security_group_id}"
    in_ours = {"ArnEquals": {"ec2:Subnet": subnets}}
    yield _Statement(actions=list(_INTERFACES), resources=[f"{here}:network-interface/*"], conditions=in_ours)
    yield _Statement(actions=["ec2:CreateNetworkInterface"], resources=[*subnets, group])
    yield _Statement(actions=[f"ec2:Describe{each}" for each in _LOOKED_AT], resources=["*"])


def _telling(stack: Stack, hosted: Hosted) -> Iterator[aws_iam.PolicyStatement]:
    group = f"arn:{stack.partition}:logs:{stack.region}:{stack.account}:log-group:{hosted.log_group}"
    yield _Statement(actions=["logs:CreateLogGroup"], resources=[group])
    lines = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    yield _Statement(actions=lines, resources=[group, f"{group}:log-stream:*"])
    only = {"StringEquals": {"cloudwatch:namespace": list(_METRICS)}}
    yield _Statement(actions=["cloudwatch:PutMetricData"], resources=["*"], conditions=only)


def _volumes(store: StoreHandle) -> aws_iam.PolicyStatement:
    """Instances are in SageMaker's account: their volumes get to the key by a grant, which only AWS may make."""
    for_aws = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    return _Statement(actions=["kms:CreateGrant"], resources=[store.key.key_arn], conditions=for_aws)
