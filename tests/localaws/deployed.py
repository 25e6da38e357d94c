"""A stack `s`, for tests to deploy, change and ask for what has become of it."""

import copy
import json
from typing import Any

import boto3

from tests.localaws.fleet import Template

Changes = dict[str, dict[str, Any]]  # properties by logical name


def create(aws: Any, resources: Template) -> None:
    body = json.dumps({"Resources": resources})
    aws.create_stack(StackName="s", TemplateBody=body, Capabilities=["CAPABILITY_IAM"])
    assert settled(aws) == ("CREATE_COMPLETE", [])


def update(aws: Any, resources: Template) -> tuple[str, list[str]]:
    body = json.dumps({"Resources": resources})
    aws.update_stack(StackName="s", TemplateBody=body, Capabilities=["CAPABILITY_IAM"])
    return settled(aws)


def settled(aws: Any, name: str = "s") -> tuple[str, list[str]]:
    events = aws.describe_stack_events(StackName=name)["StackEvents"]
    failed = [one for one in events if one["ResourceStatus"].endswith("_FAILED")]
    reasons = [f"{one['LogicalResourceId']}: {one['ResourceStatusReason']}" for one in failed]
    return aws.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"], reasons


def physical(aws: Any) -> dict[str, str]:
    told = aws.describe_stack_resources(StackName="s")["StackResources"]
    return {one["LogicalResourceId"]: one["PhysicalResourceId"] for one in told}


def changed(resources: Template, changes: Changes) -> Template:
    """A property whose new value is None goes away."""
    found = copy.deepcopy(resources)
    for name, properties in changes.items():
        one = {**found[name]["Properties"], **properties}
        found[name]["Properties"] = {key: value for key, value in one.items() if value is not None}
    return found


def without(resources: Template, *names: str) -> Template:
    return {name: one for name, one in resources.items() if name not in names}


def running() -> list[str]:
    told = boto3.client("ec2").describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    return [one["InstanceId"] for each in told["Reservations"] for one in each["Instances"]]
