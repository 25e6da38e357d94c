"""Ways out of a closed network: one for each service that something inside calls, and none that nobody needs.

They are derived when all other stacks are made, and are proved once more when the stacks are synthesised: a call
without an endpoint would otherwise show as an instance that hangs at boot.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

import jsii
from aws_cdk import CfnResource, Stack, aws_ec2
from constructs import Construct, IValidation

from nxpipe.stacks.handles import NetworkHandle
from nxpipe.stacks.reach import GATEWAYS, Need, Resources, Unreachable, missing, needs

# The types that tell who calls what.
_TELLING: Final = (
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobDefinition",
    "AWS::EC2::LaunchTemplate",
    "AWS::IAM::ManagedPolicy",
    "AWS::IAM::Policy",
    "AWS::IAM::Role",
    "AWS::SageMaker::Model",
)


class Endpoints(Construct):
    """The endpoints of a network, in its stack."""

    def __init__(self, scope: Construct, id_: str, *, network: NetworkHandle, callers: Sequence[Stack]) -> None:
        super().__init__(scope, id_)
        wanted = sorted({need.endpoint for need in wants(callers)})
        self._subnets = aws_ec2.SubnetSelection(subnets=list(network.subnets.values()))
        for service in wanted:
            if service in GATEWAYS:
                self._lead_by_routes(network, service)
        interfaces = [service for service in wanted if service not in GATEWAYS]
        if network.closed and interfaces:
            self._lead_by_interfaces(network, interfaces)
        if network.closed:
            self.node.add_validation(_Complete(self, callers))

    def _lead_by_routes(self, network: NetworkHandle, service: str) -> None:
        """Costs nothing, and spares a NAT gateway the artifacts: made for open networks, too."""
        aws_ec2.GatewayVpcEndpoint(
            self,
            service,
            vpc=network.vpc,
            service=aws_ec2.GatewayVpcEndpointAwsService(service),
            subnets=[self._subnets],
        )

    def _lead_by_interfaces(self, network: NetworkHandle, services: Iterable[str]) -> None:
        group = aws_ec2.SecurityGroup(
            self,
            "Group",
            vpc=network.vpc,
            description="Endpoints of AWS services",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(aws_ec2.Peer.ipv4(network.cidr), aws_ec2.Port.tcp(443), "calls from the network")
        for service in services:
            aws_ec2.InterfaceVpcEndpoint(
                self,
                service,
                vpc=network.vpc,
                service=aws_ec2.InterfaceVpcEndpointAwsService(service),
                subnets=self._subnets,
                security_groups=[group],
                open=False,
            )


@jsii.implements(IValidation)
class _Complete:
    """Asked by CDK before it writes a template, when nothing is changed any more."""

    def __init__(self, endpoints: Endpoints, callers: Sequence[Stack]) -> None:
        self._endpoints = endpoints
        self._callers = callers

    def validate(self) -> list[str]:
        there = [child.node.id for child in self._endpoints.node.children]
        try:
            return missing(wants(self._callers), there)
        except Unreachable as unreachable:
            return [str(unreachable)]


def wants(callers: Iterable[Stack]) -> set[Need]:
    return {need for stack in callers for need in needs(stack.stack_name, _resources(stack))}


def _resources(stack: Stack) -> Resources:
    """As the template will have them, before there is one. Each question crosses to node and back, so few are asked."""
    every = [one for one in stack.node.find_all() if isinstance(one, CfnResource) and _type(one) in _TELLING]
    told = stack.resolve([{"id": one.logical_id, "properties": one._cfn_properties} for one in every])
    return {
        each["id"]: {"Type": _type(one), "Properties": one._render_properties(each.get("properties", {})) or {}}
        for one, each in zip(every, told, strict=True)
    }


def _type(one: CfnResource) -> str:
    return _type_of_all(one.__class__) or one.cfn_resource_type


@cache
def _type_of_all(made: type[CfnResource]) -> str | None:
    """Of a class that is generated for one type."""
    return getattr(made, "CFN_RESOURCE_TYPE_NAME", None)
