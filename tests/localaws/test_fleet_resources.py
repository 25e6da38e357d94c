"""Resources of a fleet: created, updated in place or replaced as AWS documents, and deleted without remains."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from tests.localaws.census import census, inventory
from tests.localaws.deployed import Changes, changed, create, physical, running, settled, update
from tests.localaws.fleet import Template, balancing, fleet, launch_data, launching, network, ref
from tests.localaws.formation.provider import PROVIDERS

REGION = "us-east-2"
OWN = [{"Key": "team", "Value": "serving"}]


def there() -> set[str]:
    """The inventory without keys: EBS creates one for the account with the first encrypted volume."""
    return {entry for entry in inventory(REGION) if not entry.startswith("kms ")}


NETWORK: Final[Changes] = {
    "Vpc": {"EnableDnsHostnames": False, "Tags": OWN},
    "SubnetA": {"MapPublicIpOnLaunch": True, "Tags": OWN},
    "Table": {"Tags": OWN},
    "Gateway": {"Tags": None},
    "Nat": {"Tags": OWN},
    "Address": {"Tags": OWN},
    "Out": {"GatewayId": None, "NatGatewayId": ref("Nat")},
    "Storage": {"RouteTableIds": [ref("OtherTable")], "PolicyDocument": {"Version": "2012-10-17", "Statement": []}},
    "Registry": {"SubnetIds": [ref("SubnetA")], "SecurityGroupIds": [ref("Efa")], "PrivateDnsEnabled": False},
    "Flows": {"Tags": OWN},
    "Group": {
        "SecurityGroupIngress": [{"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "CidrIp": "10.0.0.0/16"}],
        "SecurityGroupEgress": [
            {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "DestinationSecurityGroupId": ref("Efa")}
        ],
        "Tags": OWN,
    },
    "EfaIn": {"Description": "from the same job"},
    "EfaOut": {"Description": None},
}
NETWORK_ANEW: Final[Changes] = {
    "SubnetB": {"CidrBlock": "10.0.2.0/24"},
    "Flows": {"LogGroupName": ref("OtherLogs"), "TrafficType": "REJECT"},
    "Efa": {"GroupDescription": "training together"},
    "EfaIn": {"IpProtocol": "tcp", "FromPort": 1, "ToPort": 2},
}
LAUNCHING: Final[Changes] = {
    "Template": {
        "LaunchTemplateData": launch_data(InstanceType="inf2.8xlarge"),
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": OWN}],
    },
    "Reserved": {"InstanceCount": 3, "EndDateType": "limited", "EndDate": "2030-01-01T00:00:00Z"},
}
LAUNCHING_ANEW: Final[Changes] = {
    "Training": {"LaunchTemplateName": "nxpipe-train-2"},
    "Cluster": {"Strategy": "spread", "SpreadLevel": "rack"},
    "Reserved": {"AvailabilityZone": "us-east-2b"},
}
SCALING: Final[Changes] = {
    "Blue1": {
        "MaxSize": "6",
        "DesiredCapacity": "3",
        "VPCZoneIdentifier": [ref("SubnetA")],
        "TargetGroupARNs": [ref("Green")],
        "HealthCheckType": "EC2",
        "HealthCheckGracePeriod": 60,
        "Cooldown": "90",
        "DefaultInstanceWarmup": None,
        "MaxInstanceLifetime": 86400,
        "InstanceMaintenancePolicy": {"MinHealthyPercentage": 90, "MaxHealthyPercentage": 120},
        "TerminationPolicies": ["NewestInstance"],
        "MetricsCollection": [{"Granularity": "1Minute", "Metrics": ["GroupTotalInstances"]}],
        "LifecycleHookSpecificationList": [
            {"LifecycleHookName": "ready", "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING"}
        ],
        "Tags": [{**OWN[0], "PropagateAtLaunch": False}],
    },
    "Mixed": {
        "DesiredCapacity": "1",
        "CapacityRebalance": None,
        "NewInstancesProtectedFromScaleIn": True,
    },
    "Ready": {"HeartbeatTimeout": 600, "DefaultResult": "CONTINUE", "NotificationMetadata": None},
    "Warm": {"PoolState": "Hibernated", "MinSize": 2},
    "Follow": {"TargetTrackingConfiguration": None, "PolicyType": "StepScaling", "AdjustmentType": "ChangeInCapacity"}
    | {"StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}], "EstimatedInstanceWarmup": 60},
    "Begin": {"StartTime": "2030-01-02T11:30:00Z", "DesiredCapacity": 1, "MinSize": 1},
}
SCALING_ANEW: Final[Changes] = {
    "Block": {"AutoScalingGroupName": "nxpipe-train"},
    "Ready": {"LifecycleHookName": "warm"},
}
BALANCING: Final[Changes] = {
    "Balancer": {
        "SecurityGroups": [ref("Efa")],
        "LoadBalancerAttributes": [{"Key": "idle_timeout.timeout_seconds", "Value": "120"}],
        "Tags": OWN,
    },
    "Blue": {
        "HealthCheckEnabled": True,
        "HealthCheckPath": "/ready",
        "HealthCheckIntervalSeconds": 15,
        "Matcher": {"HttpCode": "200-299"},
        "UnhealthyThresholdCount": 4,
        "TargetGroupAttributes": [{"Key": "slow_start.duration_seconds", "Value": "30"}],
        "Tags": OWN,
    },
    "Listener": {"Port": 81, "DefaultActions": [{"Type": "forward", "TargetGroupArn": ref("Blue")}]},
    "Rule": {
        "Priority": 11,
        "Conditions": [{"Field": "http-header", "HttpHeaderConfig": {"HttpHeaderName": "x-c", "Values": ["1"]}}],
        "Tags": OWN,
    },
}
BALANCING_ANEW: Final[Changes] = {
    "Balancer": {"Name": "nxpipe-other", "Scheme": "internet-facing"},
    "Green": {"Port": 8001},
}
SECTIONS: Final[dict[str, tuple[Template, Changes, Changes]]] = {
    "network": (network(), NETWORK, NETWORK_ANEW),
    "launching": ({**network(), **launching()}, LAUNCHING, LAUNCHING_ANEW),
    "scaling": (fleet(), SCALING, SCALING_ANEW),
    "balancing": ({**network(), **balancing()}, BALANCING, BALANCING_ANEW),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_property_is_there_and_changes_in_place_and_nothing_stays_behind(aws: Any, section: str) -> None:
    resources, changes, _ = SECTIONS[section]
    before = there()
    create(aws, resources)
    assert [str(entry) for entry in census(REGION)] == []
    first, stack = physical(aws), aws.describe_stacks(StackName="s")["Stacks"][0]["StackId"]
    assert update(aws, changed(resources, changes)) == ("UPDATE_COMPLETE", [])
    assert [str(entry) for entry in census(REGION)] == []
    assert physical(aws) == first
    aws.delete_stack(StackName="s")
    assert settled(aws, stack) == ("DELETE_COMPLETE", [])
    assert there() == before
    assert running() == []


@pytest.mark.parametrize("section", SECTIONS)
def test_what_cannot_change_is_made_anew_and_the_old_one_goes(aws: Any, section: str) -> None:
    resources, _, changes = SECTIONS[section]
    create(aws, resources)
    first, before = physical(aws), there()
    assert update(aws, changed(resources, changes)) == ("UPDATE_COMPLETE", [])
    assert [str(entry) for entry in census(REGION)] == []
    second = physical(aws)
    assert changes.keys() <= {name for name in second if second[name] != first[name]}
    assert len(there()) == len(before)


def _registry() -> dict[str, dict[str, Any]]:
    """CloudFormation's own schemas of its types, from cfn-lint."""
    spec = find_spec("cfnlint")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "data" / "schemas"
    names = json.loads((folder / "providers" / f"{REGION}.json").read_text())
    return {
        kind: json.loads((folder / "resources" / f"{names[kind]}.json").read_text())
        for kind in sorted({entry["Type"] for entry in fleet().values()})
        if kind.split("::")[1] in ("EC2", "AutoScaling", "ElasticLoadBalancingV2")
    }


# A documented change of its id, but without a second resource.
_IN_PLACE_ALL_THE_SAME: Final = {("AWS::EC2::SubnetRouteTableAssociation", "RouteTableId")}


def test_what_makes_a_new_resource_is_what_cloudformation_documents() -> None:
    for kind, schema in _registry().items():
        provider = PROVIDERS[kind]
        assert provider.properties <= schema["properties"].keys(), kind
        documented = {
            create_only_property.removeprefix("/properties/")
            for create_only_property in schema.get("createOnlyProperties", [])
        }
        expected = {name for name in documented & provider.properties if (kind, name) not in _IN_PLACE_ALL_THE_SAME}
        if kind == "AWS::EC2::VPC":
            expected.add("InstanceTenancy")  # except in one direction
        assert provider.fixed == expected, kind
