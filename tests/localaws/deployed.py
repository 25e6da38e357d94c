"""Functions that create, change and read back a stack `s` in tests."""

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
    failed = [event for event in events if event["ResourceStatus"].endswith("_FAILED")]
    reasons = [f"{entry['LogicalResourceId']}: {entry['ResourceStatusReason']}" for entry in failed]
    return aws.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"], reasons


def physical(aws: Any) -> dict[str, str]:
    stack_resources = aws.describe_stack_resources(StackName="s")["StackResources"]
    return {entry["LogicalResourceId"]: entry["PhysicalResourceId"] for entry in stack_resources}


def changed(resources: Template, changes: Changes) -> Template:
    """The resources with changed properties; a value of None removes the property."""
    result = copy.deepcopy(resources)
    for name, properties in changes.items():
        logical = {**result[name]["Properties"], **properties}
        result[name]["Properties"] = {key: value for key, value in logical.items() if value is not None}
    return result


def without(resources: Template, *names: str) -> Template:
    return {name: resource for name, resource in resources.items() if name not in names}


def running() -> list[str]:
    response = boto3.client("ec2").describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    return [instance["InstanceId"] for reservation in response["Reservations"] for instance in reservation["Instances"]]
