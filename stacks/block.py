"""The life of a capacity block: its queue opens when the block begins, and closes early enough to leave in peace.

Templates say that the queue is closed, and schedules open it. CloudFormation sends a queue's state again only when the
queue's own text changed, so a deployment in the middle of a block moves nothing.
"""

from datetime import UTC, datetime
from typing import Final

from aws_cdk import Stack, aws_batch, aws_iam, aws_scheduler
from constructs import Construct

from pipeline.config.capacity import DRAINED_BEFORE_THE_END, CapacityBlock

_SWITCHES: Final = ("batch:UpdateComputeEnvironment", "batch:UpdateJobQueue")


def drained_at(block: CapacityBlock) -> datetime:
    return (block.end - DRAINED_BEFORE_THE_END).astimezone(UTC)


def keep_to_its_time(
    scope: Construct,
    name: str,
    block: CapacityBlock,
    queue: aws_batch.CfnJobQueue,
    environment: aws_batch.CfnComputeEnvironment,
) -> None:
    """At the end the environment is closed too, for a closed queue still runs what it has taken."""
    role = _role(scope, queue, environment)
    for what, moment, action, target in (
        ("opens", block.start.astimezone(UTC), "updateJobQueue", {"JobQueue": queue.ref, "State": "ENABLED"}),
        ("closes", drained_at(block), "updateJobQueue", {"JobQueue": queue.ref, "State": "DISABLED"}),
        (
            "drains",
            drained_at(block),
            "updateComputeEnvironment",
            {"ComputeEnvironment": environment.ref, "State": "DISABLED"},
        ),
    ):
        stack = Stack.of(scope)
        aws_scheduler.CfnSchedule(
            scope,
            what.capitalize(),
            name=f"{name}-{what}",
            description=f"The capacity block {block.id} {what}",
            schedule_expression=f"at({moment:%Y-%m-%dT%H:%M:%S})",
            schedule_expression_timezone="UTC",
            flexible_time_window=aws_scheduler.CfnSchedule.FlexibleTimeWindowProperty(mode="OFF"),
            target=aws_scheduler.CfnSchedule.TargetProperty(
                arn=f"arn:{stack.partition}:scheduler:::aws-sdk:batch:{action}",
                role_arn=role.role_arn,
                input=stack.to_json_string(target),
            ),
        )


def _role(scope: Construct, queue: aws_batch.CfnJobQueue, environment: aws_batch.CfnComputeEnvironment) -> aws_iam.Role:
    ours = {"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}}
    role = aws_iam.Role(
        scope,
        "ClockRole",
        path="/nxpipe/",
        assumed_by=aws_iam.ServicePrincipal("scheduler.amazonaws.com", conditions=ours),
    )
    for action, resource in zip(_SWITCHES, (environment.ref, queue.ref), strict=True):
        role.add_to_policy(aws_iam.PolicyStatement(actions=[action], resources=[resource]))
    return role
