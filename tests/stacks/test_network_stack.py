"""The network: no lookups, stable subnets, and no unwanted egress."""

import json
from collections.abc import Iterator
from functools import cache
from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path
from typing import Any

import boto3
import pytest
from aws_cdk.assertions import Template
from pydantic import ValidationError

from nxpipe.pipeline.config.cloud import ClosedNetwork, ExistingNetwork, NatNetwork
from nxpipe.stacks.network import NetworkStack
from tests.stacks.local import HERE, deploy, destroy, new_app, resources, template_of

ZONES = ("us-east-2a", "us-east-2b")
EXISTING = ExistingNetwork.model_validate(
    {
        "kind": "existing",
        "vpc": "vpc-0a1b2c3d4e5f60718",
        "cidr": "10.0.0.0/8",
        "subnets": [{"zone": "us-east-2b", "id": "subnet-0a1b2c3d4e5f60718"}],
    }
)


@cache
def made(network: ClosedNetwork | NatNetwork | ExistingNetwork, zones: tuple[str, ...] = ZONES) -> NetworkStack:
    """Read and deployed only: no test adds to it."""
    return NetworkStack(new_app(), "demo-network", project="demo", network=network, zones=zones, env=HERE)


CLOSED, NAT = ClosedNetwork(), NatNetwork(kind="nat")


def test_nothing_is_looked_up_in_an_account() -> None:
    assembly = made(NAT).node.root.synth()
    assert "missing" not in json.loads(Path(assembly.directory, "manifest.json").read_text())


def subnets(stack: NetworkStack) -> dict[str, tuple[str, str]]:
    """Zone and addresses by logical id."""
    found = template_of(stack)["Resources"].items()
    return {
        name: (value["Properties"]["AvailabilityZone"], value["Properties"]["CidrBlock"])
        for name, value in found
        if value["Type"] == "AWS::EC2::Subnet"
    }


@pytest.mark.parametrize("network", [CLOSED, NAT], ids=["closed", "nat"])
def test_a_new_zone_at_the_end_moves_no_subnet(network: ClosedNetwork | NatNetwork) -> None:
    zones = tuple(f"us-east-2{letter}" for letter in "abcdef")
    for count in range(1, 6):
        before, after = subnets(made(network, zones[:count])), subnets(made(network, zones[: count + 1]))
        assert before.items() < after.items()
    blocks = [IPv4Network(cidr) for _, cidr in after.values()]
    assert not any(value.overlaps(other) for value, other in combinations(blocks, 2))
    assert all(block.subnet_of(IPv4Network(network.cidr)) for block in blocks)


@pytest.mark.parametrize("cidr", ["10.0.0.0/8", "10.20.0.0/25"])
def test_addresses_that_ec2_could_not_divide_are_refused(cidr: str) -> None:
    with pytest.raises(ValidationError, match="a block from /16 to /24"):
        ClosedNetwork(cidr=cidr)


def test_a_closed_network_has_no_gateway_and_no_route_out_of_it() -> None:
    kinds = {resource["Type"] for resource in template_of(made(CLOSED))["Resources"].values()}
    assert not kinds & {"AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::Route", "AWS::EC2::EIP"}


def test_each_zone_of_an_open_network_has_a_way_out_of_its_own_and_instances_no_public_address() -> None:
    template = Template.from_stack(made(NAT))
    template.resource_count_is("AWS::EC2::NatGateway", len(ZONES))
    template.all_resources_properties("AWS::EC2::Subnet", {"MapPublicIpOnLaunch": False})


def test_the_efa_group_lets_nodes_talk_to_each_other_by_group_and_to_nobody_else() -> None:
    found = template_of(made(CLOSED))["Resources"]
    itself = {"Fn::GetAtt": ["Efa", "GroupId"]}
    (egress,) = found["Efa"]["Properties"]["SecurityGroupEgress"]
    assert egress["CidrIp"] == "255.255.255.255/32"
    assert "SecurityGroupIngress" not in found["Efa"]["Properties"]
    for rule, other in (("EfaIn", "SourceSecurityGroupId"), ("EfaOut", "DestinationSecurityGroupId")):
        properties = found[rule]["Properties"]
        assert (properties["GroupId"], properties[other], properties["IpProtocol"]) == (itself, itself, "-1")


def test_an_existing_network_gets_the_efa_group_and_nothing_else() -> None:
    kinds = {resource["Type"] for resource in template_of(made(EXISTING))["Resources"].values()}
    assert kinds == {"AWS::EC2::SecurityGroup", "AWS::EC2::SecurityGroupEgress", "AWS::EC2::SecurityGroupIngress"}
    assert not made(EXISTING).handle.closed


def test_the_stack_needs_no_custom_resource_and_no_lambda() -> None:
    kinds = {resource["Type"] for resource in template_of(made(NAT))["Resources"].values()}
    assert not [kind for kind in kinds if "Lambda" in kind or "Custom" in kind]


def everything() -> Iterator[Any]:
    ec2 = boto3.client("ec2")
    yield ec2.describe_vpcs()["Vpcs"]
    yield ec2.describe_subnets()["Subnets"]
    yield ec2.describe_route_tables()["RouteTables"]
    yield ec2.describe_security_groups()["SecurityGroups"]
    yield ec2.describe_flow_logs()["FlowLogs"]
    yield ec2.describe_addresses()["Addresses"]
    yield boto3.client("logs").describe_log_groups()["logGroups"]


@pytest.mark.parametrize("network", [CLOSED, NAT], ids=["closed", "nat"])
def test_the_network_is_made_gets_a_zone_and_is_gone_again(aws: None, network: ClosedNetwork | NatNetwork) -> None:
    before = [len(found) for found in everything()]
    deploy(made(network))
    wider = made(network, (*ZONES, "us-east-2c"))
    old = set(resources(wider, "AWS::EC2::Subnet"))
    deploy(wider)
    assert old < set(resources(wider, "AWS::EC2::Subnet"))
    destroy(wider)
    assert [len(found) for found in everything()] == before
