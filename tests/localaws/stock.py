"""Small templates that stock moto reports as complete, each with a check of the result.

`python -m tests.localaws.stock` runs them with stock moto, which cannot share a process with the patches, and prints
the results.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import boto3
from botocore.exceptions import ClientError
from moto import mock_aws

Resources = dict[str, Any]
_REGION: Final = "us-east-2"
_LAUNCHING: Final = "autoscaling:EC2_INSTANCE_LAUNCHING"


def _resource(kind: str, /, **properties: Any) -> Resources:
    return {"Type": f"AWS::{kind}", "Properties": properties}


def _ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def _network() -> Resources:
    document = {"Vpc": _resource("EC2::VPC", CidrBlock="10.0.0.0/16")}
    for number, zone in enumerate("ab"):
        document[f"Subnet{number}"] = _resource(
            "EC2::Subnet", VpcId=_ref("Vpc"), CidrBlock=f"10.0.{number}.0/24", AvailabilityZone=f"{_REGION}{zone}"
        )
    return document


def _group(**more: Any) -> Resources:
    data = {
        "ImageId": "ami-12345678",
        "InstanceType": "inf2.xlarge",
        "MetadataOptions": {"HttpTokens": "required"},
    }
    by = {"LaunchTemplateId": _ref("Template"), "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]}}
    document = {"MinSize": "0", "MaxSize": "2", "DesiredCapacity": "2", "LaunchTemplate": by}
    subnets = [_ref("Subnet0"), _ref("Subnet1")]
    return {
        **_network(),
        "Template": _resource("EC2::LaunchTemplate", LaunchTemplateName="t", LaunchTemplateData=data),
        "Group": _resource("AutoScaling::AutoScalingGroup", VPCZoneIdentifier=subnets, **document, **more),
    }


def _balancer() -> Resources:
    same = {"Port": 8000, "Protocol": "HTTP", "VpcId": _ref("Vpc"), "TargetType": "instance"}
    weights = [{"TargetGroupArn": _ref("Blue"), "Weight": 100}, {"TargetGroupArn": _ref("Green"), "Weight": 0}]
    subnets = [_ref("Subnet0"), _ref("Subnet1")]
    return {
        **_network(),
        "Balancer": _resource("ElasticLoadBalancingV2::LoadBalancer", Scheme="internal", Subnets=subnets),
        "Blue": _resource("ElasticLoadBalancingV2::TargetGroup", Name="blue", **same),
        "Green": _resource("ElasticLoadBalancingV2::TargetGroup", Name="green", **same),
        "Listener": _resource(
            "ElasticLoadBalancingV2::Listener",
            LoadBalancerArn=_ref("Balancer"),
            Port=80,
            Protocol="HTTP",
            DefaultActions=[{"Type": "forward", "ForwardConfig": {"TargetGroups": weights}}],
        ),
    }


def _client(service: str) -> Any:
    return boto3.client(service, region_name=_REGION)


def _physical(logical: str) -> str:
    response = _client("cloudformation").describe_stack_resource(StackName="s", LogicalResourceId=logical)
    physical_resource_id: str = response["StackResourceDetail"]["PhysicalResourceId"]
    return physical_resource_id


def _the_group() -> dict[str, Any]:
    groups = _client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    group: dict[str, Any] = groups[0]
    return group


def _instances() -> list[dict[str, Any]]:
    return [
        instance
        for reservation in _client("ec2").describe_instances()["Reservations"]
        for instance in reservation["Instances"]
    ]


def _egress_is_closed() -> bool:
    groups = _client("ec2").describe_security_groups(Filters=[{"Name": "description", "Values": ["closed"]}])
    (group,) = groups["SecurityGroups"]
    return all(end["CidrIp"] != "0.0.0.0/0" for entry in group["IpPermissionsEgress"] for end in entry["IpRanges"])


def _egress_is_beside() -> bool:
    rules = _client("ec2").describe_security_group_rules()["SecurityGroupRules"]
    return any(rule["IsEgress"] and rule.get("CidrIpv4") == "10.1.0.0/16" for rule in rules)


def _warm_pool_is_there() -> bool:
    response = _client("autoscaling").describe_warm_pool(AutoScalingGroupName=_the_group()["AutoScalingGroupName"])
    return "WarmPoolConfiguration" in response


def _hook_is_there() -> bool:
    response = _client("autoscaling").describe_lifecycle_hooks(
        AutoScalingGroupName=_the_group()["AutoScalingGroupName"]
    )
    return [lifecycle_hook["HeartbeatTimeout"] for lifecycle_hook in response["LifecycleHooks"]] == [600]


def _endpoint_goes_with_its_stack() -> bool:
    _client("cloudformation").delete_stack(StackName="s")
    vpcs = _client("ec2").describe_vpcs(Filters=[{"Name": "cidr", "Values": ["10.0.0.0/16"]}])["Vpcs"]
    endpoints = _client("ec2").describe_vpc_endpoints()["VpcEndpoints"]
    return vpcs == [] and all(endpoint["State"] == "deleted" for endpoint in endpoints)


def _group_survives_its_change() -> bool:
    before = [instance["InstanceId"] for instance in _the_group()["Instances"]]
    body = json.dumps({"Resources": _group(HealthCheckGracePeriod=900)})
    _client("cloudformation").update_stack(StackName="s", TemplateBody=body)
    return [instance["InstanceId"] for instance in _the_group()["Instances"]] == before


def _new_version_reaches_the_group() -> bool:
    resources = _group()
    resources["Template"]["Properties"]["LaunchTemplateData"]["InstanceType"] = "inf2.8xlarge"
    _client("cloudformation").update_stack(StackName="s", TemplateBody=json.dumps({"Resources": resources}))
    return bool(_the_group()["LaunchTemplate"]["Version"] == "2")


def _weights_are_there() -> bool:
    arns = [
        load_balancer["LoadBalancerArn"]
        for load_balancer in _client("elbv2").describe_load_balancers()["LoadBalancers"]
    ]
    result = [
        listener for arn in arns for listener in _client("elbv2").describe_listeners(LoadBalancerArn=arn)["Listeners"]
    ]
    weights = [
        [group["Weight"] for group in action["ForwardConfig"]["TargetGroups"]]
        for entry in result
        for action in entry["DefaultActions"]
    ]
    return weights == [[100, 0]]


_IN_GROUP: Final = {"AutoScalingGroupName": _ref("Group")}
CASES: Final[dict[str, tuple[Resources, Callable[[], bool]]]] = {
    "the egress of a security group": (
        {
            **_network(),
            "Closed": _resource(
                "EC2::SecurityGroup",
                GroupDescription="closed",
                VpcId=_ref("Vpc"),
                SecurityGroupEgress=[{"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "CidrIp": "10.0.0.0/16"}],
            ),
        },
        _egress_is_closed,
    ),
    "an egress rule beside its group": (
        {
            **_network(),
            "Group": _resource("EC2::SecurityGroup", GroupDescription="open", VpcId=_ref("Vpc")),
            "Out": _resource(
                "EC2::SecurityGroupEgress",
                GroupId={"Fn::GetAtt": ["Group", "GroupId"]},
                IpProtocol="-1",
                CidrIp="10.1.0.0/16",
            ),
        },
        _egress_is_beside,
    ),
    "an endpoint when its stack is deleted": (
        {
            **_network(),
            "Storage": _resource(
                "EC2::VPCEndpoint",
                VpcId=_ref("Vpc"),
                ServiceName=f"com.amazonaws.{_REGION}.s3",
                VpcEndpointType="Gateway",
            ),
        },
        _endpoint_goes_with_its_stack,
    ),
    "a placement group": (
        {"Cluster": _resource("EC2::PlacementGroup", Strategy="cluster")},
        lambda: (
            [
                placement_group["Strategy"]
                for placement_group in _client("ec2").describe_placement_groups()["PlacementGroups"]
            ]
            == ["cluster"]
        ),
    ),
    "a capacity reservation": (
        {
            "Reserved": _resource(
                "EC2::CapacityReservation",
                AvailabilityZone=f"{_REGION}a",
                InstanceType="trn1.32xlarge",
                InstancePlatform="Linux/UNIX",
                InstanceCount=2,
            )
        },
        lambda: len(_client("ec2").describe_capacity_reservations()["CapacityReservations"]) == 1,
    ),
    "the metadata options of instances": (
        _group(),
        lambda: {instance["MetadataOptions"]["HttpTokens"] for instance in _instances()} == {"required"},
    ),
    "instances in both zones": (
        _group(),
        lambda: len({instance["Placement"]["AvailabilityZone"] for instance in _instances()}) == 2,
    ),
    "the metrics of a group": (
        _group(MetricsCollection=[{"Granularity": "1Minute", "Metrics": ["GroupTotalInstances"]}]),
        lambda: len(_the_group()["EnabledMetrics"]) == 1,
    ),
    "the longest life of an instance": (
        _group(MaxInstanceLifetime=604800),
        lambda: _the_group().get("MaxInstanceLifetime") == 604800,
    ),
    "a group that changes": (_group(), _group_survives_its_change),
    "a new version of a template": (_group(), _new_version_reaches_the_group),
    "a warm pool": (
        {**_group(), "Warm": _resource("AutoScaling::WarmPool", MinSize=1, **_IN_GROUP)},
        _warm_pool_is_there,
    ),
    "a lifecycle hook": (
        {
            **_group(),
            "Hook": _resource(
                "AutoScaling::LifecycleHook", LifecycleTransition=_LAUNCHING, HeartbeatTimeout=600, **_IN_GROUP
            ),
        },
        _hook_is_there,
    ),
    "a scaling policy": (
        {
            **_group(),
            "Policy": _resource(
                "AutoScaling::ScalingPolicy",
                PolicyType="TargetTrackingScaling",
                TargetTrackingConfiguration={
                    "TargetValue": 60,
                    "PredefinedMetricSpecification": {"PredefinedMetricType": "ASGAverageCPUUtilization"},
                },
                **_IN_GROUP,
            ),
        },
        lambda: len(_client("autoscaling").describe_policies()["ScalingPolicies"]) == 1,
    ),
    "the weights of a listener": (_balancer(), _weights_are_there),
}


def run_case(name: str) -> tuple[str, bool]:
    """Deploy a case by a change set, as the CDK does: the status of the stack and the result of the case's check. A
    failed execution is retried once."""
    resources, check = CASES[name]
    with mock_aws():
        aws = _client("cloudformation")
        aws.create_change_set(
            StackName="s", ChangeSetName="c", ChangeSetType="CREATE", TemplateBody=json.dumps({"Resources": resources})
        )
        for _ in range(2):
            try:
                aws.execute_change_set(StackName="s", ChangeSetName="c")
                break
            except Exception:  # a server responds with status 500 here, and the client retries
                continue
        status: str = aws.describe_stacks(StackName="s")["Stacks"][0]["StackStatus"]
        try:
            return status, check()
        except (ClientError, NotImplementedError, LookupError):
            return status, False


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: run_case(name) for name in CASES}))
