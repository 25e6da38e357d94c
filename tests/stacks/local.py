"""Deployment of stacks to the local AWS in this process, with the templates that the CDK would send."""

import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import boto3
from aws_cdk import App, Environment, Stack
from aws_cdk.assertions import Template
from botocore.exceptions import ClientError

from nxpipe.stacks.app import CONTEXT

ACCOUNT: Final = "123456789012"
REGION: Final = "us-east-2"
_LONGEST: Final = 300  # seconds
HERE: Final = Environment(account=ACCOUNT, region=REGION)
_NOTHING: Final[Mapping[str, str]] = {}
_CONTEXT: Final = json.loads((Path(__file__).parents[2] / "cdk.json").read_text())["context"] | CONTEXT


def new_app(context: Mapping[str, str] = _NOTHING, **settings: Any) -> App:
    """An app under the feature flags that the real one runs with; nobody reads its tree beside the templates. CDK's own
    validation takes longer than all else, and has its say of the whole project in test_cdk_app and at each deployment.
    """
    context = {**_CONTEXT, **context}
    return App(context=context, tree_metadata=False, builtin_cloud_formation_validation=False, **settings)


@cache
def template_of(stack: Stack) -> dict[str, Any]:
    """The template, read only: a stack is synthesised once."""
    found: dict[str, Any] = Template.from_stack(stack).to_json()
    return found


def deploy(*stacks: Stack) -> None:
    """Create or update the stacks in this order. A stack without a change is left as it is, as by the CDK."""
    for stack in stacks:
        deploy_template(stack.stack_name, json.dumps(template_of(stack)))


def deploy_template(stack: str, text: str) -> None:
    cloudformation = boto3.client("cloudformation")
    known = stack in {entry["StackName"] for entry in cloudformation.describe_stacks()["Stacks"]}
    call = cloudformation.update_stack if known else cloudformation.create_stack
    try:
        call(StackName=stack, TemplateBody=text, Capabilities=["CAPABILITY_NAMED_IAM"])
    except ClientError as refused:
        if "No updates are to be performed" in str(refused):
            return
        raise
    _insist(stack, "UPDATE" if known else "CREATE")


def destroy(*stacks: Stack) -> None:
    cloudformation = boto3.client("cloudformation")
    for stack in stacks:
        id_ = cloudformation.describe_stacks(StackName=stack.stack_name)["Stacks"][0]["StackId"]
        cloudformation.delete_stack(StackName=stack.stack_name)
        _insist(id_, "DELETE")


def _insist(name: str, what: str) -> None:
    """Wait until the operation succeeds; raise if it fails."""
    cloudformation = boto3.client("cloudformation")
    deadline = time.monotonic() + _LONGEST
    while (found := cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]).endswith("IN_PROGRESS"):
        assert time.monotonic() < deadline, f"{name} is still in {found}"
        time.sleep(0.02)
    events = cloudformation.describe_stack_events(StackName=name)["StackEvents"]
    reasons = [event["ResourceStatusReason"] for event in events if event.get("ResourceStatusReason")]
    assert found == f"{what}_COMPLETE", (found, reasons)


def outputs(stack: Stack) -> dict[str, str]:
    result = boto3.client("cloudformation").describe_stacks(StackName=stack.stack_name)["Stacks"][0]
    return {output["OutputKey"]: output["OutputValue"] for output in result.get("Outputs", [])}


def resources(stack: Stack, type_: str) -> list[str]:
    """The physical ids of all resources of one type."""
    stack_resources = boto3.client("cloudformation").describe_stack_resources(StackName=stack.stack_name)[
        "StackResources"
    ]
    return [
        stack_resource["PhysicalResourceId"]
        for stack_resource in stack_resources
        if stack_resource["ResourceType"] == type_
    ]
