"""`nxpipe infra lint` and `plan`: on files, on folders written by CDK, on deployed stacks."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

from nxpipe.pipeline.fleet.infrastructure import parse, templates_of
from nxpipe.pipeline.util.errors import TemplateInvalid
from nxpipe.stacks.lint.deployment_plan import fixed_properties
from tests.localaws.install import install
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.rules.fixtures import group, launch, resource

__all__ = ["nxpipe"]

REGION = "us-east-1"
OPEN = resource("AWS::EC2::SecurityGroupIngress", GroupId="sg-1", IpProtocol="tcp", FromPort=22, ToPort=22)
TOML = f'[project]\nname = "search"\nregion = "{REGION}"\n'
YAML = """\
Parameters:
  Callers: {Type: String, Default: 0.0.0.0/0}
Resources:
  In:
    Type: AWS::EC2::SecurityGroupIngress
    Properties:
      GroupId: !GetAtt Nodes.GroupId
      IpProtocol: tcp
      FromPort: 22
      ToPort: 22
      CidrIp: !Ref Callers
  Nodes:
    Type: AWS::EC2::SecurityGroup
    Properties: {GroupDescription: !Sub "${AWS::StackName} nodes"}
"""


def written(folder: Path, stacks: Mapping[str, Any]) -> Path:
    """A folder as `cdk synth` leaves it."""
    folder.mkdir(exist_ok=True)
    artifacts = {}
    for stack, resources in stacks.items():
        (folder / f"{stack}.template.json").write_text(json.dumps({"Resources": resources}))
        artifacts[stack] = {
            "type": "aws:cloudformation:stack",
            "environment": f"aws://123456789012/{REGION}",
            "properties": {"templateFile": f"{stack}.template.json"},
        }
    (folder / "manifest.json").write_text(json.dumps({"version": "55.0.0", "artifacts": artifacts}))
    return folder


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nxpipe.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FLEET = {"Launch": launch(InstanceType="inf2.xlarge"), "Nodes": group(DesiredCapacity="2")}


def test_a_template_in_yaml_is_read_with_its_short_forms_and_defaults(project: Path, nxpipe: InProcess) -> None:
    (project / "cluster.yaml").write_text(YAML)
    answer = nxpipe("infra", "lint", "cluster.yaml")
    assert answer.code == 33
    assert "NXP-NET-1 cluster/In" in answer.out
    assert "port 22 is open to the internet" in answer.out


def test_findings_as_json_say_where_and_what_to_do(project: Path, nxpipe: InProcess) -> None:
    (project / "cluster.yaml").write_text(YAML)
    (found,) = json.loads(nxpipe("infra", "lint", "cluster.yaml", "--json").out)
    assert (found["rule"], found["id"], found["place"]) == ("NXP-NET-1", "In", "CidrIp")
    assert found["mend"]


def test_a_folder_of_cdk_is_read_whole_and_what_is_right_is_not_told(project: Path, nxpipe: InProcess) -> None:
    written(project / "cdk.out", {"search-network": {"In": OPEN}})
    answer = nxpipe("infra", "lint", "cdk.out")
    assert (answer.code, answer.out) == (0, "")


def test_with_a_project_its_acknowledgements_and_its_budget_hold(project: Path, nxpipe: InProcess) -> None:
    world = deepcopy(OPEN)
    world["Properties"]["CidrIp"] = "0.0.0.0/0"
    written(project / "cdk.out", {"search-serve-web": {**FLEET, "In": world}})
    accepting = (
        '[[acknowledge]]\nrule = "NXP-NET-1"\nresource = "search-serve-web/In"\nreason = "a test of acknowledgements"\n'
        "expires = 2099-01-01\n"
    )
    (project / "nxpipe.toml").write_text(f"{TOML}[budget]\nmonthly = 5\n{accepting}")
    output = nxpipe("infra", "lint", "cdk.out", "--config", "nxpipe.toml").out
    assert "NXP-COST-1" in output
    assert "NXP-NET-1" not in output


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "Resources: [", "a: !Ref b"])
def test_what_is_no_template_is_told_by_its_name(text: str, project: Path, nxpipe: InProcess) -> None:
    (project / "broken.yaml").write_text(text)
    with pytest.raises(TemplateInvalid, match=r"broken\.yaml is not"):
        templates_of([Path("broken.yaml")])
    assert nxpipe("infra", "lint", "broken.yaml").code == 34


def test_a_folder_that_cdk_has_not_written_is_told() -> None:
    with pytest.raises(TemplateInvalid, match="run `npx cdk synth`"):
        templates_of([Path()])


def test_yaml_can_make_no_objects() -> None:
    with pytest.raises(TemplateInvalid):
        parse("Resources: {A: !!python/object/apply:os.system [exit]}", "evil.yaml")


def planned(nxpipe: InProcess, project: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    written(project / "before", before)
    written(project / "cdk.out", after)
    answer = nxpipe("infra", "plan", "--from", "before")
    assert answer.code == 0, answer.err
    return answer.out


def test_equal_templates_change_nothing(project: Path, nxpipe: InProcess) -> None:
    assert planned(nxpipe, project, {"search-serve-web": FLEET}, {"search-serve-web": FLEET}) == "Nothing changes.\n"


def test_a_new_image_restarts_the_instances_of_its_group(project: Path, nxpipe: InProcess) -> None:
    newer = deepcopy(FLEET)
    newer["Launch"]["Properties"]["LaunchTemplateData"]["ImageId"] = "ami-00000000000000002"
    result = planned(nxpipe, project, {"search-serve-web": FLEET}, {"search-serve-web": newer})
    assert "search-serve-web/Launch (AWS::EC2::LaunchTemplate) changes in place: LaunchTemplateData" in result
    assert "2 instances of search-serve-web/Nodes are replaced one after another" in result


def test_a_new_release_restarts_the_nodes_of_its_group_once(project: Path, nxpipe: InProcess) -> None:
    nodes = resource(
        "AWS::EKS::Nodegroup",
        LaunchTemplate={"Id": {"Ref": "Launch"}},
        ReleaseVersion="1.34.1-20261012",
        ScalingConfig={"DesiredSize": 3},
    )
    before = {"Launch": FLEET["Launch"], "Nodes": nodes}
    after = deepcopy(before)
    after["Nodes"]["Properties"]["ReleaseVersion"] = "1.34.2-20261120"
    after["Launch"]["Properties"]["LaunchTemplateData"]["Monitoring"] = {"Enabled": True}
    result = planned(nxpipe, project, {"search-cluster": before}, {"search-cluster": after})
    assert result.count("3 instances of search-cluster/Nodes are replaced") == 1


def test_what_cannot_change_is_replaced_and_the_property_named(project: Path, nxpipe: InProcess) -> None:
    before = {"Table": resource("AWS::DynamoDB::Table", TableName="one"), "Old": resource("AWS::SNS::Topic")}
    after = {"Table": resource("AWS::DynamoDB::Table", TableName="two"), "New": resource("AWS::SNS::Topic")}
    result = planned(nxpipe, project, {"search-web": before}, {"search-web": after})
    assert (
        "search-web/Table (AWS::DynamoDB::Table) is REPLACED by a new one: TableName cannot change in place" in result
    )
    assert "search-web/Old (AWS::SNS::Topic) is deleted" in result
    assert "search-web/New (AWS::SNS::Topic) is new" in result


def test_what_it_costs_is_told_before_and_after(project: Path, nxpipe: InProcess) -> None:
    larger = {**FLEET, "Nodes": group(DesiredCapacity="4")}
    result = planned(nxpipe, project, {"search-serve-web": FLEET}, {"search-serve-web": larger})
    assert "It costs about $2,214 a month; before, it was $1,107." in result


def test_the_cost_of_a_fleet_that_scales_is_told_as_a_range(project: Path, nxpipe: InProcess) -> None:
    tracking = resource("AWS::AutoScaling::ScalingPolicy", AutoScalingGroupName={"Ref": "Nodes"})
    scaled = {**FLEET, "Nodes": group(DesiredCapacity="2", MinSize="1", MaxSize="4"), "Tracking": tracking}
    result = planned(nxpipe, project, {"search-serve-web": FLEET}, {"search-serve-web": scaled})
    assert "It costs about $1,107 a month, as before; $553 to $2,214 a month with target tracking." in result


def test_a_stack_that_left_the_app_is_told_as_staying(project: Path, nxpipe: InProcess) -> None:
    result = planned(nxpipe, project, {"search-old": FLEET, "search-serve-web": FLEET}, {"search-serve-web": FLEET})
    assert "Stack search-old is no longer in the app: CDK leaves it unchanged." in result


def test_losing_what_must_be_kept_ends_in_an_exit_code_of_its_own(project: Path, nxpipe: InProcess) -> None:
    written(project / "cdk.out", {"search-storage": {"Renamed": resource("AWS::S3::Bucket")}})
    written(project / "before", {})
    answer = nxpipe("infra", "plan", "--from", "before")
    assert answer.code == 33
    assert "Artifacts82DD59A1 is no longer in the template" in answer.err


def test_the_plan_for_programs_has_the_same_facts(project: Path, nxpipe: InProcess) -> None:
    newer = deepcopy(FLEET)
    newer["Launch"]["Properties"]["LaunchTemplateData"]["ImageId"] = "ami-00000000000000002"
    written(project / "before", {"search-serve-web": FLEET})
    written(project / "cdk.out", {"search-serve-web": newer})
    made = json.loads(nxpipe("infra", "plan", "--from", "before", "--json").out)
    assert [(change["id"], change["change"], change["properties"]) for change in made["changes"]] == [
        ("Launch", "changed", ["LaunchTemplateData"])
    ]
    assert made["restarts"] == [{"group": "search-serve-web/Nodes", "by": "search-serve-web/Launch", "instances": 2}]
    assert made["monthly_usd"]["before"] == made["monthly_usd"]["after"]


def test_what_is_deployed_is_compared_with_what_would_be(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    install()
    topic = {"Topic": resource("AWS::SNS::Topic", DisplayName="before")}
    written(project / "cdk.out", {"search-observe-web": {"Topic": resource("AWS::SNS::Topic", DisplayName="after")}})
    with mock_aws():
        new = nxpipe("infra", "plan")
        assert "search-observe-web/Topic (AWS::SNS::Topic) is new" in new.out, new.err
        boto3.client("cloudformation", region_name=REGION).create_stack(
            StackName="search-observe-web", TemplateBody=json.dumps({"Resources": topic})
        )
        changed = nxpipe("infra", "plan")
    assert "search-observe-web/Topic (AWS::SNS::Topic) changes in place: DisplayName" in changed.out, changed.err


def test_what_reads_a_replaced_resource_of_another_stack_changes_too_or_forbids_it(
    project: Path, nxpipe: InProcess
) -> None:
    def templates(folder: str, cidr: str, port: int) -> None:
        name = "/nxpipe/search-serve/Targets/Ref"
        vpc = {"Vpc": resource("AWS::EC2::VPC", CidrBlock=cidr)}
        serve = {
            "Targets": resource(
                "AWS::ElasticLoadBalancingV2::TargetGroup", Port=port, VpcId={"Fn::ImportValue": "vpc"}
            ),
            "Stored": resource("AWS::SSM::Parameter", Name=name, Type="String", Value={"Ref": "Targets"}),
        }
        alarm = {"Alarm": resource("AWS::CloudWatch::Alarm", Dimensions=[{"Name": "T", "Value": {"Ref": "Targets"}}])}
        out = written(project / folder, {"search-network": vpc, "search-serve": serve, "search-observe": alarm})
        export = {"Vpc": {"Value": {"Ref": "Vpc"}, "Export": {"Name": "vpc"}}}
        parameter = {"Targets": {"Type": "AWS::SSM::Parameter::Value<String>", "Default": name}}
        for stack, more in (("network", {"Outputs": export}), ("observe", {"Parameters": parameter})):
            path = out / f"search-{stack}.template.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | more))

    templates("before", "10.0.0.0/16", 8000)
    templates("cdk.out", "10.0.0.0/16", 9000)
    result = nxpipe("infra", "plan", "--from", "before").out
    assert "search-serve/Targets (AWS::ElasticLoadBalancingV2::TargetGroup) is REPLACED" in result
    assert "search-observe/Alarm (AWS::CloudWatch::Alarm) changes in place: Dimensions" in result
    assert "refuses" not in result

    templates("cdk.out", "10.1.0.0/16", 8000)
    result = nxpipe("infra", "plan", "--from", "before").out
    assert "search-network/Vpc (AWS::EC2::VPC) is REPLACED by a new one: CidrBlock" in result
    assert "CloudFormation refuses this while other stacks import search-network/Vpc" in result
    assert "npx cdk deploy --exclusively search-serve" in result
    facts = json.loads(nxpipe("infra", "plan", "--from", "before", "--json").out)
    assert facts["refused"] == [{"resource": "search-network/Vpc", "importers": ["search-serve"]}]


def test_a_stack_that_has_an_old_value_of_another_one_is_listed_as_stale(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    install()
    name = "/nxpipe/search-cache/Files/Ref"
    topic = {"Topic": resource("AWS::SNS::Topic", DisplayName={"Ref": "Files"})}
    parameter = {"Files": {"Type": "AWS::SSM::Parameter::Value<String>", "Default": name}}
    out = written(project / "cdk.out", {"search-cluster": topic})
    text = json.dumps({"Parameters": parameter, "Resources": topic})
    (out / "search-cluster.template.json").write_text(text)
    with mock_aws():
        ssm = boto3.client("ssm", region_name=REGION)
        ssm.put_parameter(Name=name, Value="fs-1", Type="String")
        boto3.client("cloudformation", region_name=REGION).create_stack(StackName="search-cluster", TemplateBody=text)
        assert nxpipe("infra", "plan").out == "Nothing changes.\n"
        ssm.put_parameter(Name=name, Value="fs-2", Type="String", Overwrite=True)
        changed, facts = nxpipe("infra", "plan"), nxpipe("infra", "plan", "--json")
        ssm.delete_parameter(Name=name)
        gone = nxpipe("infra", "plan").out
    stale = f"Stack search-cluster is stale: it was deployed with fs-1 for {name}, which"
    assert f"{stale} is fs-2 now; `npx cdk deploy search-cluster` updates it." in changed.out
    expected = {"stack": "search-cluster", "name": name, "deployed": "fs-1", "current": "fs-2"}
    assert json.loads(facts.out)["stale"] == [expected]
    assert f"{stale} no longer exists; deploy the stack that has it first." in gone


def test_what_cannot_change_is_what_awss_own_schemas_say() -> None:
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

    for type_, known in fixed_properties().items():
        schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", type_).schema
        create_only_properties = [path.split("/")[2:] for path in schema.get("createOnlyProperties", ())]
        assert known == {path[0] for path in create_only_properties if len(path) == 1}, type_
