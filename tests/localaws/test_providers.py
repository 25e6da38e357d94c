"""Each provider supports all its properties: created, updated and deleted, with every property read back."""

import json
from typing import Any

import pytest

from tests.localaws.cases import CASES
from tests.localaws.cases.case import Case
from tests.localaws.census import census, inventory

REGION = "us-east-2"


def _template(case: Case, properties: dict[str, Any]) -> str:
    return json.dumps({"Resources": {"It": {"Type": case.type, "Properties": properties}, **case.dependencies}})


def _settled(aws: Any, name: str = "s") -> tuple[str, list[str]]:
    """The state of a stack, and the reasons of its failures."""
    failed = [
        f"{stack_event['LogicalResourceId']}: {stack_event['ResourceStatusReason']}"
        for stack_event in aws.describe_stack_events(StackName=name)["StackEvents"]
        if stack_event["ResourceStatus"].endswith("_FAILED")
    ]
    status: str = aws.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
    return status, failed


@pytest.mark.parametrize("case", CASES, ids=[f"{case.type[5:]}-{'-'.join(sorted(case.later))}"[:60] for case in CASES])
def test_a_resource_is_made_changed_and_removed_with_every_property(aws: Any, case: Case) -> None:
    before = inventory(REGION)
    consent = ["CAPABILITY_NAMED_IAM"]
    resource = aws.create_stack(StackName="s", TemplateBody=_template(case, case.first), Capabilities=consent)[
        "StackId"
    ]
    assert _settled(aws) == ("CREATE_COMPLETE", [])
    assert [str(entry) for entry in census(REGION)] == []
    aws.update_stack(StackName="s", TemplateBody=_template(case, case.afterwards), Capabilities=consent)
    assert _settled(aws) == ("UPDATE_COMPLETE", [])
    assert [str(entry) for entry in census(REGION)] == []
    aws.delete_stack(StackName="s")
    assert _settled(aws, resource) == ("DELETE_COMPLETE", [])
    assert inventory(REGION) == before
