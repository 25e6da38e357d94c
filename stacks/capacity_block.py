"""Capacity blocks: scheduled scaling that starts instances with the block and drains them before its end.

Templates declare zero capacity, and schedules raise it. CloudFormation updates a property only when the resource's own
text changed, so a deployment in the middle of a block changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from aws_cdk import Stack, aws_batch, aws_iam, aws_scheduler
from constructs import Construct

from nxpipe.pipeline.config.fleets import DRAINED_BEFORE_THE_END, CapacityBlock
from nxpipe.stacks.iam import own_account_service


@dataclass(frozen=True)
class ScheduledCall:
    """One call of AWS, at one moment."""

    what: str  # that the block does then: "opens"
    moment: datetime
    call: str  # as the schedules of EventBridge name it: "batch:updateJobQueue"
    arguments: Mapping[str, object]
    may: Mapping[str, str]  # actions of IAM, each with what it is done to


def drained_at(block: CapacityBlock) -> datetime:
    return (block.end - DRAINED_BEFORE_THE_END).astimezone(UTC)


def schedule_queue(
    scope: Construct,
    name: str,
    block: CapacityBlock,
    queue: aws_batch.CfnJobQueue,
    environment: aws_batch.CfnComputeEnvironment,
) -> None:
    """At the end the environment is closed too, for a closed queue still runs what it has taken."""
    switched = {"JobQueue": queue.ref}
    may = {"batch:UpdateJobQueue": queue.ref}
    closed = {"ComputeEnvironment": environment.ref, "State": "DISABLED"}
    turns = (
        ScheduledCall(
            "opens", block.start.astimezone(UTC), "batch:updateJobQueue", {**switched, "State": "ENABLED"}, may
        ),
        ScheduledCall("closes", drained_at(block), "batch:updateJobQueue", {**switched, "State": "DISABLED"}, may),
        ScheduledCall(
            "drains",
            drained_at(block),
            "batch:updateComputeEnvironment",
            closed,
            {"batch:UpdateComputeEnvironment": environment.ref},
        ),
    )
    add_schedules(scope, name, block, turns)


def add_schedules(scope: Construct, name: str, block: CapacityBlock, turns: Iterable[ScheduledCall]) -> None:
    stack = Stack.of(scope)
    kept = tuple(turns)
    role = _role(scope, kept)
    for turn in kept:
        aws_scheduler.CfnSchedule(
            scope,
            turn.what.capitalize(),
            name=f"{name}-{turn.what}",
            description=f"The capacity block {block.id} {turn.what}",
            schedule_expression=f"at({turn.moment:%Y-%m-%dT%H:%M:%S})",
            schedule_expression_timezone="UTC",
            flexible_time_window=aws_scheduler.CfnSchedule.FlexibleTimeWindowProperty(mode="OFF"),
            target=aws_scheduler.CfnSchedule.TargetProperty(
                arn=f"arn:{stack.partition}:scheduler:::aws-sdk:{turn.call}",
                role_arn=role.role_arn,
                input=stack.to_json_string(turn.arguments),
            ),
        )


def _role(scope: Construct, turns: Iterable[ScheduledCall]) -> aws_iam.Role:
    role = aws_iam.Role(
        scope,
        "ClockRole",
        path="/nxpipe/",
        assumed_by=own_account_service(scope, "scheduler"),
    )
    may = {action: resource for turn in turns for action, resource in turn.may.items()}
    for action, resource in sorted(may.items()):
        role.add_to_policy(aws_iam.PolicyStatement(actions=[action], resources=[resource]))
    return role
