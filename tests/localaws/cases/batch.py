"""Cases of AWS Batch."""

from typing import Final

from tests.localaws.cases.case import NETWORK, Case, ref, role

_ENVIRONMENT: Final = {
    "Environment": {
        "Type": "AWS::Batch::ComputeEnvironment",
        "Properties": {
            "Type": "MANAGED",
            "ComputeResources": {
                "Type": "EC2",
                "MinvCpus": 0,
                "MaxvCpus": 8,
                "InstanceTypes": ["c7i.large"],
                "InstanceRole": ref("Profile", "Arn"),
                "Subnets": [ref("A")],
                "SecurityGroupIds": [ref("Group")],
            },
        },
    },
    "Worker": role("ec2"),
    "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [ref("Worker")]}},
    **NETWORK,
}

_CONTAINER: Final = {
    "Image": "123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe:1",
    "Command": ["nxpipe", "build"],
    "ResourceRequirements": [{"Type": "VCPU", "Value": "4"}, {"Type": "MEMORY", "Value": "8192"}],
    "Environment": [{"Name": "A", "Value": "b"}],
    "JobRoleArn": ref("Role", "Arn"),
    "LogConfiguration": {"LogDriver": "awslogs", "Options": {"awslogs-group": "/nxpipe/jobs"}},
    "ReadonlyRootFilesystem": True,
}


CASES: Final = (
    Case(
        "AWS::Batch::ComputeEnvironment",
        {
            "ComputeEnvironmentName": "nxpipe-farm",
            "ComputeResources": {
                "AllocationStrategy": "SPOT_PRICE_CAPACITY_OPTIMIZED",
                "BidPercentage": 80,
                "Ec2Configuration": [{"ImageType": "ECS_AL2023"}],
                "InstanceRole": ref("Profile", "Arn"),
                "InstanceTypes": ["c7i.large", "m7i.large"],
                "LaunchTemplate": {"LaunchTemplateId": ref("Template"), "Version": "1"},
                "MaxvCpus": 64,
                "MinvCpus": 0,
                "SecurityGroupIds": [ref("Group")],
                "Subnets": [ref("A"), ref("B")],
                "Tags": {"Name": "farm"},
                "Type": "SPOT",
                "UpdateToLatestImageVersion": False,
            },
            "ReplaceComputeEnvironment": False,
            "State": "ENABLED",
            "Tags": {"a": "1"},
            "Type": "MANAGED",
            "UpdatePolicy": {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 30},
        },
        {"State": "DISABLED"},
        {
            "Template": {
                "Type": "AWS::EC2::LaunchTemplate",
                "Properties": {"LaunchTemplateData": {"InstanceType": "c7i.large"}},
            },
            "Worker": role("ec2"),
            "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [ref("Worker")]}},
            **NETWORK,
        },
    ),
    Case(
        "AWS::Batch::JobQueue",
        {
            "ComputeEnvironmentOrder": [{"ComputeEnvironment": ref("Environment"), "Order": 1}],
            "JobQueueName": "nxpipe-q",
            "JobStateTimeLimitActions": [
                {"Action": "CANCEL", "MaxTimeSeconds": 600, "Reason": "MISCONFIGURATION", "State": "RUNNABLE"}
            ],
            "Priority": 1,
            "SchedulingPolicyArn": ref("Policy"),
            "State": "ENABLED",
            "Tags": {"a": "1"},
        },
        {"Priority": 5},
        {"Policy": {"Type": "AWS::Batch::SchedulingPolicy", "Properties": {}}, **_ENVIRONMENT},
    ),
    Case(
        "AWS::Batch::JobDefinition",
        {
            "ContainerProperties": _CONTAINER,
            "JobDefinitionName": "nxpipe-j",
            "Parameters": {"model": "x"},
            "PlatformCapabilities": ["EC2"],
            "PropagateTags": True,
            "RetryStrategy": {
                "Attempts": 3,
                "EvaluateOnExit": [
                    {"Action": "RETRY", "OnStatusReason": "Host EC2*"},
                    {"Action": "EXIT", "OnReason": "*"},
                ],
            },
            "SchedulingPriority": 7,
            "Tags": {"a": "1"},
            "Timeout": {"AttemptDurationSeconds": 3600},
            "Type": "container",
        },
        {"Timeout": {"AttemptDurationSeconds": 7200}},
        {"Role": role("ecs-tasks")},
    ),
    Case(
        "AWS::Batch::JobDefinition",
        {
            "JobDefinitionName": "nxpipe-train",
            "NodeProperties": {
                "MainNode": 0,
                "NumNodes": 4,
                "NodeRangeProperties": [{"TargetNodes": "0:", "Container": _CONTAINER}],
            },
            "RetryStrategy": {"Attempts": 1},
            "Type": "multinode",
        },
        {
            "NodeProperties": {
                "MainNode": 0,
                "NumNodes": 2,
                "NodeRangeProperties": [{"TargetNodes": "0:1", "Container": _CONTAINER}],
            }
        },
        {"Role": role("ecs-tasks")},
    ),
    Case(
        "AWS::Batch::SchedulingPolicy",
        {"FairsharePolicy": {"ComputeReservation": 1, "ShareDecaySeconds": 60}, "Name": "fair", "Tags": {"a": "1"}},
        {"FairsharePolicy": {"ComputeReservation": 2, "ShareDecaySeconds": 60}},
    ),
)
