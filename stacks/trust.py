"""Services of AWS that act for us: on behalf of this account alone, so that nobody else can lend them our roles."""

from aws_cdk import Stack, aws_iam
from constructs import IConstruct


def for_us(scope: IConstruct, service: str) -> aws_iam.ServicePrincipal:
    """A service, by a name such as "events", when it acts for something of this account."""
    ours = {"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}}
    return aws_iam.ServicePrincipal(f"{service}.amazonaws.com", conditions=ours)
