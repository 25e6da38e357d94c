"""The census reads every property and reports the missing ones."""

import json
from typing import Any

import boto3
import pytest

from tests.localaws.census import census, count_properties
from tests.localaws.formation.provider import PROVIDERS, PhysicalResource, Properties, Site
from tests.localaws.providers.sns import Topic

REGION = "us-east-2"


class Forgetful(Topic):
    """A provider that accepts a display name and drops it."""

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return super().create({key: value for key, value in desired.items() if key != "DisplayName"}, site)


def _create(aws: Any) -> str:
    topic = {"DisplayName": "bad releases", "TopicName": "nxpipe-bad", "Tags": [{"Key": "a", "Value": "b"}]}
    body = {"Resources": {"Topic": {"Type": Topic.type, "Properties": topic}}}
    aws.create_stack(StackName="s", TemplateBody=json.dumps(body))
    status: str = aws.describe_stacks(StackName="s")["Stacks"][0]["StackStatus"]
    return status


def test_a_census_of_what_was_carried_out_finds_nothing_and_has_looked_at_everything(aws: Any) -> None:
    assert _create(aws) == "CREATE_COMPLETE"
    assert (census(REGION), count_properties(REGION)) == ([], 3)


def test_a_property_that_a_provider_drops_is_found(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, Topic.type, Forgetful())
    assert _create(aws) == "CREATE_COMPLETE"  # only the census notices
    (finding,) = census(REGION)
    assert (finding.logical, finding.type) == ("Topic", "AWS::SNS::Topic")
    assert finding.difference.startswith(".DisplayName: expected 'bad releases'")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("DisplayName", "another"), ".DisplayName: expected 'bad releases', found 'another'"),
        (("KmsMasterKeyId", "alias/x"), None),  # other changes are not in the template
    ],
)
def test_what_was_changed_behind_the_back_of_a_stack_is_found(
    aws: Any, change: tuple[str, str], difference: str | None
) -> None:
    _create(aws)
    (arn,) = [topic["TopicArn"] for topic in boto3.client("sns").list_topics()["Topics"]]
    boto3.client("sns").set_topic_attributes(TopicArn=arn, AttributeName=change[0], AttributeValue=change[1])
    assert [entry.difference for entry in census(REGION)] == ([difference] if difference else [])


def test_a_tag_that_is_missing_is_found(aws: Any) -> None:
    _create(aws)
    (arn,) = [topic["TopicArn"] for topic in boto3.client("sns").list_topics()["Topics"]]
    boto3.client("sns").untag_resource(ResourceArn=arn, TagKeys=["a"])
    assert [entry.difference.split(":")[0] for entry in census(REGION)] == [".Tags"]
