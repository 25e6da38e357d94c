"""Capacity blocks: scheduled scaling that starts instances with the block and drains them before its end.

Before the block begins, templates declare zero capacity, and schedules raise it. Once it has begun, a synthesis
declares the capacity itself and leaves out the past calls: a stack that is created then gets its instances.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from aws_cdk import Stack, aws_batch, aws_iam, aws_scheduler
from constructs import Construct

from nxpipe.pipeline.config.capacity import CapacityBlock
from nxpipe.stacks.iam import own_account_service, wait_for_permissions
from nxpipe.stacks.project import current_time


@dataclass(frozen=True)
class ScheduledCall:
    """One AWS API call at a fixed time, made by EventBridge Scheduler."""

    event: str  # a verb for names and descriptions: "opens"
    moment: datetime
    call: str  # service and API call, as in a universal target of EventBridge Scheduler: "batch:updateJobQueue"
    arguments: Mapping[str, object]
    permissions: Mapping[str, str]  # IAM action to resource


def schedule_queue(
    scope: Construct,
    name: str,
    block: CapacityBlock,
    queue: aws_batch.CfnJobQueue,
    environment: aws_batch.CfnComputeEnvironment,
) -> None:
    """Enable the queue at the block's start; disable queue and environment before its end.

    The environment is disabled too, because a disabled queue still runs the jobs that it has accepted.
    """
    job_queue = {"JobQueue": queue.ref}
    permissions = {"batch:UpdateJobQueue": queue.ref}
    disabled = {"ComputeEnvironment": environment.ref, "State": "DISABLED"}
    calls = (
        ScheduledCall(
            "opens", block.start.astimezone(UTC), "batch:updateJobQueue", {**job_queue, "State": "ENABLED"}, permissions
        ),
        ScheduledCall("closes", block.drained, "batch:updateJobQueue", {**job_queue, "State": "DISABLED"}, permissions),
        ScheduledCall(
            "drains",
            block.drained,
            "batch:updateComputeEnvironment",
            disabled,
            {"batch:UpdateComputeEnvironment": environment.ref},
        ),
    )
    add_schedules(scope, name, block, calls)


def add_schedules(scope: Construct, name: str, block: CapacityBlock, calls: Iterable[ScheduledCall]) -> None:
    """EventBridge schedules of the calls that are still to come."""
    stack = Stack.of(scope)
    calls = tuple(call for call in calls if call.moment > current_time())
    if not calls:
        return
    role = _role(scope, calls)
    for call in calls:
        schedule = aws_scheduler.CfnSchedule(
            scope,
            call.event.capitalize(),
            name=f"{name}-{call.event}",
            description=f"The capacity block {block.id} {call.event}",
            schedule_expression=f"at({call.moment:%Y-%m-%dT%H:%M:%S})",
            schedule_expression_timezone="UTC",
            flexible_time_window=aws_scheduler.CfnSchedule.FlexibleTimeWindowProperty(mode="OFF"),
            target=aws_scheduler.CfnSchedule.TargetProperty(
                arn=f"arn:{stack.partition}:scheduler:::aws-sdk:{call.call}",
                role_arn=role.role_arn,
                input=stack.to_json_string(call.arguments),
            ),
        )
        wait_for_permissions(schedule, role)


def _role(scope: Construct, calls: Iterable[ScheduledCall]) -> aws_iam.Role:
    role = aws_iam.Role(
        scope,
        "ClockRole",
        path="/nxpipe/",
        assumed_by=own_account_service(scope, "scheduler"),
    )
    permissions = {action: resource for call in calls for action, resource in call.permissions.items()}
    for action, resource in sorted(permissions.items()):
        role.add_to_policy(aws_iam.PolicyStatement(actions=[action], resources=[resource]))
    return role
