"""References between stacks: no value goes stale silently, no two stacks block each other for good."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import boto3
import pytest
from aws_cdk import App, Stack, aws_iam
from botocore.exceptions import ClientError

from nxpipe.pipeline.config.cloud import ClosedNetwork
from nxpipe.pipeline.fleet.infrastructure import stale_values
from nxpipe.stacks import app as cdk_app
from nxpipe.stacks import references
from nxpipe.stacks.iam import mount_cache
from nxpipe.stacks.lint.deployment_plan import fixed_properties, plan
from nxpipe.stacks.lint.template import Templates, intrinsic, read
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.storage import CacheStack, StoreStack
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.stacks.local import (
    ACCOUNT,
    HERE,
    REGION,
    deploy,
    deploy_template,
    destroy,
    new_app,
    outputs,
    resources,
    template_of,
)
from tests.stacks.permissions import statements_of
from tests.stacks.whole import CERTIFICATE, STACKS, write_whole

FLAG: Final = "@aws-cdk/core:defaultCrossStackReferences"
SDK: Final = "2.32.0"
ZONES: Final = ("us-east-2a", "us-east-2b")


def foundation(*zones: str) -> tuple[NetworkStack, StoreStack]:
    app = new_app()
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=zones, env=HERE)
    return network, StoreStack(app, "demo-storage", project="demo", env=HERE)


def with_cache(*zones: str) -> tuple[NetworkStack, StoreStack, CacheStack, Stack]:
    """The cache, and a stack whose role mounts it."""
    network, store = foundation(*zones)
    cache = CacheStack(
        network.node.root,
        "demo-cache",
        project="demo",
        network=network.handle,
        store=store.handle,
        versions=(SDK,),
        env=HERE,
    )
    fleet = Stack(cache.node.root, "demo-fleet", env=HERE)
    role = aws_iam.Role(fleet, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    mount_cache(cache.handle, SDK, role)
    return network, store, cache, fleet


def change_set(stack: str, template: str) -> dict[str, Any]:
    cloudformation = boto3.client("cloudformation")
    made = cloudformation.create_change_set(
        StackName=stack, ChangeSetName="next", TemplateBody=template, Capabilities=["CAPABILITY_NAMED_IAM"]
    )
    found: dict[str, Any] = cloudformation.describe_change_set(ChangeSetName=made["Id"])
    cloudformation.delete_change_set(ChangeSetName=made["Id"])
    return found


def changes(stack: str, template: str) -> list[tuple[str, str, str | None]]:
    """Action, resource type, and whether it is replaced."""
    found = (entry["ResourceChange"] for entry in change_set(stack, template)["Changes"])
    return [(change["Action"], change["ResourceType"], change.get("Replacement")) for change in found]


def test_a_cache_that_is_created_again_changes_the_stacks_that_name_it(aws: None) -> None:
    network, store, cache, fleet = with_cache(*ZONES)
    deploy(network, store, cache, fleet)
    text = json.dumps(template_of(fleet))
    assert changes("demo-fleet", text) == []
    deployed = Templates((read("demo-fleet", template_of(fleet), REGION),))
    assert stale_values(deployed, boto3.client) == []

    destroy(cache)
    with pytest.raises(ClientError, match="Unable to fetch parameters"):
        change_set("demo-fleet", text)
    assert {stale.current for stale in stale_values(deployed, boto3.client)} == {None}

    deploy(cache)
    stale = stale_values(deployed, boto3.client)
    assert {value.stack for value in stale} == {"demo-fleet"}
    assert outputs(cache)["FileSystemId"] in " ".join(map(str, stale))
    assert changes("demo-fleet", text) == [("Modify", "AWS::IAM::Policy", "False")]
    deploy(fleet)
    (statement,) = statements_of(resources(fleet, "AWS::IAM::Role")[0])
    assert str(statement["Resource"]).endswith(outputs(cache)["FileSystemId"])
    assert changes("demo-fleet", text) == []
    assert stale_values(deployed, boto3.client) == []


def test_a_network_keeps_what_a_stack_uses_until_that_stack_does_without(aws: None) -> None:
    deploy(*with_cache(*ZONES)[:3])
    network, _, cache, _ = with_cache(ZONES[0])
    with pytest.raises(AssertionError, match="is in use by demo-cache"):
        deploy(network)
    deploy(cache)  # as `cdk deploy --exclusively` does
    deploy(network)
    assert len(resources(network, "AWS::EC2::Subnet")) == 1


def test_a_cdk_json_of_an_older_version_gets_strong_references_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDK_CONTEXT_JSON", json.dumps({FLAG: "weak"}))
    seen: list[App] = []

    def main(app: App) -> int:
        seen.append(app)
        return 0

    monkeypatch.setattr(cdk_app, "main", main)
    assert cdk_app.run() == 0
    assert seen[0].node.try_get_context(FLAG) == "strong"


def synthesised(folder: Path, **context: str) -> dict[str, dict[str, Any]]:
    """The templates of the project with every feature, in the order of deployment."""
    out = folder / "out"
    app = new_app(context, outdir=str(out))
    config = cdk_app.deployable(folder / "nxpipe.toml")
    cdk_app.add_stacks(app, config, folder)
    ordered = [artifact.stack_name for artifact in app.synth().stacks]
    return {stack: json.loads((out / f"{stack}.template.json").read_text()) for stack in ordered}


def as_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The templates of a version of nxpipe with weak references."""
    with monkeypatch.context() as patch:
        patch.setattr(references, "Reference", SimpleNamespace(is_reference=lambda _: False))
        patch.setattr(Stack, "export_value", lambda _, value: value)
        return synthesised(folder, **{FLAG: "weak"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    write_whole(folder)
    return synthesised(folder)


def referenced(value: Any) -> Iterator[tuple[str, Any]]:
    """References to other stacks and to parameters: the function, and what it names."""
    name, inner = intrinsic(value)
    if name in ("Fn::GetStackOutput", "Fn::ImportValue", "Ref"):
        yield name, inner
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from referenced(item)


@pytest.mark.sample(4)
def test_what_cannot_change_in_place_names_only_what_stays(whole: dict[str, dict[str, Any]]) -> None:
    exported = {
        output["Export"]["Name"]
        for stack in foundation(*ZONES)  # alone: no other stack makes them export
        for output in template_of(stack)["Outputs"].values()
        if "Export" in output
    }
    stored = {
        resource["Properties"]["Name"]
        for template in whole.values()
        for resource in template["Resources"].values()
        if resource["Type"] == "AWS::SSM::Parameter"
    }
    imported, taken = set(), set()
    for stack, template in whole.items():
        by_value = read(stack, template).stored_parameters
        for id_, resource in template["Resources"].items():
            for key, value in resource.get("Properties", {}).items():
                for name, inner in referenced(value):
                    assert name != "Fn::GetStackOutput", (stack, id_, key)
                    if name == "Fn::ImportValue":
                        imported.add(inner)
                    elif inner in by_value:
                        taken.add(by_value[inner])
                        assert key not in fixed_properties()[resource["Type"]], (stack, id_, key)
    assert imported <= exported
    assert taken == stored
    assert len(imported) == len(exported)


@pytest.mark.sample(4)
def test_the_plan_of_the_step_from_weak_references_has_only_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, dict[str, Any]]
) -> None:
    write_whole(tmp_path)
    before = as_before(tmp_path, monkeypatch)
    assert "Fn::GetStackOutput" in json.dumps(before)
    old, new = (Templates(tuple(read(stack, text) for stack, text in all_.items())) for all_ in (before, whole))
    found = plan(old, new)
    assert {(change.kind, change.resource.type) for change in found.changes} == {("added", "AWS::SSM::Parameter")}
    assert (found.restarts, found.forgotten) == ((), ())


def upload_assets(folder: Path) -> None:
    s3, bucket = boto3.client("s3"), f"cdk-hnb659fds-assets-{ACCOUNT}-{REGION}"
    if bucket not in {entry["Name"] for entry in s3.list_buckets()["Buckets"]}:
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    for asset in (folder / "out").glob("asset.*.zip"):
        s3.upload_file(str(asset), bucket, asset.name.removeprefix("asset."))


def physical_ids(stacks: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    cloudformation = boto3.client("cloudformation")
    return {
        (stack, entry["LogicalResourceId"]): entry["PhysicalResourceId"]
        for stack in stacks
        for entry in cloudformation.describe_stack_resources(StackName=stack)["StackResources"]
    }


@pytest.mark.slow
def test_one_deployment_takes_a_project_from_weak_references_to_these_and_the_next_has_nothing_to_do(
    aws: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = boto3.client("acm").request_certificate(DomainName="search.example.com")["CertificateArn"]
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        path = write_whole(folder)
        path.write_text(path.read_text().replace(CERTIFICATE, certificate))
    weak = {stack: json.dumps(text) for stack, text in as_before(before, monkeypatch).items()}
    ours = {stack: json.dumps(text) for stack, text in synthesised(after).items()}
    assert set(ours) == STACKS
    with hosts_answer("CONTINUE"):
        upload_assets(before)
        for stack, text in weak.items():
            deploy_template(stack, text)
        there = physical_ids(weak)
        for stack, text in ours.items():
            assert {change[:2] for change in changes(stack, text)} <= {("Add", "AWS::SSM::Parameter")}
            deploy_template(stack, text)
        assert there.items() <= physical_ids(ours).items()
        for stack, text in ours.items():
            assert change_set(stack, text)["ExecutionStatus"] == "UNAVAILABLE", stack

    # The network cannot go before its users; from the last stack to the first, all go.
    cloudformation = boto3.client("cloudformation")
    with pytest.raises(ClientError, match="is in use by demo-"):
        cloudformation.delete_stack(StackName="demo-network")
    for stack in reversed(ours):
        cloudformation.delete_stack(StackName=stack)
        _wait_for_end(stack)
    assert cloudformation.list_stacks(StackStatusFilter=["CREATE_COMPLETE", "UPDATE_COMPLETE"])["StackSummaries"] == []
    left = boto3.client("ssm").describe_parameters()["Parameters"]
    assert [entry["Name"] for entry in left if entry["Name"].startswith("/nxpipe/")] == []


def _wait_for_end(stack: str) -> None:
    boto3.client("cloudformation").get_waiter("stack_delete_complete").wait(
        StackName=stack, WaiterConfig={"Delay": 1, "MaxAttempts": 60}
    )
