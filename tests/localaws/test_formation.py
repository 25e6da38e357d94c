"""The local CloudFormation, tested with resources that record all operations."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import PROVIDERS, PhysicalResource, Properties, Provider, Site
from tests.localaws.install import install


class Thing(Provider):
    """A resource with a fixed name and a changeable colour, which fails on request."""

    type = "Test::Thing"
    properties = frozenset({"Name", "Colour", "Fails", "Of"})
    fixed = frozenset({"Name"})
    there: ClassVar[dict[str, Properties]] = {}
    log: ClassVar[list[str]] = []

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        resource = PhysicalResource(
            f"{desired.get('Name', site.logical)}#{len(self.log)}", {"Colour": desired.get("Colour"), "Arn": "arn"}
        )
        self.log.append(f"create {resource.id}")
        self.there[resource.id] = desired
        if desired.get("Fails") == "after":
            site.begin(resource)
        if desired.get("Fails") in ("now", "after"):
            if desired["Fails"] == "now":
                del self.there[resource.id]
            raise Refused("out of luck")
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        self.log.append(f"update {resource.id}")
        if desired.get("Fails") == "update":
            raise Refused("out of luck")
        self.there[resource.id] = desired
        return PhysicalResource(resource.id, {"Colour": desired.get("Colour"), "Arn": "arn"})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        self.log.append(f"delete {resource.id}")
        if properties.get("Fails") == "delete":
            raise Refused("held fast")
        del self.there[resource.id]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    monkeypatch.setitem(PROVIDERS, Thing.type, Thing())
    Thing.there.clear()
    Thing.log.clear()
    install()
    with mock_aws():
        yield boto3.client("cloudformation")


def template(outputs: dict[str, Any] | None = None, /, **things: dict[str, Any]) -> str:
    resources: dict[str, Any] = {}
    for name, properties in things.items():
        attributes = {key: properties.pop(key) for key in ("DependsOn", "DeletionPolicy") if key in properties}
        resources[name] = {"Type": "Test::Thing", "Properties": properties, **attributes}
    return json.dumps({"Resources": resources, "Outputs": outputs or {}})


def status(aws: Any, name: str = "s") -> str:
    stack_status: str = aws.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
    return stack_status


def reasons(aws: Any) -> list[str]:
    events = aws.describe_stack_events(StackName="s")["StackEvents"]
    failed = [
        event for event in events if event["ResourceStatus"].endswith("_FAILED") and event["LogicalResourceId"] != "s"
    ]
    return [entry["ResourceStatusReason"] for entry in failed]


def test_resources_are_made_behind_what_they_need_and_removed_before_it(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={"Of": {"Ref": "B"}}, B={"DependsOn": "C"}, C={}))
    assert [entry.split("#")[0] for entry in Thing.log] == ["create C", "create B", "create A"]
    aws.delete_stack(StackName="s")
    assert [entry.split("#")[0] for entry in Thing.log[3:]] == ["delete A", "delete B", "delete C"]
    assert not Thing.there


@pytest.mark.parametrize("fails", ["now", "after"])
def test_a_failed_stack_leaves_nothing_and_says_what_failed_and_why(aws: Any, fails: str) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={}, B={"Of": {"Ref": "A"}, "Fails": fails}))
    assert status(aws) == "ROLLBACK_COMPLETE"
    assert reasons(aws) == ["out of luck"]
    assert not Thing.there


def test_a_type_that_nobody_provides_fails_the_stack(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=json.dumps({"Resources": {"X": {"Type": "AWS::Made::Up"}}}))
    assert status(aws) == "ROLLBACK_COMPLETE"
    assert reasons(aws) == ["the local AWS has no provider for AWS::Made::Up"]


def test_a_property_that_nobody_carries_out_fails_the_stack(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(X={"Size": 3}))
    assert reasons(aws) == ["the local AWS does not support Size of Test::Thing"]


def test_a_changed_property_is_changed_in_place_and_a_fixed_one_makes_another_thing(aws: Any) -> None:
    outputs = {"Id": {"Value": {"Ref": "A"}}}
    aws.create_stack(StackName="s", TemplateBody=template(outputs, A={"Name": "a", "Colour": "red"}))
    aws.update_stack(StackName="s", TemplateBody=template(outputs, A={"Name": "a", "Colour": "blue"}))
    assert Thing.log == ["create a#0", "update a#0"]
    aws.update_stack(StackName="s", TemplateBody=template(outputs, A={"Name": "b", "Colour": "blue"}))
    assert Thing.log[2:] == ["create b#2", "delete a#0"]
    assert status(aws) == "UPDATE_COMPLETE"
    assert aws.describe_stacks(StackName="s")["Stacks"][0]["Outputs"][0]["OutputValue"] == "b#2"


def test_who_refers_to_a_replaced_resource_is_changed_too(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={"Name": "a"}, B={"Of": {"Ref": "A"}}))
    aws.update_stack(StackName="s", TemplateBody=template(A={"Name": "b"}, B={"Of": {"Ref": "A"}}))
    assert Thing.log[2:] == ["create b#2", "update B#1", "delete a#0"]
    assert Thing.there["B#1"]["Of"] == "b#2"


def test_a_failed_update_puts_everything_back(aws: Any) -> None:
    before = template(A={"Colour": "red"}, B={"Name": "b"}, D={})
    aws.create_stack(StackName="s", TemplateBody=before)
    there = dict(Thing.there)
    after = template(A={"Colour": "blue"}, B={"Name": "c"}, C={}, X={"Of": {"Ref": "C"}, "Fails": "now"})
    aws.update_stack(StackName="s", TemplateBody=after)
    assert status(aws) == "UPDATE_ROLLBACK_COMPLETE"
    assert reasons(aws) == ["out of luck"]
    assert Thing.there == there
    assert aws.get_template(StackName="s")["TemplateBody"] == json.loads(before)


def test_what_is_to_be_kept_is_kept(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={"DeletionPolicy": "Retain"}, B={}))
    aws.delete_stack(StackName="s")
    assert list(Thing.there) == ["A#0"]


def test_a_resource_that_cannot_be_removed_leaves_its_stack_undeleted(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={"Fails": "delete"}, B={"Of": {"Ref": "A"}}))
    aws.delete_stack(StackName="s")
    assert status(aws) == "DELETE_FAILED"
    assert reasons(aws) == ["held fast"]
    assert list(Thing.there) == ["A#0"]


def test_change_sets_of_equal_name_belong_to_their_own_stacks(aws: Any) -> None:
    for name, colour in (("one", "red"), ("two", "blue")):
        body = template(A={"Colour": colour})
        aws.create_change_set(StackName=name, ChangeSetName="same", ChangeSetType="CREATE", TemplateBody=body)
    for name in ("two", "one"):
        aws.execute_change_set(StackName=name, ChangeSetName="same")
        assert status(aws, name) == "CREATE_COMPLETE"
    assert [entry["Colour"] for entry in Thing.there.values()] == ["blue", "red"]


def test_a_change_set_tells_what_would_happen_and_does_nothing(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={"Name": "a"}, B={"Colour": "red"}, C={}))
    body = template(A={"Name": "b"}, B={"Colour": "red", "Of": {"Ref": "A"}}, D={})
    aws.create_change_set(StackName="s", ChangeSetName="n", TemplateBody=body)
    changes = aws.describe_change_set(StackName="s", ChangeSetName="n")["Changes"]
    result = {
        entry["ResourceChange"]["LogicalResourceId"]: (
            entry["ResourceChange"]["Action"],
            entry["ResourceChange"].get("Replacement"),
        )
        for entry in changes
    }
    assert result == {"A": ("Modify", "True"), "B": ("Modify", "False"), "C": ("Remove", None), "D": ("Add", None)}
    assert len(Thing.log) == 3


def test_a_change_set_without_changes_has_failed_and_says_so(aws: Any) -> None:
    body = template(A={})
    aws.create_stack(StackName="s", TemplateBody=body)
    aws.create_change_set(StackName="s", ChangeSetName="n", TemplateBody=body)
    response = aws.describe_change_set(StackName="s", ChangeSetName="n")
    assert (response["Status"], response["ExecutionStatus"]) == ("FAILED", "UNAVAILABLE")
    assert "didn't contain changes" in response["StatusReason"]


def test_an_export_that_is_imported_can_be_neither_removed_nor_changed(aws: Any) -> None:
    giving = {"Out": {"Value": {"Fn::GetAtt": ["A", "Colour"]}, "Export": {"Name": "colour"}}}
    aws.create_stack(StackName="giver", TemplateBody=template(giving, A={"Colour": "red"}))
    aws.create_stack(StackName="s", TemplateBody=template(B={"Colour": {"Fn::ImportValue": "colour"}}))
    assert Thing.there["B#1"]["Colour"] == "red"
    with pytest.raises(ClientError, match=r"cannot be deleted as it is in use by s"):
        aws.delete_stack(StackName="giver")
    aws.update_stack(StackName="giver", TemplateBody=template(giving, A={"Colour": "blue"}))
    assert status(aws, "giver") == "UPDATE_ROLLBACK_COMPLETE"
    assert Thing.there["A#0"]["Colour"] == "red"
    aws.delete_stack(StackName="s")
    aws.delete_stack(StackName="giver")
    assert not Thing.there


def test_a_weak_reference_reads_the_output_of_another_stack(aws: Any) -> None:
    aws.create_stack(StackName="giver", TemplateBody=template({"O": {"Value": {"Ref": "A"}}}, A={}))
    reference = {"Fn::GetStackOutput": {"StackName": "giver", "OutputName": "O"}}
    aws.create_stack(StackName="s", TemplateBody=template(B={"Of": reference}))
    assert Thing.there["B#1"]["Of"] == "A#0"
    aws.create_stack(
        StackName="t",
        TemplateBody=template(
            B={"Of": reference | {}}, C={"Of": {"Fn::GetStackOutput": {"StackName": "giver", "OutputName": "P"}}}
        ),
    )
    assert status(aws, "t") == "ROLLBACK_COMPLETE"


def test_a_weak_reference_is_read_again_only_if_the_text_around_it_changes(aws: Any) -> None:
    def giver(name: str) -> str:
        return template({"O": {"Value": {"Fn::GetAtt": ["A", "Colour"]}}}, A={"Colour": name})

    of = {"Fn::GetStackOutput": {"StackName": "giver", "OutputName": "O"}}
    aws.create_stack(StackName="giver", TemplateBody=giver("red"))
    aws.create_stack(StackName="s", TemplateBody=template(B={"Of": of}, C={"Colour": "red"}))
    aws.update_stack(StackName="giver", TemplateBody=giver("blue"))
    with pytest.raises(ClientError, match="No updates are to be performed"):
        aws.update_stack(StackName="s", TemplateBody=template(B={"Of": of}, C={"Colour": "red"}))
    aws.update_stack(StackName="s", TemplateBody=template(B={"Of": of}, C={"Colour": "blue"}))
    assert Thing.there["B#1"]["Of"] == "red"  # stale, beside a changed resource too
    aws.update_stack(StackName="s", TemplateBody=template(B={"Of": of, "Colour": "new"}, C={"Colour": "blue"}))
    assert Thing.there["B#1"]["Of"] == "blue"


def test_a_value_that_becomes_a_weak_reference_is_planned_as_a_new_one(aws: Any) -> None:
    aws.create_stack(StackName="giver", TemplateBody=template({"O": {"Value": "same"}}, A={}))
    aws.create_stack(StackName="s", TemplateBody=template(B={"Name": "same"}))
    weak = template(B={"Name": {"Fn::GetStackOutput": {"StackName": "giver", "OutputName": "O"}}})
    aws.create_change_set(StackName="s", ChangeSetName="weaker", TemplateBody=weak)
    (change,) = aws.describe_change_set(StackName="s", ChangeSetName="weaker")["Changes"]
    assert change["ResourceChange"]["Replacement"] == "True"


def test_functions_conditions_and_parameters_are_worked_out(aws: Any) -> None:
    boto3.client("ssm").put_parameter(Name="/colour", Value="green", Type="String")
    body = {
        "Parameters": {
            "Size": {"Type": "Number", "Default": "2"},
            "Colour": {"Type": "AWS::SSM::Parameter::Value<String>", "Default": "/colour"},
        },
        "Mappings": {"Names": {"us-east-2": {"short": "ohio"}}},
        "Conditions": {
            "Big": {"Fn::Not": [{"Fn::Equals": [{"Ref": "Size"}, "1"]}]},
            "Small": {"Fn::Not": [{"Condition": "Big"}]},
        },
        "Resources": {
            "A": {"Type": "Test::Thing", "Properties": {"Colour": {"Ref": "Colour"}, "Name": {"Ref": "AWS::NoValue"}}},
            "B": {
                "Type": "Test::Thing",
                "Properties": {
                    "Name": {
                        "Fn::Sub": [
                            "${AWS::Region}-${A.Colour}-${!kept}-${own}",
                            {"own": {"Fn::FindInMap": ["Names", {"Ref": "AWS::Region"}, "short"]}},
                        ]
                    },
                    "Colour": {"Fn::If": ["Big", {"Fn::Select": [1, {"Fn::Split": [",", "a,b"]}]}, "none"]},
                    "Of": {"Fn::Cidr": ["10.0.0.0/16", 2, 8]},
                },
            },
            "C": {"Type": "Test::Thing", "Condition": "Small"},
        },
    }
    aws.create_stack(StackName="s", TemplateBody=json.dumps(body))
    assert Thing.there["A#0"] == {"Colour": "green"}
    assert list(Thing.there.values())[1:] == [
        {"Name": "us-east-2-green-${kept}-ohio", "Colour": "b", "Of": ["10.0.0.0/24", "10.0.1.0/24"]}
    ]


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"A": {"Type": "Test::Thing", "Properties": {"Of": {"Ref": "B"}}}}, "Unresolved resource dependencies"),
        ({"A": {"Type": "Test::Thing", "Colour": "red"}}, "Invalid template resource property 'Colour'"),
        ({"A": {"Type": "Test::Thing", "Properties": {"Of": {"Fn::Made::Up": 1}}}}, "Fn::Made::Up is not supported"),
        ({}, "At least one Resources member"),
    ],
)
def test_a_template_that_makes_no_sense_is_refused(aws: Any, resources: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ClientError, match=sentence):
        aws.create_change_set(
            StackName="s",
            ChangeSetName="n",
            ChangeSetType="CREATE",
            TemplateBody=json.dumps({"Resources": resources}),
        )


def test_a_circle_is_refused(aws: Any) -> None:
    with pytest.raises(ClientError, match="Circular dependency"):
        aws.create_change_set(
            StackName="s",
            ChangeSetName="n",
            ChangeSetType="CREATE",
            TemplateBody=template(A={"Of": {"Ref": "B"}}, B={"Of": {"Ref": "A"}}),
        )


def test_a_protected_stack_is_not_deleted(aws: Any) -> None:
    aws.create_stack(StackName="s", TemplateBody=template(A={}), EnableTerminationProtection=True)
    with pytest.raises(ClientError, match="TerminationProtection"):
        aws.delete_stack(StackName="s")
    aws.update_termination_protection(StackName="s", EnableTerminationProtection=False)
    aws.delete_stack(StackName="s")
    assert not Thing.there


def test_roles_need_the_consent_of_the_caller(aws: Any) -> None:
    body = json.dumps({"Resources": {"R": {"Type": "AWS::IAM::Role", "Properties": {"RoleName": "r"}}}})
    with pytest.raises(ClientError, match="CAPABILITY_NAMED_IAM"):
        aws.create_stack(StackName="s", TemplateBody=body, Capabilities=["CAPABILITY_IAM"])


def test_a_deleted_stack_is_known_by_its_id_alone(aws: Any) -> None:
    resource = aws.create_stack(StackName="s", TemplateBody=template(A={}))["StackId"]
    aws.delete_stack(StackName="s")
    with pytest.raises(ClientError, match="does not exist"):
        aws.describe_stacks(StackName="s")
    assert status(aws, resource) == "DELETE_COMPLETE"
    assert not Thing.there
