"""Endpoints of services in a network, and the record of what flows in it."""

import json
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
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

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        given = shaped(ec2, "create_vpc_endpoint", _with_text(wanted), but=frozenset({"Tags"}))
        told = ec2.create_vpc_endpoint(**given, **specified("vpc-endpoint", wanted))["VpcEndpoint"]
        interfaces = told.get("NetworkInterfaceIds", [])
        attributes = {"DnsEntries": [], "Id": told["VpcEndpointId"], "NetworkInterfaceIds": interfaces}
        return Made(told["VpcEndpointId"], attributes)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        given: dict[str, Any] = {"VpcEndpointId": made.id}
        for name, add, remove in (
            ("RouteTableIds", "AddRouteTableIds", "RemoveRouteTableIds"),
            ("SubnetIds", "AddSubnetIds", "RemoveSubnetIds"),
            ("SecurityGroupIds", "AddSecurityGroupIds", "RemoveSecurityGroupIds"),
        ):
            old, new = set(before.get(name, ())), set(wanted.get(name, ()))
            given |= {key: sorted(ids) for key, ids in ((add, new - old), (remove, old - new)) if ids}
        if before.get("PolicyDocument") != wanted.get("PolicyDocument"):
            text = _with_text(wanted).get("PolicyDocument")
            given |= {"PolicyDocument": text} if text else {"ResetPolicy": True}
        if before.get("PrivateDnsEnabled") != wanted.get("PrivateDnsEnabled"):
            given["PrivateDnsEnabled"] = str(wanted.get("PrivateDnsEnabled", False)).lower() == "true"
        ec2.modify_vpc_endpoint(**given)
        retag(ec2, made.id, before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_vpc_endpoints(VpcEndpointIds=[made.id])

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("ec2").describe_vpc_endpoints(VpcEndpointIds=[made.id])["VpcEndpoints"][0]
        groups = [group["GroupId"] for group in told.get("Groups", ())] or told.get("SecurityGroupIds", [])
        policy = told.get("PolicyDocument")
        return {**told, "SecurityGroupIds": groups, "PolicyDocument": json.loads(policy) if policy else None}


def _with_text(wanted: Properties) -> dict[str, Any]:
    policy = wanted.get("PolicyDocument")
    return {**wanted, "PolicyDocument": json.dumps(policy)} if policy is not None else dict(wanted)


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

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        renamed = {name: value for name, value in wanted.items() if name not in ("ResourceId", "Tags")}
        given = shaped(ec2, "create_flow_logs", {**renamed, "ResourceIds": [wanted["ResourceId"]]})
        told = ec2.create_flow_logs(**given, **specified("vpc-flow-log", wanted))
        if told.get("Unsuccessful"):
            raise RuntimeError(told["Unsuccessful"][0]["Error"]["Message"])
        return Made(told["FlowLogIds"][0], {"Id": told["FlowLogIds"][0]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        retag(at.client("ec2"), made.id, before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_flow_logs(FlowLogIds=[made.id])

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("ec2").describe_flow_logs(FlowLogIds=[made.id])["FlowLogs"][0]
        kind = "VPC" if told["ResourceId"].startswith("vpc-") else "Subnet"
        return {**told, "ResourceType": kind}
