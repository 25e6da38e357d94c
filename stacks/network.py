"""Network stack: a VPC with listed zones and literal addresses, and VPC endpoints for closed networks.

VPC endpoints of a closed network are created last: which are needed follows from what the other stacks call.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from ipaddress import ip_network
from typing import Any, Final

import jsii
from aws_cdk import Acknowledgment, CfnOutput, CfnResource, CfnTag, Stack, Validations, aws_ec2, aws_iam
from constructs import Construct, IValidation

from nxpipe.pipeline.config.cloud import ClosedNetwork, ExistingNetwork, NatNetwork
from nxpipe.stacks.handles import NetworkHandle
from nxpipe.stacks.iam import own_account_service
from nxpipe.stacks.lint.egress import GATEWAYS, Need, Resources, Unreachable, missing_endpoints, needs
from nxpipe.stacks.names import efa_group
from nxpipe.stacks.project import log_group, tag_project

_SUBNET_BITS: Final = 4  # each zone gets a sixteenth of the addresses, and so does its way out
_MOST_ZONES: Final = 6  # room is kept for that many, so that a new zone at the end of the list moves nothing


class NetworkStack(Stack):
    """A VPC of our own, or the one that exists."""

    handle: NetworkHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        network: ClosedNetwork | NatNetwork | ExistingNetwork,
        zones: tuple[str, ...],
        **kwargs: Any,
    ) -> None:
        self._zones = zones
        super().__init__(scope, id_, description=f"Network of {project}", **kwargs)
        tag_project(self, project)
        if isinstance(network, ExistingNetwork):
            vpc, subnets = self._existing(network)
        else:
            vpc, subnets = self._own(project, network, zones)
        closed = isinstance(network, ClosedNetwork)
        self.handle = NetworkHandle(vpc, network.cidr, subnets, self._efa_group(project, vpc), closed)

    @property
    def availability_zones(self) -> list[str]:
        """As listed: CDK would otherwise ask the account, with whatever credentials are at hand."""
        return list(self._zones)

    def _existing(self, network: ExistingNetwork) -> tuple[aws_ec2.IVpc, dict[str, aws_ec2.ISubnet]]:
        subnets = {
            each.zone: aws_ec2.Subnet.from_subnet_attributes(
                self, f"Subnet-{each.zone}", subnet_id=each.id, availability_zone=each.zone
            )
            for each in network.subnets
        }
        vpc = aws_ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=network.vpc,
            vpc_cidr_block=network.cidr,
            availability_zones=list(subnets),
        )
        routes = "Annotation::@aws-cdk/aws-ec2:noSubnetRouteTableId"
        for subnet in subnets.values():
            Validations.of(subnet).acknowledge(Acknowledgment(id=routes, reason="its routes are not ours to touch"))
        return vpc, subnets

    def _own(
        self, project: str, network: ClosedNetwork | NatNetwork, zones: tuple[str, ...]
    ) -> tuple[aws_ec2.IVpc, dict[str, aws_ec2.ISubnet]]:
        way_out = isinstance(network, NatNetwork)
        mask = ip_network(network.cidr).prefixlen + _SUBNET_BITS
        kinds = [
            aws_ec2.SubnetConfiguration(
                name="fleet",
                cidr_mask=mask,
                subnet_type=aws_ec2.SubnetType.PRIVATE_WITH_EGRESS if way_out else aws_ec2.SubnetType.PRIVATE_ISOLATED,
            )
        ]
        if way_out:
            public = aws_ec2.SubnetType.PUBLIC
            kinds.append(
                aws_ec2.SubnetConfiguration(
                    name="way-out", cidr_mask=mask, subnet_type=public, map_public_ip_on_launch=False
                )
            )
        vpc = aws_ec2.Vpc(
            self,
            "Vpc",
            vpc_name=project,
            ip_addresses=aws_ec2.IpAddresses.cidr(network.cidr),
            availability_zones=list(zones),
            reserved_azs=_MOST_ZONES - len(zones),
            nat_gateways=len(zones) if way_out else 0,
            subnet_configuration=kinds,
            restrict_default_security_group=False,  # that would take a custom resource; nothing joins that group
        )
        Validations.of(vpc).acknowledge(
            Acknowledgment(id="CloudFormation-Validate::W3010", reason="zones are listed, so that no subnet ever moves")
        )
        self._record_flows(project, vpc)
        own = vpc.private_subnets if way_out else vpc.isolated_subnets
        CfnOutput(self, "VpcId", value=vpc.vpc_id, description="The network of all fleets")
        return vpc, dict(zip(zones, own, strict=True))

    def _record_flows(self, project: str, vpc: aws_ec2.Vpc) -> None:
        logs = log_group(self, "Flows", f"/nxpipe/{project}/flows")
        role = aws_iam.Role(self, "FlowRole", assumed_by=own_account_service(self, "vpc-flow-logs"), path="/nxpipe/")
        logs.grant_write(role)
        vpc.add_flow_log("FlowLog", destination=aws_ec2.FlowLogDestination.to_cloud_watch_logs(logs, role))

    def _efa_group(self, project: str, vpc: aws_ec2.IVpc) -> aws_ec2.ISecurityGroup:
        """Collectives need all traffic to and from the group itself, named by the group: an open egress does not do.

        The rules stand beside the group, for inside of it it cannot name itself; an explicit egress to nowhere keeps
        EC2's own open one away.
        """
        group = aws_ec2.CfnSecurityGroup(
            self,
            "Efa",
            group_description=f"Nodes of {project} that train together",
            tags=[CfnTag(key="Name", value=efa_group(project))],
            vpc_id=vpc.vpc_id,
            security_group_egress=[
                aws_ec2.CfnSecurityGroup.EgressProperty(
                    ip_protocol="icmp", from_port=252, to_port=86, cidr_ip="255.255.255.255/32", description="nothing"
                )
            ],
        )
        id_ = group.attr_group_id
        aws_ec2.CfnSecurityGroupIngress(
            self, "EfaIn", group_id=id_, source_security_group_id=id_, ip_protocol="-1", description="from each other"
        )
        aws_ec2.CfnSecurityGroupEgress(
            self,
            "EfaOut",
            group_id=id_,
            destination_security_group_id=id_,
            ip_protocol="-1",
            description="to each other",
        )
        return aws_ec2.SecurityGroup.from_security_group_id(self, "EfaGroup", id_)


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
        wanted = sorted({need.endpoint for need in endpoint_needs(callers)})
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
            return missing_endpoints(endpoint_needs(self._callers), there)
        except Unreachable as unreachable:
            return [str(unreachable)]


def endpoint_needs(callers: Iterable[Stack]) -> set[Need]:
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
