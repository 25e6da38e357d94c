"""Handles: the constructs that one stack passes to another. No stack looks up resources of another by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and few projects use all of them
    from aws_cdk import (
        aws_autoscaling,
        aws_batch,
        aws_cloudwatch,
        aws_dynamodb,
        aws_ec2,
        aws_ecr,
        aws_efs,
        aws_elasticloadbalancingv2,
        aws_iam,
        aws_kms,
        aws_s3,
        aws_sns,
    )


@dataclass(frozen=True)
class NetworkHandle:
    vpc: "aws_ec2.IVpc"
    cidr: str
    subnets: "Mapping[str, aws_ec2.ISubnet]"  # by zone
    efa_group: "aws_ec2.ISecurityGroup"  # allows all traffic between its members
    closed: bool  # AWS services are reached only through VPC endpoints


@dataclass(frozen=True)
class StoreHandle:
    bucket: "aws_s3.IBucket"
    key: "aws_kms.IKey"
    logs: "aws_s3.IBucket"
    repository: "aws_ecr.IRepository"


@dataclass(frozen=True)
class CacheHandle:
    """The file system that keeps compiled programs near the fleets."""

    file_system: "aws_efs.IFileSystem"
    group: "aws_ec2.ISecurityGroup"
    access_points: "Mapping[str, aws_efs.IAccessPoint]"  # by SDK version


@dataclass(frozen=True)
class ReleaseHandle:
    role: "aws_iam.IRole"  # of GitHub jobs that publish
    promoters: "Mapping[str, aws_iam.IRole]"  # of GitHub jobs that promote, by channel


@dataclass(frozen=True)
class FarmHandle:
    queue: "aws_batch.IJobQueue"
    job_definition: "aws_batch.IJobDefinition"


@dataclass(frozen=True)
class ServeHandle:
    """Resources of one serving fleet that rollouts and alarms use."""

    fleet: str
    load_balancer: "aws_elasticloadbalancingv2.ApplicationLoadBalancer"
    listener: "aws_elasticloadbalancingv2.IApplicationListener"
    rule: "aws_elasticloadbalancingv2.CfnListenerRule"  # rollouts change its weights
    target_groups: "Mapping[str, aws_elasticloadbalancingv2.ApplicationTargetGroup]"  # blue, green, standby
    groups: "Mapping[str, aws_autoscaling.CfnAutoScalingGroup]"
    rehearsal: bool  # the dashboard shows it
    ready_within: int  # minutes until a group has all instances that it should have
    follows_channel: bool = False  # its instances do, in place: it has no rollouts


@dataclass(frozen=True)
class EndpointHandle:
    """Metric dimensions and alarms of one SageMaker endpoint."""

    endpoint: str
    dimensions: Mapping[str, str]  # of its metrics
    alarms: "Sequence[aws_cloudwatch.IAlarm]"  # each rolls a deployment back
    rehearsal: bool  # the dashboard shows it


@dataclass(frozen=True)
class TrainHandle:
    fleet: str
    queue: "aws_batch.IJobQueue"
    failed_hosts: str  # name of the metric of hosts that do not join the cluster


@dataclass(frozen=True)
class ObserveHandle:
    release_bad: "Mapping[str, aws_cloudwatch.IAlarm]"  # by fleet
    topic: "aws_sns.ITopic"
    topic_key: "aws_kms.IKey"  # publishers need permission to use it


@dataclass(frozen=True)
class RolloutHandle:
    """State machine and record table of one fleet's rollouts."""

    fleet: str
    machine: str  # ARN
    table: "aws_dynamodb.ITable"
