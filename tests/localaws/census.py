"""Checks of an account's content: a census and an inventory.

The census compares every property of every resource, as read from its service, with the template. The inventory lists
all that exists in an account; comparing two inventories shows what a stack has left behind.
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
    """A difference between the property in the template and the property read from the service."""

    stack: str
    logical: str
    type: str
    difference: str

    def __str__(self) -> str:
        return f"{self.stack}/{self.logical} ({self.type}){self.difference}"


def census(region: str, account: str = DEFAULT_ACCOUNT_ID) -> list[Finding]:
    """The differences over all stacks that exist; an empty list means that every property is as the template has it."""
    stacks: Stacks = cloudformation_backends[account][region]
    return [
        finding
        for stack in stacks.all.values()
        if stack.exists
        for resource in stack.resources.values()
        for finding in _findings(resource, stack, stacks)
    ]


def _findings(resource: Resource, stack: Stack, stacks: Stacks) -> Iterator[Finding]:
    declared = resource.declared
    site = Site(stacks.account_id, stacks.region_name, stacks.partition, stack.name, declared.logical)
    actual = PROVIDERS[declared.type].read(resource.existing, site)
    for difference in differences(resource.properties, actual):
        yield Finding(stack.name, declared.logical, declared.type, difference)


def count_properties(region: str, account: str = DEFAULT_ACCOUNT_ID) -> int:
    """The number of properties that a census compares."""
    stacks: Stacks = cloudformation_backends[account][region]
    return sum(
        len(resource.properties)
        for stack in stacks.all.values()
        if stack.exists
        for resource in stack.resources.values()
    )


# Service, list call, key of the list in the response, key of the name in an entry (None: the entry is the name).
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
    ("ec2", "describe_vpc_endpoint_service_configurations", "ServiceConfigurations", "ServiceId"),
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
    """All that exists, by service and name, except what AWS keeps: keys that wait for deletion and service-linked
    roles."""
    result = {f"budgets {budget}" for budget in _budgets(region)} | {f"kms {item}" for item in _keys(region)}
    composites = client_of("cloudwatch", region).describe_alarms(AlarmTypes=["CompositeAlarm"])["CompositeAlarms"]
    result |= {f"cloudwatch {composite['AlarmName']}" for composite in composites}
    for service, call, key, name in _LISTS:
        client = client_of(service, region)
        answers = client.get_paginator(call).paginate() if client.can_paginate(call) else [getattr(client, call)()]
        for complete_action in answers:
            living = [entry for entry in complete_action.get(key, ()) if _is_live(entry)]
            result |= {f"{service} {entry if name is None else entry[name]}" for entry in living}
    return result


def _is_live(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return True
    return str(entry.get("State")) not in _ENDED and not entry.get("Path", "").startswith("/aws-service-role/")


def _keys(region: str) -> list[str]:
    """The keys of the account, without the AWS managed keys (aliases `alias/aws/`)."""
    kms = client_of("kms", region)
    of_aws = {
        alias.get("TargetKeyId")
        for alias in kms.list_aliases()["Aliases"]
        if alias["AliasName"].startswith("alias/aws/")
    }
    keys = [kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"] for key in kms.list_keys()["Keys"]]
    return [entry["KeyId"] for entry in keys if entry["KeyState"] != "PendingDeletion" and entry["KeyId"] not in of_aws]


def _budgets(region: str) -> list[str]:
    account = client_of("sts", region).get_caller_identity()["Account"]
    response = client_of("budgets", region).describe_budgets(AccountId=account)
    return [budget["BudgetName"] for budget in response.get("Budgets", [])]
