"""Each provider carries out all that it claims: deployed, changed and removed, with every property read back."""

import json
from typing import Any

import pytest

from tests.localaws.cases import CASES
from tests.localaws.cases.case import Case
from tests.localaws.census import census, inventory

REGION = "us-east-2"


def _template(case: Case, properties: dict[str, Any]) -> str:
    return json.dumps({"Resources": {"It": {"Type": case.type, "Properties": properties}, **case.around}})


def _settled(aws: Any, name: str = "s") -> tuple[str, list[str]]:
    """The state of a stack, and why what failed has failed."""
    failed = [
        f"{one['LogicalResourceId']}: {one['ResourceStatusReason']}"
        for one in aws.describe_stack_events(StackName=name)["StackEvents"]
        if one["ResourceStatus"].endswith("_FAILED")
    ]
    status: str = aws.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
    return status, failed


@pytest.mark.parametrize("case", CASES, ids=[f"{case.type[5:]}-{'-'.join(sorted(case.later))}"[:60] for case in CASES])
def test_a_resource_is_made_changed_and_removed_with_every_property(aws: Any, case: Case) -> None:
    before = inventory(REGION)
    consent = ["CAPABILITY_NAMED_IAM"]
    made = aws.create_stack(StackName="s", TemplateBody=_template(case, case.first), Capabilities=consent)["StackId"]
    assert _settled(aws) == ("CREATE_COMPLETE", [])
    assert [str(one) for one in census(REGION)] == []
    aws.update_stack(StackName="s", TemplateBody=_template(case, case.afterwards), Capabilities=consent)
    assert _settled(aws) == ("UPDATE_COMPLETE", [])
    assert [str(one) for one in census(REGION)] == []
    aws.delete_stack(StackName="s")
    assert _settled(aws, made) == ("DELETE_COMPLETE", [])
    assert inventory(REGION) == before
