"""Network stack: a VPC with explicit zones and address ranges, and VPC endpoints for closed networks.

The VPC endpoints of a closed network are created last, because they follow from the calls of the other stacks.
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
from nxpipe.stacks.iam import own_account_service, wait_for_permissions
from nxpipe.stacks.lint.egress import GATEWAYS, Need, Resources, Unreachable, missing_endpoints, needs
from nxpipe.stacks.names import efa_group
from nxpipe.stacks.project import log_group, tag_project
from nxpipe.stacks.references import export

_SUBNET_BITS: Final = 4  # each subnet has a sixteenth of the addresses
_MOST_ZONES: Final = 6  # address ranges are reserved for these, so that appending a zone changes no subnet


class NetworkStack(Stack):
    """A new VPC, or a reference to an existing one."""

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
        own = [] if isinstance(network, ExistingNetwork) else [vpc.vpc_id, *(net.subnet_id for net in subnets.values())]
        export(self, *own, self.handle.efa_group.security_group_id)

    @property
    def availability_zones(self) -> list[str]:
        """The configured zones; CDK would otherwise look them up with the current credentials."""
        return list(self._zones)

    def _existing(self, network: ExistingNetwork) -> tuple[aws_ec2.IVpc, dict[str, aws_ec2.ISubnet]]:
        subnets = {
            subnet.zone: aws_ec2.Subnet.from_subnet_attributes(
                self, f"Subnet-{subnet.zone}", subnet_id=subnet.id, availability_zone=subnet.zone
            )
            for subnet in network.subnets
        }
        vpc = aws_ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=network.vpc,
            vpc_cidr_block=network.cidr,
            availability_zones=list(subnets),
        )
        routes = "Annotation::@aws-cdk/aws-ec2:noSubnetRouteTableId"
        for imported in subnets.values():
            Validations.of(imported).acknowledge(Acknowledgment(id=routes, reason="its routes are managed elsewhere"))
        return vpc, subnets

    def _own(
        self, project: str, network: ClosedNetwork | NatNetwork, zones: tuple[str, ...]
    ) -> tuple[aws_ec2.IVpc, dict[str, aws_ec2.ISubnet]]:
        has_nat = isinstance(network, NatNetwork)
        mask = ip_network(network.cidr).prefixlen + _SUBNET_BITS
        kinds = [
            aws_ec2.SubnetConfiguration(
                name="fleet",
                cidr_mask=mask,
                subnet_type=aws_ec2.SubnetType.PRIVATE_WITH_EGRESS if has_nat else aws_ec2.SubnetType.PRIVATE_ISOLATED,
            )
        ]
        if has_nat:
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
            nat_gateways=len(zones) if has_nat else 0,
            subnet_configuration=kinds,
            restrict_default_security_group=False,  # it requires a custom resource, and no resource uses that group
        )
        Validations.of(vpc).acknowledge(
            Acknowledgment(id="CloudFormation-Validate::W3010", reason="zones are explicit, so that no subnet moves")
        )
        self._record_flows(project, vpc)
        own = vpc.private_subnets if has_nat else vpc.isolated_subnets
        CfnOutput(self, "VpcId", value=vpc.vpc_id, description="VPC of all fleets")
        return vpc, dict(zip(zones, own, strict=True))

    def _record_flows(self, project: str, vpc: aws_ec2.Vpc) -> None:
        logs = log_group(self, "Flows", f"/nxpipe/{project}/flows")
        role = aws_iam.Role(self, "FlowRole", assumed_by=own_account_service(self, "vpc-flow-logs"), path="/nxpipe/")
        logs.grant_write(role)
        # The service looks for its group in the list of all; the action supports no resource-level permissions.
        role.add_to_principal_policy(aws_iam.PolicyStatement(actions=["logs:DescribeLogGroups"], resources=["*"]))
        flows = vpc.add_flow_log("FlowLog", destination=aws_ec2.FlowLogDestination.to_cloud_watch_logs(logs, role))
        wait_for_permissions(flows, role)

    def _efa_group(self, project: str, vpc: aws_ec2.IVpc) -> aws_ec2.ISecurityGroup:
        """Security group for EFA, which requires rules for all traffic that name the group itself as peer.

        The rules are separate resources, because a group cannot reference itself inline. The egress rule to
        255.255.255.255 replaces EC2's default rule, which allows all egress.
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


# Resource types that determine which services are called.
_CALLER_TYPES: Final = (
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobDefinition",
    "AWS::EC2::LaunchTemplate",
    "AWS::IAM::ManagedPolicy",
    "AWS::IAM::Policy",
    "AWS::IAM::Role",
    "AWS::SageMaker::Model",
)


class Endpoints(Construct):
    """VPC endpoints of a network, in its stack."""

    def __init__(self, scope: Construct, id_: str, *, network: NetworkHandle, callers: Sequence[Stack]) -> None:
        super().__init__(scope, id_)
        services = sorted({need.endpoint for need in endpoint_needs(callers)})
        self._subnets = aws_ec2.SubnetSelection(subnets=list(network.subnets.values()))
        for service in services:
            if service in GATEWAYS:
                self._add_gateway(network, service)
        interfaces = [service for service in services if service not in GATEWAYS]
        if network.closed and interfaces:
            self._add_interfaces(network, interfaces)
        if network.closed:
            self.node.add_validation(_Complete(self, callers))

    def _add_gateway(self, network: NetworkHandle, service: str) -> None:
        """Add a gateway endpoint. It is free, and keeps artifact downloads off the NAT gateway of an open network."""
        aws_ec2.GatewayVpcEndpoint(
            self,
            service,
            vpc=network.vpc,
            service=aws_ec2.GatewayVpcEndpointAwsService(service),
            subnets=[self._subnets],
        )

    def _add_interfaces(self, network: NetworkHandle, services: Iterable[str]) -> None:
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
    """Validation of the endpoints. CDK runs it after all constructs are complete, before it writes templates."""

    def __init__(self, endpoints: Endpoints, callers: Sequence[Stack]) -> None:
        self._endpoints = endpoints
        self._callers = callers

    def validate(self) -> list[str]:
        existing = [child.node.id for child in self._endpoints.node.children]
        try:
            return missing_endpoints(endpoint_needs(self._callers), existing)
        except Unreachable as unreachable:
            return [str(unreachable)]


def endpoint_needs(callers: Iterable[Stack]) -> set[Need]:
    return {need for stack in callers for need in needs(stack.stack_name, _resources(stack))}


def _resources(stack: Stack) -> Resources:
    """Caller resources as the template will have them. One call resolves all of them: each call to jsii is slow."""
    constructs = [
        child for child in stack.node.find_all() if isinstance(child, CfnResource) and _type(child) in _CALLER_TYPES
    ]
    resolved = stack.resolve([{"id": child.logical_id, "properties": child._cfn_properties} for child in constructs])
    return {
        values["id"]: {"Type": _type(child), "Properties": child._render_properties(values.get("properties", {})) or {}}
        for child, values in zip(constructs, resolved, strict=True)
    }


def _type(resource: CfnResource) -> str:
    return _type_of_class(resource.__class__) or resource.cfn_resource_type


@cache
def _type_of_class(construct: type[CfnResource]) -> str | None:
    """The resource type of a generated L1 class; None for the generic CfnResource."""
    return getattr(construct, "CFN_RESOURCE_TYPE_NAME", None)
