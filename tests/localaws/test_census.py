"""The census looks at everything, and sees what is not there."""

import json
from typing import Any

import boto3
import pytest

from tests.localaws.census import census, counted
from tests.localaws.formation.provider import PROVIDERS, Made, Properties, Site
from tests.localaws.providers.sns import Topic

REGION = "us-east-2"


class Forgetful(Topic):
    """Takes a display name, as it says, and forgets it."""

    def create(self, wanted: Properties, at: Site) -> Made:
        return super().create({key: value for key, value in wanted.items() if key != "DisplayName"}, at)


def _create(aws: Any) -> str:
    topic = {"DisplayName": "bad releases", "TopicName": "nxpipe-bad", "Tags": [{"Key": "a", "Value": "b"}]}
    body = {"Resources": {"Topic": {"Type": Topic.type, "Properties": topic}}}
    aws.create_stack(StackName="s", TemplateBody=json.dumps(body))
    status: str = aws.describe_stacks(StackName="s")["Stacks"][0]["StackStatus"]
    return status


def test_a_census_of_what_was_carried_out_finds_nothing_and_has_looked_at_everything(aws: Any) -> None:
    assert _create(aws) == "CREATE_COMPLETE"
    assert (census(REGION), counted(REGION)) == ([], 3)


def test_a_property_that_a_provider_drops_is_found(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, Topic.type, Forgetful())
    assert _create(aws) == "CREATE_COMPLETE"  # nobody else notices
    (finding,) = census(REGION)
    assert (finding.logical, finding.type) == ("Topic", "AWS::SNS::Topic")
    assert finding.difference.startswith(".DisplayName: wanted 'bad releases'")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("DisplayName", "another"), ".DisplayName: wanted 'bad releases', found 'another'"),
        (("KmsMasterKeyId", "alias/x"), None),  # nobody wanted anything else
    ],
)
def test_what_was_changed_behind_the_back_of_a_stack_is_found(
    aws: Any, change: tuple[str, str], difference: str | None
) -> None:
    _create(aws)
    (arn,) = [one["TopicArn"] for one in boto3.client("sns").list_topics()["Topics"]]
    boto3.client("sns").set_topic_attributes(TopicArn=arn, AttributeName=change[0], AttributeValue=change[1])
    assert [one.difference for one in census(REGION)] == ([difference] if difference else [])


def test_a_tag_that_is_missing_is_found(aws: Any) -> None:
    _create(aws)
    (arn,) = [one["TopicArn"] for one in boto3.client("sns").list_topics()["Topics"]]
    boto3.client("sns").untag_resource(ResourceArn=arn, TagKeys=["a"])
    assert [one.difference.split(":")[0] for one in census(REGION)] == [".Tags"]
