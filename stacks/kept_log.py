"""Logs that are read when something went wrong: kept for three months, and no longer than what writes them."""

from aws_cdk import RemovalPolicy, aws_logs
from constructs import Construct


def kept_log(scope: Construct, id_: str, name: str | None = None) -> aws_logs.LogGroup:
    """Without a name CloudFormation gives it one."""
    return aws_logs.LogGroup(
        scope,
        id_,
        log_group_name=name,
        retention=aws_logs.RetentionDays.THREE_MONTHS,
        removal_policy=RemovalPolicy.DESTROY,
    )
