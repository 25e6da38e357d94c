"""Launch templates, for each row of the catalogue that EC2 launches."""

from typing import Any

import boto3
import pytest
from aws_cdk import Stack, aws_ec2, aws_iam
from aws_cdk.assertions import Template

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.capacity import Capacity, ServingSpot, TrainingReservation
from nxpipe.stacks.launch import Machine, launch_template
from tests.stacks.fleet_world import IMAGE
from tests.stacks.local import HERE, deploy, destroy, new_app

WITH_EFA = [name for name, entry in INSTANCES.items() if entry.servers == 1 and entry.efa_interfaces]


def stack(
    *, instance_type: str = "inf2.xlarge", efa: bool = False, kubernetes: bool = False, capacity: Capacity | None = None
) -> Stack:
    made = Stack(new_app(), "demo-launch", env=HERE)
    group = aws_ec2.SecurityGroup.from_security_group_id(made, "Group", "sg-0a1b2c3d4e5f60718")
    role = aws_iam.Role(made, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    profile = aws_iam.CfnInstanceProfile(made, "Profile", roles=[role.role_name])
    machine = Machine(
        name="demo-train",
        image=IMAGE,
        profile=profile,
        groups=[group],
        user_data="#!/bin/sh\n",
        kubernetes=kubernetes,
        tags={"nxpipe:fleet": "train"},
    )
    launch_template(made, "Template", machine, instance_type=instance_type, efa=efa, capacity=capacity)
    return made


def data(made: Stack) -> dict[str, Any]:
    (template,) = Template.from_stack(made).find_resources("AWS::EC2::LaunchTemplate").values()
    found: dict[str, Any] = template["Properties"]["LaunchTemplateData"]
    return found


@pytest.mark.parametrize("name", WITH_EFA)
def test_each_network_card_has_its_interface_and_only_the_first_an_address(name: str) -> None:
    described = data(stack(instance_type=name, efa=True))
    interfaces = described["NetworkInterfaces"]
    cards = range(INSTANCES[name].efa_interfaces or 0)
    assert [interface["NetworkCardIndex"] for interface in interfaces] == list(cards)
    assert [interface["DeviceIndex"] for interface in interfaces] == [0, *(1 for _ in cards[1:])]
    assert [interface["InterfaceType"] for interface in interfaces] == ["efa", *("efa-only" for _ in cards[1:])]
    assert all(
        interface["Groups"] == ["sg-0a1b2c3d4e5f60718"] and "SubnetId" not in interface for interface in interfaces
    )
    assert "SecurityGroupIds" not in described


def test_an_instance_that_trains_with_nobody_has_an_ordinary_interface() -> None:
    described = data(stack(instance_type="trn1.32xlarge"))
    assert "NetworkInterfaces" not in described
    assert described["SecurityGroupIds"] == ["sg-0a1b2c3d4e5f60718"]


@pytest.mark.parametrize(("kubernetes", "hops", "tags"), [(False, 1, "enabled"), (True, 2, "disabled")])
def test_the_metadata_service_asks_for_a_token_and_is_as_near_as_it_can_be(
    kubernetes: bool, hops: int, tags: str
) -> None:
    assert data(stack(kubernetes=kubernetes))["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": hops,
        "InstanceMetadataTags": tags,
    }


def test_a_reservation_is_asked_for_by_its_id_and_spot_is_left_to_the_group() -> None:
    reserved = data(stack(capacity=TrainingReservation(kind="reservation", id="cr-0a1b2c3d4e5f60718")))
    target = reserved["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0a1b2c3d4e5f60718"}
    assert "InstanceMarketOptions" not in reserved
    assert "InstanceMarketOptions" not in data(stack(capacity=ServingSpot(kind="spot")))


def test_what_was_deployed_is_what_ec2_tells_and_goes_with_its_stack(aws: None) -> None:
    made = stack(instance_type="trn1.32xlarge", efa=True)
    deploy(made)
    ec2 = boto3.client("ec2")
    (told,) = ec2.describe_launch_template_versions(LaunchTemplateName="demo-train")["LaunchTemplateVersions"]
    assert len(told["LaunchTemplateData"]["NetworkInterfaces"]) == 8
    assert told["LaunchTemplateData"]["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
    destroy(made)
    assert not ec2.describe_launch_templates()["LaunchTemplates"]
