"""As whom pods call AWS: roles that EKS gives to service accounts, without a key or a provider in between."""

from aws_cdk import Stack, aws_iam
from constructs import Construct

from nxpipe.stacks.names import cluster_name


def pod_role(scope: Construct, id_: str, project: str, what: str) -> aws_iam.Role:
    """Taken by pods of this project's cluster only."""
    stack = Stack.of(scope)
    arn = f"arn:{stack.partition}:eks:{stack.region}:{stack.account}:cluster/{cluster_name(project)}"
    ours = {"StringEquals": {"aws:SourceAccount": stack.account}, "ArnEquals": {"aws:SourceArn": arn}}
    pods = aws_iam.ServicePrincipal("pods.eks.amazonaws.com", conditions=ours)
    return aws_iam.Role(scope, id_, path="/nxpipe/", description=what, assumed_by=aws_iam.SessionTagsPrincipal(pods))
