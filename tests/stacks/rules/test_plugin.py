"""The pack in CDK: a finding fails the synthesis, and CDK's report says where it stands."""

import json
from pathlib import Path

import pytest
from aws_cdk import App, Stack, Validations, aws_ec2
from cdk_nag import AwsSolutionsChecks

from nxpipe.stacks.lint.finding import Accepted, Facts
from nxpipe.stacks.lint.validation import Guards

OURS = Accepted("NXP-NET-1", "demo-fleet/*", "a test of what is accepted")
NAGS = Accepted("AwsSolutions-EC23", "demo-fleet/In", "a test of what is accepted")


def synthesise(folder: Path, callers: str, *accepted: Accepted) -> None:
    """An app of two stacks, of which one uses the other's security group."""
    app = App(outdir=str(folder), analytics_reporting=False, builtin_cloud_formation_validation=False)
    Validations.of(app).add_plugins(Guards(Facts(), accepted, (AwsSolutionsChecks(app),)))
    network, fleet = Stack(app, "demo-network"), Stack(app, "demo-fleet")
    group = aws_ec2.CfnSecurityGroup(network, "Group", group_description="members")
    aws_ec2.CfnSecurityGroupIngress(fleet, "In", group_id=group.attr_group_id, ip_protocol="-1", cidr_ip=callers)
    app.synth()


def reported(folder: Path) -> str:
    return json.dumps(json.loads((folder / "validation-report.json").read_text())["pluginReports"])


def test_a_finding_ends_the_synthesis_and_stands_in_cdks_report_with_its_construct(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="NXP-NET-1: every port is open to the internet"):
        synthesise(tmp_path, "0.0.0.0/0")
    for words in ("NXP-NET-1", "AwsSolutions-EC23", "demo-fleet/In", "name a security group"):
        assert words in reported(tmp_path)


def test_one_list_of_acknowledgements_holds_for_all_packs(tmp_path: Path) -> None:
    synthesise(tmp_path, "0.0.0.0/0", OURS, NAGS)
    assert (tmp_path / "demo-fleet.template.json").is_file()


def test_an_acknowledgement_that_nothing_needs_ends_the_synthesis_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="NXP-ACK-1: no finding needs the acknowledgement of NXP-NET-1"):
        synthesise(tmp_path, "10.0.0.0/8", OURS)
