"""Two ways of counting what there is.

The census compares every property of every resource, as its service tells it, with what the template asked for. The
inventory lists what exists, whoever made it: what a life cycle leaves behind is what the inventory has more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from moto.core import DEFAULT_ACCOUNT_ID

from tests.localaws.formation.models import Stacks, cloudformation_backends
from tests.localaws.formation.provider import PROVIDERS, Site, client_of
from tests.localaws.formation.shapes import differences
from tests.localaws.formation.stack import Resource, Stack


@dataclass(frozen=True)
class Finding:
    """A property that is not there, or not as wanted."""

    stack: str
    logical: str
    type: str
    difference: str

    def __str__(self) -> str:
        return f"{self.stack}/{self.logical} ({self.type}){self.difference}"


def census(region: str, account: str = DEFAULT_ACCOUNT_ID) -> list[Finding]:
    """Of all stacks that exist. None found: every property is there, as it was wanted."""
    stacks: Stacks = cloudformation_backends[account][region]
    return [
        finding
        for stack in stacks.all.values()
        if stack.exists
        for one in stack.resources.values()
        for finding in _of(one, stack, stacks)
    ]


def _of(one: Resource, stack: Stack, stacks: Stacks) -> Iterator[Finding]:
    declared = one.declared
    site = Site(stacks.account_id, stacks.region_name, stacks.partition, stack.name, declared.logical)
    found = PROVIDERS[declared.type].read(one.made, site)
    for difference in differences(one.properties, found):
        yield Finding(stack.name, declared.logical, declared.type, difference)


def counted(region: str, account: str = DEFAULT_ACCOUNT_ID) -> int:
    """How many properties a census has looked at."""
    stacks: Stacks = cloudformation_backends[account][region]
    return sum(len(one.properties) for each in stacks.all.values() if each.exists for one in each.resources.values())


# A service, its call, and where in the answer the names are.
_LISTS: Final = (
    ("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", "AutoScalingGroupName"),
    ("autoscaling", "describe_policies", "ScalingPolicies", "PolicyARN"),
    ("autoscaling", "describe_scheduled_actions", "ScheduledUpdateGroupActions", "ScheduledActionName"),
    ("batch", "describe_compute_environments", "computeEnvironments", "computeEnvironmentName"),
    ("batch", "describe_job_queues", "jobQueues", "jobQueueName"),
    ("batch", "list_scheduling_policies", "schedulingPolicies", "arn"),
    ("cloudwatch", "describe_alarms", "MetricAlarms", "AlarmName"),
    ("cloudwatch", "list_dashboards", "DashboardEntries", "DashboardName"),
    ("dynamodb", "list_tables", "TableNames", None),
    ("ec2", "describe_addresses", "Addresses", "AllocationId"),
    ("ec2", "describe_capacity_reservations", "CapacityReservations", "CapacityReservationId"),
    ("ec2", "describe_flow_logs", "FlowLogs", "FlowLogId"),
    ("ec2", "describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    ("ec2", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("ec2", "describe_nat_gateways", "NatGateways", "NatGatewayId"),
    ("ec2", "describe_placement_groups", "PlacementGroups", "GroupName"),
    ("ec2", "describe_route_tables", "RouteTables", "RouteTableId"),
    ("ec2", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("ec2", "describe_subnets", "Subnets", "SubnetId"),
    ("ec2", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
    ("ec2", "describe_vpcs", "Vpcs", "VpcId"),
    ("ecr", "describe_repositories", "repositories", "repositoryName"),
    ("efs", "describe_access_points", "AccessPoints", "AccessPointId"),
    ("efs", "describe_file_systems", "FileSystems", "FileSystemId"),
    ("eks", "list_clusters", "clusters", None),
    ("elbv2", "describe_load_balancers", "LoadBalancers", "LoadBalancerName"),
    ("elbv2", "describe_target_groups", "TargetGroups", "TargetGroupName"),
    ("events", "list_rules", "Rules", "Name"),
    ("fsx", "describe_file_systems", "FileSystems", "FileSystemId"),
    ("iam", "list_instance_profiles", "InstanceProfiles", "InstanceProfileName"),
    ("iam", "list_open_id_connect_providers", "OpenIDConnectProviderList", "Arn"),
    ("iam", "list_roles", "Roles", "RoleName"),
    ("lambda", "list_functions", "Functions", "FunctionName"),
    ("logs", "describe_log_groups", "logGroups", "logGroupName"),
    ("s3", "list_buckets", "Buckets", "Name"),
    ("sagemaker", "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName"),
    ("sagemaker", "list_endpoints", "Endpoints", "EndpointName"),
    ("sagemaker", "list_models", "Models", "ModelName"),
    ("scheduler", "list_schedules", "Schedules", "Name"),
    ("scheduler", "list_schedule_groups", "ScheduleGroups", "Name"),
    ("sns", "list_subscriptions", "Subscriptions", "SubscriptionArn"),
    ("sns", "list_topics", "Topics", "TopicArn"),
    ("sqs", "list_queues", "QueueUrls", None),
    ("ssm", "describe_parameters", "Parameters", "Name"),
    ("stepfunctions", "list_state_machines", "stateMachines", "name"),
)
_ENDED: Final = {"cancelled", "deleted", "terminated", "DELETED"}


def inventory(region: str) -> set[str]:
    """What exists, by service and name. Keys and roles that AWS itself keeps for a time or for ever are no part of it:
    a key waits for its deletion, and a role that belongs to a service stays with the account."""
    found = {f"budgets {one}" for one in _budgets(region)} | {f"kms {one}" for one in _keys(region)}
    composites = client_of("cloudwatch", region).describe_alarms(AlarmTypes=["CompositeAlarm"])["CompositeAlarms"]
    found |= {f"cloudwatch {one['AlarmName']}" for one in composites}
    for service, call, where, name in _LISTS:
        client = client_of(service, region)
        answers = client.get_paginator(call).paginate() if client.can_paginate(call) else [getattr(client, call)()]
        for answer in answers:
            living = [each for each in answer.get(where, ()) if _lives(each)]
            found |= {f"{service} {each if name is None else each[name]}" for each in living}
    return found


def _lives(one: Any) -> bool:
    if not isinstance(one, dict):
        return True
    return str(one.get("State")) not in _ENDED and not one.get("Path", "").startswith("/aws-service-role/")


def _keys(region: str) -> list[str]:
    """Not those that AWS itself makes for a service, which have an alias of AWS's."""
    kms = client_of("kms", region)
    of_aws = {
        one.get("TargetKeyId") for one in kms.list_aliases()["Aliases"] if one["AliasName"].startswith("alias/aws/")
    }
    told = [kms.describe_key(KeyId=one["KeyId"])["KeyMetadata"] for one in kms.list_keys()["Keys"]]
    return [one["KeyId"] for one in told if one["KeyState"] != "PendingDeletion" and one["KeyId"] not in of_aws]


def _budgets(region: str) -> list[str]:
    account = client_of("sts", region).get_caller_identity()["Account"]
    told = client_of("budgets", region).describe_budgets(AccountId=account)
    return [one["BudgetName"] for one in told.get("Budgets", [])]
