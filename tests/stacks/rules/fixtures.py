"""For each rule a conforming template, and every violation of it: one property set or removed."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.stacks.lint.finding import Facts, KnownImage, Window

GONE: Final = object()
AMI: Final = "ami-0a1b2c3d4e5f60718"
BLOCK: Final = "cr-0a1b2c3d4e5f60718"
REGION: Final = "us-east-2"

FACTS: Final = Facts(
    today=date(2026, 11, 21),
    now=datetime(2026, 11, 21, tzinfo=UTC),
    blocks={
        BLOCK: Window(datetime(2026, 12, 1, 11, 30, tzinfo=UTC), datetime(2026, 12, 8, 10, 45, tzinfo=UTC)),
    },
    images={
        AMI: KnownImage(REGION, date(2027, 5, 1)),
        "ami-0000000000000001": KnownImage(REGION, date(2026, 11, 21)),
        "ami-0000000000000002": KnownImage("us-west-2", date(2027, 5, 1)),
    },
)


@dataclass(frozen=True)
class Break:
    """A value for a path of the template, and the text of the resulting finding."""

    path: str
    value: Any
    says: str

    def of(self, resources: Mapping[str, Any]) -> dict[str, Any]:
        broken = deepcopy(dict(resources))
        *way, last = [int(step) if step.isdigit() else step for step in self.path.split("/")]
        inner: Any = broken
        for step in way:
            inner = inner.setdefault(step, {}) if isinstance(inner, dict) and isinstance(step, str) else inner[step]
        if self.value is GONE:
            del inner[last]
        else:
            inner[last] = self.value
        return broken


@dataclass(frozen=True)
class Fixture:
    rule: str
    kept: Mapping[str, Any]
    breaks: tuple[Break, ...] = field(default=())


def resource(type_: str, /, **properties: Any) -> dict[str, Any]:
    return {"Type": type_, "Properties": properties}


def interfaces(type_: str = "trn1.32xlarge", kind: str = "efa-only") -> list[dict[str, Any]]:
    count = INSTANCES[type_].efa_interfaces or 0
    group = {"Fn::GetAtt": ["Efa", "GroupId"]}
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 1 if card else 0,
            "InterfaceType": kind if card else "efa",
            "Groups": [group],
        }
        for card in range(count)
    ]


def launch(**data: Any) -> dict[str, Any]:
    return resource("AWS::EC2::LaunchTemplate", LaunchTemplateData=data)


def group(**properties: Any) -> dict[str, Any]:
    specification = {
        "LaunchTemplateId": {"Ref": "Launch"},
        "Version": {"Fn::GetAtt": ["Launch", "LatestVersionNumber"]},
    }
    given = {"LaunchTemplate": specification, "MinSize": "0", "MaxSize": "4", "VPCZoneIdentifier": ["subnet-1"]}
    return resource("AWS::AutoScaling::AutoScalingGroup", **(given | properties))


def environment(**compute: Any) -> dict[str, Any]:
    given = {"LaunchTemplate": {"LaunchTemplateId": {"Ref": "Launch"}}, "Subnets": ["subnet-1"]}
    return resource("AWS::Batch::ComputeEnvironment", State="ENABLED", ComputeResources=given | compute)


_DATA = "Launch/Properties/LaunchTemplateData"
_NODES = {
    "Launch": launch(InstanceType="trn1.32xlarge", NetworkInterfaces=interfaces()),
    "Nodes": group(),
    "Efa": resource(
        "AWS::EC2::SecurityGroup", SecurityGroupEgress=[{"IpProtocol": "icmp", "CidrIp": "255.255.255.255/32"}]
    ),
    "In": resource(
        "AWS::EC2::SecurityGroupIngress",
        GroupId={"Fn::GetAtt": ["Efa", "GroupId"]},
        SourceSecurityGroupId={"Fn::GetAtt": ["Efa", "GroupId"]},
        IpProtocol="-1",
    ),
    "Out": resource(
        "AWS::EC2::SecurityGroupEgress",
        GroupId={"Fn::GetAtt": ["Efa", "GroupId"]},
        DestinationSecurityGroupId={"Fn::GetAtt": ["Efa", "GroupId"]},
        IpProtocol="-1",
    ),
}
_BLOCK = {
    "Launch": launch(
        InstanceType="trn1.32xlarge",
        InstanceMarketOptions={"MarketType": "capacity-block"},
        CapacityReservationSpecification={"CapacityReservationTarget": {"CapacityReservationId": BLOCK}},
    ),
    "Nodes": group(DesiredCapacity="0"),
    "Fill": resource(
        "AWS::AutoScaling::ScheduledAction",
        AutoScalingGroupName={"Ref": "Nodes"},
        DesiredCapacity=4,
        StartTime="2026-12-01T11:30:00Z",
    ),
    "Drain": resource(
        "AWS::AutoScaling::ScheduledAction",
        AutoScalingGroupName={"Ref": "Nodes"},
        DesiredCapacity=0,
        StartTime="2026-12-08T10:45:00Z",
    ),
}


def _switch(state: str, at: str) -> dict[str, Any]:
    document = {"Fn::Join": ["", ['{"JobQueue":"', {"Ref": "Queue"}, f'","State":"{state}"}}']]}
    target = {"Arn": "arn:aws:scheduler:::aws-sdk:batch:updateJobQueue", "Input": document}
    return resource("AWS::Scheduler::Schedule", ScheduleExpression=f"at({at})", Target=target)


_BATCH_BLOCK = {
    "Launch": _BLOCK["Launch"],
    "Environment": environment(),
    "Queue": resource(
        "AWS::Batch::JobQueue",
        State="DISABLED",
        ComputeEnvironmentOrder=[{"ComputeEnvironment": {"Ref": "Environment"}, "Order": 1}],
    ),
    "Fill": _switch("ENABLED", "2026-12-01T11:30:00"),
    "Drain": _switch("DISABLED", "2026-12-08T10:45:00"),
}


def _sized(count: int, at: str) -> dict[str, Any]:
    document = {"Fn::Join": ["", ['{"ClusterName":"', {"Ref": "Cluster"}, _CHANGE % count]]}
    target = {"Arn": "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig", "Input": document}
    return resource("AWS::Scheduler::Schedule", ScheduleExpression=f"at({at})", Target=target)


_CHANGE = '","NodegroupName":"train","ScalingConfig":{"MinSize":0,"MaxSize":4,"DesiredSize":%d}}'
_CLUSTER_BLOCK = {
    "Launch": _BLOCK["Launch"],
    "Nodes": resource(
        "AWS::EKS::Nodegroup",
        NodegroupName="train",
        LaunchTemplate={"Id": {"Ref": "Launch"}},
        Subnets=["subnet-1"],
        ScalingConfig={"MinSize": 0, "DesiredSize": 0, "MaxSize": 4},
    ),
    "Fill": _sized(4, "2026-12-01T11:30:00"),
    "Drain": _sized(0, "2026-12-08T10:45:00"),
}
_POOL = {
    "Launch": launch(InstanceType="inf2.xlarge"),
    "Nodes": group(),
    "Pool": resource("AWS::AutoScaling::WarmPool", AutoScalingGroupName={"Ref": "Nodes"}, MinSize=1),
}
_SECRET = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
_HOST = {"Launch": launch(InstanceType="inf2.xlarge", ImageId=AMI, MetadataOptions=_SECRET), "Nodes": group()}
_CONTAINERS = {
    "Launch": launch(MetadataOptions={"HttpTokens": "required", "HttpPutResponseHopLimit": 2}),
    "Environment": environment(),
}
_CLOSED = {
    "Vpc": resource("AWS::EC2::VPC", CidrBlock="10.20.0.0/16"),
    "Role": resource(
        "AWS::IAM::Role",
        AssumeRolePolicyDocument={
            "Statement": [
                {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}
            ]
        },
    ),
    "Policy": resource(
        "AWS::IAM::Policy",
        Roles=[{"Ref": "Role"}],
        PolicyDocument={
            "Statement": [
                {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": "arn:aws:s3:::artifacts/*"},
                {
                    "Effect": "Allow",
                    "Action": "autoscaling:CompleteLifecycleAction",
                    "Resource": "arn:aws:autoscaling:g",
                },
            ]
        },
    ),
    "S3": resource(
        "AWS::EC2::VPCEndpoint",
        ServiceName={"Fn::Join": ["", ["com.amazonaws.", {"Ref": "AWS::Region"}, ".s3"]]},
    ),
    "Scaling": resource("AWS::EC2::VPCEndpoint", ServiceName="com.amazonaws.us-east-2.autoscaling"),
}
_OPEN = {
    "Group": resource(
        "AWS::EC2::SecurityGroup", SecurityGroupIngress=[{"IpProtocol": "tcp", "FromPort": 443, "CidrIp": "10.0.0.0/8"}]
    ),
    "In": resource("AWS::EC2::SecurityGroupIngress", IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="10.0.0.0/8"),
    "Balancer": resource("AWS::ElasticLoadBalancingV2::LoadBalancer", Scheme="internal"),
    "Service": resource(
        "AWS::EC2::VPCEndpointServicePermissions",
        ServiceId="vpce-svc-1",
        AllowedPrincipals=["arn:aws:iam::123456789012:root"],
    ),
    "Cluster": resource("AWS::EKS::Cluster", ResourcesVpcConfig={"EndpointPublicAccess": False}),
    "Subnet": resource("AWS::EC2::Subnet", MapPublicIpOnLaunch=False),
    "Launch": launch(NetworkInterfaces=[{"DeviceIndex": 0}]),
}
_LISTENERS = {
    "Https": resource("AWS::ElasticLoadBalancingV2::Listener", Protocol="HTTPS", DefaultActions=[{"Type": "forward"}]),
    "Http": resource(
        "AWS::ElasticLoadBalancingV2::Listener",
        Protocol="HTTP",
        DefaultActions=[{"Type": "redirect", "RedirectConfig": {"Protocol": "HTTPS", "StatusCode": "HTTP_301"}}],
    ),
}
_DENIED = {
    "Effect": "Deny",
    "Principal": {"AWS": "*"},
    "Action": "s3:*",
    "Resource": "*",
    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
}
_DATA_KEPT = {
    "Bucket": resource(
        "AWS::S3::Bucket",
        PublicAccessBlockConfiguration=dict.fromkeys(
            ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
        ),
    ),
    "Policy": resource("AWS::S3::BucketPolicy", Bucket={"Ref": "Bucket"}, PolicyDocument={"Statement": [_DENIED]}),
    "Files": resource("AWS::EFS::FileSystem", Encrypted=True, FileSystemPolicy={"Statement": [_DENIED]}),
}
_GRANTED = {
    "Role": resource(
        "AWS::IAM::Role",
        ManagedPolicyArns=["arn:aws:iam::aws:policy/service-role/AWSBatchServiceRole"],
        Policies=[
            {
                "PolicyDocument": {
                    "Statement": [
                        {"Effect": "Allow", "Action": ["ec2:Describe*", "cloudwatch:PutMetricData"], "Resource": "*"},
                        {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::artifacts/*"},
                        {"Effect": "Deny", "Action": "s3:DeleteObject", "Resource": "*"},
                        {
                            "Effect": "Allow",
                            "Action": "ec2:CreateNetworkInterface",
                            "Resource": "arn:aws:ec2:us-east-2:1:network-interface/*",
                            "Condition": {"ArnEquals": {"ec2:Subnet": ["arn:aws:ec2:us-east-2:1:subnet/subnet-1"]}},
                        },
                        {
                            "Effect": "Allow",
                            "Action": "batch:TerminateJob",
                            "Resource": "arn:aws:batch:us-east-2:1:job/*",
                            "Condition": {"StringEquals": {"aws:ResourceTag/nxpipe:project": "demo"}},
                        },
                    ]
                }
            }
        ],
    ),
}
_GRANT = "Role/Properties/Policies/0/PolicyDocument/Statement"


def _key(name: str) -> str:
    return f"arn:aws:kms:{REGION}:123456789012:key/{name}"


def _signs(name: str) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": ["kms:Sign"], "Resource": [_key(name), _key(f"{name}-old")]}
    return resource("AWS::IAM::ManagedPolicy", PolicyDocument={"Statement": [statement]})


_WEAK: Final = {"Fn::GetStackOutput": {"StackName": "network", "OutputName": "Vpc"}}
FIXTURES: Final = (
    Fixture(
        "NXP-EFA-1",
        _NODES,
        (
            Break(f"{_DATA}/NetworkInterfaces/0/InterfaceType", "efa-only", "card 0 is of type efa-only"),
            Break(f"{_DATA}/NetworkInterfaces/0/DeviceIndex", 1, "on card 0 has device index 1; it must be 0"),
            Break(f"{_DATA}/NetworkInterfaces/3/DeviceIndex", 0, "card 3 has device index 0; it must be 1"),
            Break(f"{_DATA}/NetworkInterfaces/3/InterfaceType", "interface", "card 3 is of type interface"),
            Break(
                f"{_DATA}/NetworkInterfaces/7", GONE, "has network cards 0 to 7, but the interfaces are on cards 0, 1"
            ),
            Break(f"{_DATA}/InstanceType", "trn1n.32xlarge", "one interface for each of the 16 cards"),
            Break(f"{_DATA}/InstanceType", "inf2.xlarge", "inf2.xlarge has no Elastic Fabric Adapter"),
            Break(f"{_DATA}/NetworkInterfaces/0/AssociatePublicIpAddress", True, "no public address to an instance"),
            Break(_DATA, {"InstanceType": "trn1.32xlarge", "Placement": {"GroupName": "near"}}, "collectives use TCP"),
        ),
    ),
    Fixture(
        "NXP-EFA-2",
        _NODES,
        (
            Break(f"{_DATA}/SecurityGroupIds", ["sg-1"], "security groups are listed outside of the interfaces"),
            Break(f"{_DATA}/NetworkInterfaces/2/Groups", GONE, "an interface has no security group"),
            Break(f"{_DATA}/NetworkInterfaces/0/SubnetId", "subnet-1", "names a subnet"),
        ),
    ),
    Fixture(
        "NXP-EFA-3",
        _NODES,
        (
            Break("In", GONE, "no ingress rule for all traffic"),
            Break("Out", GONE, "no egress rule for all traffic"),
            Break("Out/Properties/IpProtocol", "tcp", "no egress rule for all traffic"),
            Break("Out/Properties/DestinationSecurityGroupId", "sg-1", "no egress rule for all traffic"),
        ),
    ),
    Fixture(
        "NXP-EFA-4",
        _NODES,
        (Break("Nodes/Properties/VPCZoneIdentifier", ["subnet-1", "subnet-2"], "starts them in 2 subnets"),),
    ),
    Fixture(
        "NXP-CAP-1",
        _BLOCK,
        (
            Break(f"{_DATA}/InstanceMarketOptions", GONE, "the market type is another one"),
            Break(f"{_DATA}/CapacityReservationSpecification", GONE, "names no block"),
            Break(f"{_DATA}/Placement", {"GroupName": "near"}, "requests a capacity block within a placement group"),
            Break(
                "Nodes/Properties/PlacementGroup", "near", "starts instances of a capacity block in a placement group"
            ),
        ),
    ),
    Fixture(
        "NXP-CAP-2",
        _BLOCK,
        (
            Break("Nodes/Properties/DesiredCapacity", "4", "before its capacity block begins"),
            Break("Nodes/Properties/MinSize", "1", "before its capacity block begins"),
            Break(
                "Fill/Properties/StartTime", "2026-12-01T11:29:00Z", "before the capacity block begins at 2026-12-01"
            ),
            Break("Drain", GONE, "nothing drains the instances"),
            Break("Drain/Properties/StartTime", "2026-12-08T10:46:00Z", "drained later than 2026-12-08T10:45"),
        ),
    ),
    Fixture(
        "NXP-CAP-2",
        _BATCH_BLOCK,
        (
            Break("Queue/Properties/State", "ENABLED", "accepts jobs before its capacity block begins"),
            Break("Drain", GONE, "nothing drains the instances"),
            Break("Drain/Properties/ScheduleExpression", "at(2026-12-08T11:00:00)", "drained later than"),
        ),
    ),
    Fixture(
        "NXP-CAP-2",
        _CLUSTER_BLOCK,
        (
            Break("Nodes/Properties/ScalingConfig/MinSize", 1, "before its capacity block begins"),
            Break("Nodes/Properties/ScalingConfig/DesiredSize", GONE, "before its capacity block begins"),
            Break("Fill/Properties/ScheduleExpression", "at(2026-12-01T11:29:00)", "before the capacity block begins"),
            Break("Drain/Properties/Target/Input", "{}", "nothing drains the instances"),
            Break("Drain/Properties/ScheduleExpression", "at(2026-12-08T11:00:00)", "drained later than"),
        ),
    ),
    Fixture(
        "NXP-HOST-3",
        {
            "Disks": resource(
                "AWS::SageMaker::EndpointConfig", ProductionVariants=[{"InstanceType": "ml.trn1.2xlarge"}]
            ),
            "Volumes": resource(
                "AWS::SageMaker::EndpointConfig",
                ProductionVariants=[{"InstanceType": "ml.inf2.xlarge"}],
                KmsKeyId="arn:aws:kms:us-east-2:123456789012:key/0",
            ),
        },
        (Break("Disks/Properties/KmsKeyId", "key", "which SageMaker refuses for ml.trn1.2xlarge"),),
    ),
    Fixture(
        "NXP-CAP-3",
        _POOL,
        (
            Break(f"{_DATA}/InstanceMarketOptions", {"MarketType": "spot"}, "bought as spot"),
            Break(
                "Nodes/Properties/MixedInstancesPolicy",
                {"LaunchTemplate": {"Overrides": [{"InstanceType": "inf2.xlarge"}, {"InstanceType": "inf2.8xlarge"}]}},
                "inf2.xlarge, inf2.8xlarge",
            ),
        ),
    ),
    Fixture(
        "NXP-BATCH-1",
        _NODES | {"Environment": environment()},
        (Break("Environment/Properties/ComputeResources/SecurityGroupIds", ["sg-1"], "Batch rejects both"),),
    ),
    Fixture(
        "NXP-HOST-1",
        _HOST,
        (
            Break(f"{_DATA}/MetadataOptions", GONE, "IMDSv1 is enabled"),
            Break(f"{_DATA}/MetadataOptions/HttpTokens", "optional", "IMDSv1 is enabled"),
            Break(f"{_DATA}/MetadataOptions/HttpPutResponseHopLimit", 2, "the hop limit of the metadata service is 2"),
            Break(f"{_DATA}/MetadataOptions/HttpPutResponseHopLimit", GONE, "is unset"),
        ),
    ),
    Fixture(
        "NXP-HOST-1",
        _CONTAINERS,
        (Break(f"{_DATA}/MetadataOptions/HttpPutResponseHopLimit", 3, "2 at most: containers need no more"),),
    ),
    Fixture(
        "NXP-HOST-2",
        _HOST,
        (
            Break(f"{_DATA}/ImageId", "ami-0000000000000000", "is not in the lock file"),
            Break(f"{_DATA}/ImageId", "ami-0000000000000001", "expired on 2026-11-21"),
            Break(f"{_DATA}/ImageId", "ami-0000000000000002", "is an image of us-west-2"),
            Break(
                f"{_DATA}/ImageId", "{{resolve:ssm:/aws/service/neuron/latest}}", "instances of one fleet may differ"
            ),
            Break(f"{_DATA}/ImageId", "resolve:ssm:/aws/service/neuron/latest", "instances of one fleet may differ"),
        ),
    ),
    Fixture(
        "NXP-NET-1",
        _OPEN,
        (
            Break("Group/Properties/SecurityGroupIngress/0/CidrIp", "0.0.0.0/0", "port 443 is open to the internet"),
            Break("Group/Properties/SecurityGroupIngress/0/CidrIpv6", "::/0", "port 443 is open to the internet"),
            Break("In/Properties/CidrIp", "0.0.0.0/0", "port 22 is open to the internet"),
            Break("Balancer/Properties/Scheme", "internet-facing", "the load balancer has public addresses"),
            Break("Service/Properties/AllowedPrincipals/0", "*", "each AWS account may create an endpoint"),
            Break("Cluster/Properties/ResourcesVpcConfig", {}, "the cluster's API server"),
            Break("Subnet/Properties/MapPublicIpOnLaunch", True, "instances in the subnet get public addresses"),
            Break(f"{_DATA}/NetworkInterfaces/0/AssociatePublicIpAddress", "true", "instances get public addresses"),
        ),
    ),
    Fixture(
        "NXP-NET-2",
        _CLOSED,
        (
            Break("S3", GONE, "it calls s3 (s3:GetObject), for which the closed network has no endpoint"),
            Break("Scaling", GONE, "it calls autoscaling (autoscaling:CompleteLifecycleAction)"),
            Break(
                "Role/Properties/ManagedPolicyArns",
                ["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"],
                "it calls ssmmessages (AmazonSSMManagedInstanceCore)",
            ),
            Break("Job", resource("AWS::Batch::JobDefinition"), "it calls logs (the log of its jobs)"),
            Break("Environment", environment(), "it calls ecs-agent"),
            Break("Policy/Properties/PolicyDocument/Statement/0/Action", "*", "its calls are unknown"),
            Break(
                "Idle",
                resource("AWS::EC2::VPCEndpoint", ServiceName="com.amazonaws.us-east-2.kms"),
                "nothing in the network",
            ),
        ),
    ),
    Fixture(
        "NXP-NET-3",
        _LISTENERS,
        (Break("Http/Properties/DefaultActions", [{"Type": "forward"}], "uses HTTP without TLS"),),
    ),
    Fixture(
        "NXP-REF-1",
        {
            "Targets": resource(
                "AWS::ElasticLoadBalancingV2::TargetGroup", VpcId={"Fn::ImportValue": "network:Vpc"}, Matcher={}
            )
        },
        (
            Break("Targets/Properties/VpcId", _WEAK, "of network in a property that cannot change in place"),
            Break("Targets/Properties/Matcher/HttpCode", _WEAK, "read again only if the text of this resource changes"),
        ),
    ),
    Fixture(
        "NXP-IAM-2",
        {name: _signs(name) for name in ("Build", "Promote")},
        (
            Break("Promote/Properties/PolicyDocument/Statement/0/Resource", _key("Build"), "and so does demo/Build"),
            Break("Promote/Properties/PolicyDocument/Statement/0/Resource/1", _key("Build"), "and so does demo/Build"),
        ),
    ),
    Fixture(
        "NXP-IAM-1",
        _GRANTED,
        (
            Break(f"{_GRANT}/0/Action", "ec2:TerminateInstances", "ec2:TerminateInstances on *"),
            Break(f"{_GRANT}/0/Action", "*", "* on *"),
            Break(f"{_GRANT}/1/Resource", "arn:aws:s3:::*", "s3:PutObject on arn:aws:s3:::*"),
            Break(
                f"{_GRANT}/1",
                {"Effect": "Allow", "NotAction": "iam:*", "Resource": "*"},
                "every action that is not listed",
            ),
            Break(
                f"{_GRANT}/1",
                {"Effect": "Allow", "Action": "batch:SubmitJob", "Resource": "arn:aws:batch:us-east-2:1:job-queue/*"},
                "batch:SubmitJob on",
            ),
            Break(
                f"{_GRANT}/1/Resource",
                {"Fn::Join": ["", ["arn:aws:sqs:us-east-2:", {"Ref": "AWS::AccountId"}, ":*"]]},
                "s3:PutObject on arn:aws:sqs:us-east-2:",
            ),
            Break(f"{_GRANT}/3/Condition", GONE, "ec2:CreateNetworkInterface on arn:aws:ec2"),
            Break(
                f"{_GRANT}/3/Condition/ArnEquals/ec2:Subnet",
                "arn:aws:ec2:us-east-2:1:subnet/*",
                "ec2:CreateNetworkInterface on arn:aws:ec2",
            ),
            Break(f"{_GRANT}/3/Resource", "*", "ec2:CreateNetworkInterface on *"),
            Break(f"{_GRANT}/4/Condition", GONE, "batch:TerminateJob on arn:aws:batch"),
            Break(
                f"{_GRANT}/4/Condition/StringEquals",
                {"aws:ResourceTag/nxpipe:project": "*"},
                "batch:TerminateJob on arn:aws:batch",
            ),
            Break(
                "Role/Properties/ManagedPolicyArns",
                [{"Fn::Join": ["", ["arn:", {"Ref": "AWS::Partition"}, ":iam::aws:policy/AmazonS3FullAccess"]]}],
                "AmazonS3FullAccess",
            ),
        ),
    ),
    Fixture(
        "NXP-DATA-1",
        _DATA_KEPT,
        (
            Break("Bucket/Properties/PublicAccessBlockConfiguration", GONE, "the bucket can become public"),
            Break(
                "Bucket/Properties/PublicAccessBlockConfiguration/IgnorePublicAcls",
                False,
                "IgnorePublicAcls is not set",
            ),
            Break("Policy", GONE, "the bucket accepts requests without TLS"),
            Break("Policy/Properties/PolicyDocument/Statement/0/Effect", "Allow", "accepts requests without TLS"),
            Break("Files/Properties/FileSystemPolicy", GONE, "mounted without TLS"),
            Break("Files/Properties/Encrypted", GONE, "is not encrypted"),
        ),
    ),
)
