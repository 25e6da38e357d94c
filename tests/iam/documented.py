"""Calls that AWS's services and agents make with a role, as AWS documents them; none of these is recorded.

Each entry names the page that lists the calls. A call that a page lists and that no role is given has a reason in
`NOT_GRANTED`. AWS managed policies that roles may have are in `ACCEPTED`, each with its reason.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nxpipe.stacks.names import PROJECT_TAG
from tests.iam.calls import Call
from tests.iam.takers import Take, takes
from tests.iam.templates import ACCOUNT, REGION, Role, Templates

_HERE: Final = f"{REGION}:{ACCOUNT}"
_TLS: Final = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}


@dataclass(frozen=True)
class Documented:
    """Calls with one role. `page` is the title of a page of AWS's documentation, after the name of its guide."""

    role: Role
    page: str
    calls: frozenset[Call] = field(repr=False)


# AWS managed policies. Their text is the one that moto ships, which AWS's API returned.
ACCEPTED: Final = {
    "service-role/AmazonEC2ContainerServiceforEC2Role": (
        "Batch names and creates the ECS cluster that its instances join, so its ARN is unknown before; this is the "
        "policy that the page `Amazon ECS instance role` of the Batch guide requires"
    ),
    "AmazonEKSWorkerNodePolicy": (
        "EKS refuses node groups whose role lacks what kubelet, nodeadm and the Pod Identity agent call; it only "
        "describes, and hands out the roles of pods"
    ),
    "AmazonEC2ContainerRegistryPullOnly": (
        "pods name the repositories, in any account, and the policy pulls and does nothing else"
    ),
    "AmazonEKS_CNI_Policy": (
        "the network interfaces of nodes are created at run time and have no tags in advance by which to limit them; "
        "only pods of the service account aws-node take the role"
    ),
}

# Calls that a page lists and that a role is not given, by the name of its duty, with the reason.
NOT_GRANTED: Final = {
    (
        "network FlowRole",
        Call.of("logs:CreateLogGroup", f"arn:aws:logs:{_HERE}:log-group:/nxpipe/demo/flows:log-stream:"),
    ): "the stack creates the log group; one that the service creates again would never expire",
}


def documented(templates: Templates) -> Iterator[Documented]:
    """What each service does with each role that it takes, by the resources that name the role."""
    for take in takes(templates):
        for page, calls in _OF_TYPE.get(take.type, _nothing)(templates, take):
            yield Documented(take.role, page, frozenset(calls))


_Pages = Iterator[tuple[str, set[Call]]]


def _nothing(_: Templates, __: Take) -> _Pages:
    yield from ()


def _everywhere(*actions: str) -> set[Call]:
    return {Call.of(action, "*") for action in actions}


def _pulls(image: str) -> set[Call]:
    """An image of ECR, such as 123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:..."""
    account, region, repository = re.fullmatch(r"(\d+)\.dkr\.ecr\.([^.]+)\.[^/]+/([^@:]+)[@:].*", image).groups()  # type: ignore[union-attr]
    arn = f"arn:aws:ecr:{region}:{account}:repository/{repository}"
    actions = ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")
    return {*_everywhere("ecr:GetAuthorizationToken"), *(Call.of(f"ecr:{action}", arn) for action in actions)}


def _writes_log(group: str, *more: str) -> set[Call]:
    arn = f"arn:aws:logs:{_HERE}:log-group:{group}"
    calls = {Call.of(f"logs:{name}", f"{arn}:log-stream:a/stream") for name in ("CreateLogStream", "PutLogEvents")}
    # IAM compares calls about a group with the ARN of a stream without a name.
    return calls | {Call.of(f"logs:{name}", f"{arn}:log-stream:") for name in more}


# SageMaker

_INTERFACE: Final = ("CreateNetworkInterface", "DeleteNetworkInterface")
_PERMISSION: Final = ("CreateNetworkInterfacePermission", "DeleteNetworkInterfacePermission")
_DESCRIBED: Final = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")


def _model(templates: Templates, take: Take) -> _Pages:
    page = "SageMaker: How to use SageMaker AI execution roles, CreateModel API"
    container, network = take.properties["PrimaryContainer"], take.properties["VpcConfig"]
    bucket, _, prefix = container["ModelDataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
    data = {
        Call.of("s3:GetObject", f"arn:aws:s3:::{bucket}/{prefix}model.neff", _TLS),
        Call.of("s3:ListBucket", f"arn:aws:s3:::{bucket}", {**_TLS, "s3:prefix": prefix}),
        Call.of("kms:Decrypt", _store_key(templates), {"kms:ViaService": f"s3.{REGION}.amazonaws.com"}),
    }
    (endpoint,) = (
        templates.resolve(stack, properties["EndpointName"])
        for stack, _, properties in templates.resources("AWS::SageMaker::Endpoint")
        if stack == take.role.stack
    )
    log = _writes_log(f"/aws/sagemaker/Endpoints/{endpoint}", "CreateLogGroup", "DescribeLogStreams")
    metrics = {
        Call.of("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": namespace})
        for namespace in ("AWS/SageMaker", "/aws/sagemaker/Endpoints")
    }
    yield page, data | _pulls(container["Image"]) | log | metrics
    yield f"{page}, VpcConfig", _interfaces(network)
    yield (
        "SageMaker: CreateEndpointConfig, KmsKeyId",
        {Call.of("kms:CreateGrant", _store_key(templates), {"kms:GrantIsForAWSResource": "true"})},
    )


def _interfaces(network: Mapping[str, Any]) -> set[Call]:
    here = f"arn:aws:ec2:{_HERE}"
    subnets = [f"{here}:subnet/{subnet}" for subnet in network["Subnets"]]
    groups = [f"{here}:security-group/{group}" for group in network["SecurityGroupIds"]]
    calls = {Call.of("ec2:CreateNetworkInterface", part) for part in (*subnets, *groups)}
    for subnet in subnets:
        interface, within = f"{here}:network-interface/eni-0a1b2c3d", {"ec2:Subnet": subnet}
        calls |= {Call.of(f"ec2:{action}", interface, within) for action in (*_INTERFACE, *_PERMISSION)}
    return calls | _everywhere(*(f"ec2:Describe{kind}" for kind in _DESCRIBED))


def _store_key(templates: Templates) -> str:
    return templates.arn("demo-storage", templates.find("AWS::KMS::Key", "demo-storage"))


# EKS


def _control_plane(templates: Templates, take: Take) -> _Pages:
    page = "EKS: Amazon EKS cluster IAM role"
    described = ("Instances", "NetworkInterfaces", "Vpcs", "DhcpOptions", "AvailabilityZones", "InstanceTopology")
    tagged = Call.of(
        "ec2:CreateTags",
        f"arn:aws:ec2:{_HERE}:instance/i-0a1b2c3d",
        # All nodes have the project's tag, by their launch templates and node classes.
        {
            "aws:TagKeys": (f"kubernetes.io/cluster/{take.properties['Name']}",),
            f"aws:ResourceTag/{PROJECT_TAG}": "demo",
        },
    )
    (encryption,) = take.properties["EncryptionConfig"]
    key = Call.of("kms:DescribeKey", encryption["Provider"]["KeyArn"])
    yield page, {tagged, key, *_everywhere(*(f"ec2:Describe{kind}" for kind in described))}


def _nodes(_: Templates, take: Take) -> _Pages:
    cluster = f"arn:aws:eks:{_HERE}:cluster/{take.properties['ClusterName']}"
    described = {Call.of("eks:DescribeCluster", cluster), Call.of("eks-auth:AssumeRoleForPodIdentity", cluster)}
    kinds = ("Instances", "InstanceTypes", "RouteTables", "SecurityGroups", "Subnets", "Volumes", "Vpcs")
    image = f"602401143452.dkr.ecr.{REGION}.amazonaws.com/amazon-k8s-cni:v1"
    pulled = {call for call in _pulls(image) if call.action != "ecr:BatchCheckLayerAvailability"}  # of pushes
    yield "EKS: Amazon EKS node IAM role", described | _everywhere(*(f"ec2:Describe{kind}" for kind in kinds)) | pulled


_ADDRESSES: Final = (
    "AssignPrivateIpAddresses",
    "AttachNetworkInterface",
    "CreateNetworkInterface",
    "DeleteNetworkInterface",
    "DetachNetworkInterface",
    "ModifyNetworkInterfaceAttribute",
    "UnassignPrivateIpAddresses",
)


def _addon(templates: Templates, take: Take) -> _Pages:
    if take.properties["AddonName"] == "vpc-cni":
        interface = f"arn:aws:ec2:{_HERE}:network-interface/eni-0a1b2c3d"
        calls = {Call.of(f"ec2:{action}", interface) for action in (*_ADDRESSES, "CreateTags")}
        described = _everywhere(*(f"ec2:Describe{kind}" for kind in ("Instances", "NetworkInterfaces", "Subnets")))
        yield "EKS: Configure Amazon VPC CNI plugin to use IRSA or Pod Identity", calls | described
    else:
        assert take.properties["AddonName"] == "aws-efs-csi-driver", take.properties
        files = templates.arn("demo-cache", templates.find("AWS::EFS::FileSystem", "demo-cache"))
        kinds = ("AccessPoints", "FileSystems", "MountTargets")
        yield "EFS: Amazon EFS CSI driver", {Call.of(f"elasticfilesystem:Describe{kind}", files) for kind in kinds}
        yield "EFS: Using IAM to control access to file systems", mounts(templates)


def mounts(templates: Templates) -> set[Call]:
    """A mount of the compile cache through each of its access points."""
    stack = "demo-cache"
    files = templates.arn(stack, templates.find("AWS::EFS::FileSystem", stack))
    contexts = [
        {
            "elasticfilesystem:AccessPointArn": templates.arn(at, id_),
            "elasticfilesystem:AccessedViaMountTarget": "true",
            "aws:SecureTransport": "true",
        }
        for at, id_, _ in templates.resources("AWS::EFS::AccessPoint")
    ]
    operations = ("ClientMount", "ClientWrite")
    return {Call.of(f"elasticfilesystem:{name}", files, context) for context in contexts for name in operations}


# Instances of Batch, and flow logs

_AGENT: Final = (
    "DeregisterContainerInstance",
    "Poll",
    "RegisterContainerInstance",
    "StartTelemetrySession",
    "SubmitAttachmentStateChanges",
    "SubmitContainerStateChange",
    "SubmitTaskStateChange",
    "UpdateContainerInstancesState",
)


def _profile(templates: Templates, take: Take) -> _Pages:
    """Instances of Batch run the agent of ECS, which pulls the images of jobs and writes their logs."""
    for stack, _, job in templates.resources("AWS::Batch::JobDefinition"):
        if stack != take.role.stack:
            continue
        resolved = templates.resolve(stack, job)
        container = resolved.get("ContainerProperties") or _of_nodes(resolved)
        cluster = f"arn:aws:ecs:{_HERE}:cluster/a-name-of-Batch"
        instance = cluster.replace(":cluster/", ":container-instance/") + "/0a1b2c3d"
        created = {"ecs:CreateAction": "RegisterContainerInstance"}
        agent = {
            *_everywhere("ecs:DiscoverPollEndpoint", "ec2:DescribeTags"),
            *(Call.of(f"ecs:{action}", instance) for action in _AGENT),
            Call.of("ecs:TagResource", instance, created),
        }
        log = container["LogConfiguration"]["Options"]["awslogs-group"]
        yield "Batch: Amazon ECS instance role", agent
        yield "ECS: Container instance role, private registries", _pulls(container["Image"])
        yield "Batch: Use the awslogs log driver", _writes_log(log)


def _of_nodes(job: Mapping[str, Any]) -> Mapping[str, Any]:
    (nodes,) = job["NodeProperties"]["NodeRangeProperties"]
    container: Mapping[str, Any] = nodes["Container"]
    return container


def _flow_log(_: Templates, take: Take) -> _Pages:
    group = take.properties["LogGroupName"]
    page = "VPC: IAM role for publishing flow logs to CloudWatch Logs"
    yield page, _writes_log(group, "DescribeLogStreams") | _everywhere("logs:DescribeLogGroups")


_OF_TYPE: Final = {
    "AWS::EC2::FlowLog": _flow_log,
    "AWS::EKS::Addon": _addon,
    "AWS::EKS::Cluster": _control_plane,
    "AWS::EKS::Nodegroup": _nodes,
    "AWS::IAM::InstanceProfile": _profile,
    "AWS::SageMaker::Model": _model,
}


def compile_cache(templates: Templates, stack: str) -> set[Call]:
    """The compile cache of AWS's libraries in S3, whose address instances have in their environment.

    Page: Neuron persistent cache, NEURON_COMPILE_CACHE_URL.
    """
    (text,) = (
        str(templates.resolve(stack, properties["LaunchTemplateData"]["UserData"]))
        for at, id_, properties in templates.resources("AWS::EC2::LaunchTemplate")
        if at == stack and id_.startswith("Template")
    )
    found = re.search(r"NEURON_COMPILE_CACHE_URL\W+s3://([^/\s'\"]+)/([\w./-]+)", text)
    assert found, text
    bucket, prefix = found.groups()
    listed = Call.of("s3:ListBucket", f"arn:aws:s3:::{bucket}", {**_TLS, "s3:prefix": f"{prefix}/x"})
    objects = {Call.of(f"s3:{name}", f"arn:aws:s3:::{bucket}/{prefix}/x", _TLS) for name in ("GetObject", "PutObject")}
    return {listed, *objects}
