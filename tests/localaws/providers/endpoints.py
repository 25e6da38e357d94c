"""VPC endpoints, endpoint services and flow logs."""

import json
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped
from tests.localaws.providers.network import retag, specified


@provides
class VpcEndpoint(Provider):
    type = "AWS::EC2::VPCEndpoint"
    properties = frozenset(
        {
            "PolicyDocument",
            "PrivateDnsEnabled",
            "RouteTableIds",
            "SecurityGroupIds",
            "ServiceName",
            "SubnetIds",
            "Tags",
            "VpcEndpointType",
            "VpcId",
        }
    )
    fixed = frozenset({"ServiceName", "VpcEndpointType", "VpcId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        arguments = shaped(ec2, "create_vpc_endpoint", _with_text(desired), exclude=frozenset({"Tags"}))
        vpc_endpoint = ec2.create_vpc_endpoint(**arguments, **specified("vpc-endpoint", desired))["VpcEndpoint"]
        interfaces = vpc_endpoint.get("NetworkInterfaceIds", [])
        attributes = {"DnsEntries": [], "Id": vpc_endpoint["VpcEndpointId"], "NetworkInterfaceIds": interfaces}
        return PhysicalResource(vpc_endpoint["VpcEndpointId"], attributes)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        arguments: dict[str, Any] = {"VpcEndpointId": resource.id}
        for name, add, remove in (
            ("RouteTableIds", "AddRouteTableIds", "RemoveRouteTableIds"),
            ("SubnetIds", "AddSubnetIds", "RemoveSubnetIds"),
            ("SecurityGroupIds", "AddSecurityGroupIds", "RemoveSecurityGroupIds"),
        ):
            old, new = set(before.get(name, ())), set(desired.get(name, ()))
            arguments |= {key: sorted(ids) for key, ids in ((add, new - old), (remove, old - new)) if ids}
        if before.get("PolicyDocument") != desired.get("PolicyDocument"):
            text = _with_text(desired).get("PolicyDocument")
            arguments |= {"PolicyDocument": text} if text else {"ResetPolicy": True}
        if before.get("PrivateDnsEnabled") != desired.get("PrivateDnsEnabled"):
            arguments["PrivateDnsEnabled"] = str(desired.get("PrivateDnsEnabled", False)).lower() == "true"
        ec2.modify_vpc_endpoint(**arguments)
        retag(ec2, resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_vpc_endpoints(VpcEndpointIds=[resource.id])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        vpc_endpoint = site.client("ec2").describe_vpc_endpoints(VpcEndpointIds=[resource.id])["VpcEndpoints"][0]
        groups = [group["GroupId"] for group in vpc_endpoint.get("Groups", ())] or vpc_endpoint.get(
            "SecurityGroupIds", []
        )
        policy = vpc_endpoint.get("PolicyDocument")
        return {**vpc_endpoint, "SecurityGroupIds": groups, "PolicyDocument": json.loads(policy) if policy else None}


def _with_text(desired: Properties) -> dict[str, Any]:
    policy = desired.get("PolicyDocument")
    return {**desired, "PolicyDocument": json.dumps(policy)} if policy is not None else dict(desired)


@provides
class VpcEndpointService(Provider):
    type = "AWS::EC2::VPCEndpointService"
    properties = frozenset({"AcceptanceRequired", "NetworkLoadBalancerArns", "Tags"})
    fixed = frozenset()

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2, name = site.client("ec2"), "create_vpc_endpoint_service_configuration"
        arguments = shaped(ec2, name, desired, exclude=frozenset({"Tags"}))
        made = ec2.create_vpc_endpoint_service_configuration(**arguments, **specified("vpc-endpoint-service", desired))
        id_ = made["ServiceConfiguration"]["ServiceId"]
        return PhysicalResource(id_, {"ServiceId": id_})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        old, new = (set(every.get("NetworkLoadBalancerArns", ())) for every in (before, desired))
        moved = {"AddNetworkLoadBalancerArns": sorted(new - old), "RemoveNetworkLoadBalancerArns": sorted(old - new)}
        ec2.modify_vpc_endpoint_service_configuration(
            ServiceId=resource.id,
            AcceptanceRequired=str(desired.get("AcceptanceRequired", False)).lower() == "true",
            **{name: arns for name, arns in moved.items() if arns},
        )
        retag(ec2, resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_vpc_endpoint_service_configurations(ServiceIds=[resource.id])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("ec2").describe_vpc_endpoint_service_configurations(ServiceIds=[resource.id])
        found: Properties = response["ServiceConfigurations"][0]
        return found


@provides
class VpcEndpointServicePermissions(Provider):
    type = "AWS::EC2::VPCEndpointServicePermissions"
    properties = frozenset({"AllowedPrincipals", "ServiceId"})
    fixed = frozenset({"ServiceId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        self._set(desired["ServiceId"], (), desired.get("AllowedPrincipals", ()), site)
        return PhysicalResource(desired["ServiceId"], {})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        self._set(resource.id, before.get("AllowedPrincipals", ()), desired.get("AllowedPrincipals", ()), site)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        self._set(resource.id, properties.get("AllowedPrincipals", ()), (), site)

    def _set(self, service: str, before: Any, desired: Any, site: Site) -> None:
        added, removed = sorted(set(desired) - set(before)), sorted(set(before) - set(desired))
        arguments = {"AddAllowedPrincipals": added, "RemoveAllowedPrincipals": removed}
        site.client("ec2").modify_vpc_endpoint_service_permissions(
            ServiceId=service, **{name: arns for name, arns in arguments.items() if arns}
        )

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("ec2").describe_vpc_endpoint_service_permissions(ServiceId=resource.id)
        return {
            "ServiceId": resource.id,
            "AllowedPrincipals": [entry["Principal"] for entry in response["AllowedPrincipals"]],
        }


@provides
class FlowLog(Provider):
    type = "AWS::EC2::FlowLog"
    properties = frozenset(
        {
            "DeliverLogsPermissionArn",
            "LogDestination",
            "LogDestinationType",
            "LogFormat",
            "LogGroupName",
            "MaxAggregationInterval",
            "ResourceId",
            "ResourceType",
            "Tags",
            "TrafficType",
        }
    )
    fixed = properties - {"Tags"}

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        renamed = {name: value for name, value in desired.items() if name not in ("ResourceId", "Tags")}
        arguments = shaped(ec2, "create_flow_logs", {**renamed, "ResourceIds": [desired["ResourceId"]]})
        response = ec2.create_flow_logs(**arguments, **specified("vpc-flow-log", desired))
        if response.get("Unsuccessful"):
            raise RuntimeError(response["Unsuccessful"][0]["Error"]["Message"])
        return PhysicalResource(response["FlowLogIds"][0], {"Id": response["FlowLogIds"][0]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        retag(site.client("ec2"), resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_flow_logs(FlowLogIds=[resource.id])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        flow_log = site.client("ec2").describe_flow_logs(FlowLogIds=[resource.id])["FlowLogs"][0]
        kind = "VPC" if flow_log["ResourceId"].startswith("vpc-") else "Subnet"
        return {**flow_log, "ResourceType": kind}
