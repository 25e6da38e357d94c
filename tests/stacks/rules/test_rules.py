"""Each rule of the pack finds each violation of it, and accepts conforming templates."""

from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from nxpipe.stacks.lint.finding import Facts, Finding, KnownImage
from nxpipe.stacks.lint.rules import RULES, lint
from nxpipe.stacks.lint.template import Templates, read
from tests.conftest import ROOT
from tests.stacks.rules.fixtures import FACTS, FIXTURES, REGION, Break, Fixture, launch, resource

ELSEWHERE = {"NXP-COST-1", "NXP-KEEP-1", "NXP-KEEP-2"}  # rules about more than templates have tests of their own


def found(resources: Any, rule: str, facts: Facts = FACTS) -> list[Finding]:
    templates = Templates((read("demo", {"Resources": resources}, REGION),))
    return [entry for entry in lint(templates, facts) if entry.rule == rule]


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.rule)
def test_a_rule_says_nothing_of_a_template_that_keeps_it(fixture: Fixture) -> None:
    assert found(fixture.kept, fixture.rule) == []


BREAKS = [(fixture, entry) for fixture in FIXTURES for entry in fixture.breaks]


@pytest.mark.parametrize(("fixture", "broken"), BREAKS, ids=[f"{f.rule} {b.path}={b.says}" for f, b in BREAKS])
def test_a_rule_finds_what_breaks_it_and_says_where_and_what_to_do(fixture: Fixture, broken: Break) -> None:
    sentences = [str(entry) for entry in found(broken.of(fixture.kept), fixture.rule)]
    assert any(broken.says in said for said in sentences), sentences
    for said in sentences:
        assert said.startswith(f"{fixture.rule} demo/")
        assert "; " in said


def test_every_rule_has_a_fixture_and_stands_in_the_documentation() -> None:
    table = (ROOT / "docs" / "reference" / "lint-rules.md").read_text()
    broken = {fixture.rule for fixture in FIXTURES if fixture.breaks}
    for rule in RULES:
        assert rule.id in broken | ELSEWHERE
        assert f"| {rule.id} |" in table


BLOCKS = [fixture.kept for fixture in FIXTURES if fixture.rule == "NXP-CAP-2"]


@pytest.mark.parametrize("kept", BLOCKS, ids=["group", "queue", "nodes"])
def test_a_block_that_is_open_or_over_needs_no_schedule_in_the_past(kept: dict[str, Any]) -> None:
    begun, over = (replace(FACTS, now=datetime(2026, 12, day, 11, 30, tzinfo=UTC)) for day in (1, 8))
    filled = deepcopy({name: entry for name, entry in kept.items() if name != "Fill"})
    for properties in (entry["Properties"] for entry in filled.values()):
        for key, value in {"DesiredCapacity": "4", "State": "ENABLED"}.items():
            if key in properties and "StartTime" not in properties:
                properties[key] = value
        if "ScalingConfig" in properties:
            properties["ScalingConfig"]["DesiredSize"] = 4
    assert found(filled, "NXP-CAP-2", begun) == []
    assert "before its capacity block begins" in str(found(filled, "NXP-CAP-2"))
    without = {name: entry for name, entry in filled.items() if name != "Drain"}
    assert "nothing drains the instances" in str(found(without, "NXP-CAP-2", begun))
    assert "after its capacity block is drained" in str(found(without, "NXP-CAP-2", over))
    empty = {name: entry for name, entry in kept.items() if name not in ("Fill", "Drain")}
    assert found(empty, "NXP-CAP-2", over) == []


def test_an_id_belongs_to_one_rule() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)


def test_a_reference_is_followed_through_the_output_of_another_stack() -> None:
    network = read(
        "network",
        {
            "Resources": {"Efa": resource("AWS::EC2::SecurityGroup")},
            "Outputs": {"Group": {"Value": {"Fn::GetAtt": ["Efa", "GroupId"]}, "Export": {"Name": "network:Group"}}},
        },
    )
    fleet = read("fleet", {"Resources": {"Launch": launch()}})
    both, at = Templates((network, fleet)), fleet.resources["Launch"]
    weak = {"Fn::GetStackOutput": {"StackName": "network", "OutputName": "Group"}}
    for value in (weak, {"Fn::ImportValue": "network:Group"}):
        assert both.follow(value, at) == network.resources["Efa"]
    assert both.same((weak, at), ({"Ref": "Efa"}, network.resources["Efa"]))


def test_an_output_that_leads_back_to_itself_leads_nowhere() -> None:
    weak = {"Fn::GetStackOutput": {"StackName": "demo", "OutputName": "Round"}}
    demo = read("demo", {"Resources": {"Launch": launch()}, "Outputs": {"Round": {"Value": weak}}})
    assert Templates((demo,)).follow(weak, demo.resources["Launch"]) is None


def test_parameters_and_conditions_are_read_as_their_defaults_say() -> None:
    document = {
        "Parameters": {
            "Open": {"Type": "String", "Default": "yes"},
            "Callers": {"Type": "String", "Default": "0.0.0.0/0"},
            "Image": {"Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>", "Default": "/aws/service/neuron"},
        },
        "Conditions": {
            "IsOpen": {"Fn::Equals": [{"Ref": "Open"}, "yes"]},
            "IsClosed": {"Fn::Not": [{"Condition": "IsOpen"}]},
        },
        "Resources": {
            "In": resource("AWS::EC2::SecurityGroupIngress", IpProtocol="-1", CidrIp={"Ref": "Callers"}),
            "Never": resource("AWS::EC2::SecurityGroupIngress", CidrIp={"Ref": "Callers"}) | {"Condition": "IsClosed"},
            "Balancer": resource(
                "AWS::ElasticLoadBalancingV2::LoadBalancer",
                Scheme={"Fn::If": ["IsOpen", "internet-facing", "internal"]},
            ),
            "Launch": launch(ImageId={"Ref": "Image"}),
        },
    }
    result = [(entry.rule, entry.resource.id) for entry in lint(Templates((read("demo", document),)), Facts())]
    assert result.count(("NXP-NET-1", "In")) == 1
    assert result.count(("NXP-NET-1", "Balancer")) == 1
    assert ("NXP-HOST-2", "Launch") in result
    assert not [entry for entry in result if entry[1] == "Never"]


def test_a_network_with_a_way_out_needs_no_endpoints() -> None:
    (fixture,) = [entry for entry in FIXTURES if entry.rule == "NXP-NET-2"]
    way_out = {name: body for name, body in fixture.kept.items() if body["Type"] != "AWS::EC2::VPCEndpoint"}
    assert found(way_out, "NXP-NET-2")
    assert found(way_out | {"Nat": resource("AWS::EC2::NatGateway")}, "NXP-NET-2") == []


def test_what_is_not_known_is_not_judged() -> None:
    launched = {"Launch": launch(ImageId="ami-0000000000000000")}
    assert found(launched, "NXP-HOST-2")
    assert found(launched, "NXP-HOST-2", Facts()) == []
    assert found(launched, "NXP-HOST-2", Facts(images={}, given_images=frozenset({"ami-0000000000000000"}))) == []


@pytest.mark.parametrize(
    ("device", "size", "fault"),
    [
        ("/dev/xvda", 200, None),
        ("/dev/sda1", 200, "no disk is mapped to /dev/xvda"),
        ("/dev/xvda", 100, "100 GiB, less than the 120 GiB of the image's snapshot"),
    ],
)
def test_the_root_volume_is_that_of_the_image_and_holds_it(device: str, size: int, fault: str | None) -> None:
    id_ = "ami-0000000000000005"
    facts = Facts(images={id_: KnownImage("us-east-2", None, "/dev/xvda", 120)})
    disks = [{"DeviceName": device, "Ebs": {"VolumeSize": size, "Encrypted": True}}]
    result = found({"Launch": launch(ImageId=id_, BlockDeviceMappings=disks)}, "NXP-HOST-2", facts)
    assert len(result) == (fault is not None)
    assert all(fault is not None and fault in str(entry) for entry in result)
