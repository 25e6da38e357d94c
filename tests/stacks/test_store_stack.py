"""The store stack: the bucket of a team's artifacts, and its related resources."""

from functools import partial
from typing import Any

import boto3
import pytest
from aws_cdk import RemovalPolicy, Stack, aws_iam
from aws_cdk.assertions import Match, Template

from nxpipe.stacks.iam import read_artifacts
from nxpipe.stacks.storage import StoreStack
from tests.stacks.linting import complaints
from tests.stacks.local import HERE, REGION, deploy, destroy, new_app, outputs, resources
from tests.stacks.permissions import allowed, statements_of

ARTIFACTS, KEY = "Artifacts82DD59A1", "Key961B73FD"
RETAINED = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.from_stack(StoreStack(new_app(), "demo-storage", project="demo"))


def deny_statement(condition: dict[str, Any]) -> Any:
    return Match.object_like(
        {
            "Effect": "Deny",
            "Action": "s3:*",
            "Principal": {"AWS": "*"},
            "Condition": condition,
            "Resource": [
                {"Fn::GetAtt": [Match.any_value(), "Arn"]},
                {"Fn::Join": ["", [{"Fn::GetAtt": [Match.any_value(), "Arn"]}, "/*"]]},
            ],
        }
    )


def properties(template: Template, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = template.to_json()["Resources"][id_]["Properties"]
    return found


def test_artifacts_are_encrypted_with_the_customers_own_rotating_key(template: Template) -> None:
    template.has_resource_properties("AWS::KMS::Key", {"EnableKeyRotation": True})
    (key,) = template.find_resources("AWS::KMS::Key")
    by_default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": {"Fn::GetAtt": [key, "Arn"]}}
    rule = {"BucketKeyEnabled": True, "ServerSideEncryptionByDefault": by_default}
    template.has_resource_properties(
        "AWS::S3::Bucket", {"BucketEncryption": {"ServerSideEncryptionConfiguration": [rule]}}
    )


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param({"Bool": {"aws:SecureTransport": "false"}}, id="plain HTTP"),
        pytest.param({"NumericLessThan": {"s3:TlsVersion": 1.2}}, id="TLS before 1.2"),
    ],
)
def test_nobody_reaches_a_bucket_without_modern_tls(template: Template, condition: dict[str, Any]) -> None:
    template.all_resources_properties(
        "AWS::S3::BucketPolicy",
        {"PolicyDocument": {"Statement": Match.array_with([deny_statement(condition)])}},
    )


def test_nothing_in_a_bucket_can_become_public(template: Template) -> None:
    every_way = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    template.all_resources_properties(
        "AWS::S3::Bucket",
        {
            "PublicAccessBlockConfiguration": dict.fromkeys(every_way, True),
            "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        },
    )


def test_a_rollback_always_finds_its_artifact_because_current_versions_never_expire(template: Template) -> None:
    bucket = properties(template, ARTIFACTS)
    rules = bucket["LifecycleConfiguration"]["Rules"]
    of_current_versions = {"ExpirationInDays", "ExpirationDate", "Transition", "Transitions"}
    assert not [rule for rule in rules if of_current_versions & set(rule)]
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}


def test_a_deletion_can_be_undone_for_90_days_and_unfinished_uploads_go_after_a_week(template: Template) -> None:
    undo = Match.object_like({"Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 90}})
    unfinished = Match.object_like({"Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}})
    for rule in (undo, unfinished):
        template.has_resource_properties(
            "AWS::S3::Bucket", {"LifecycleConfiguration": {"Rules": Match.array_with([rule])}}
        )


def test_destroying_the_stack_keeps_what_it_holds_and_the_key_that_reads_it(template: Template) -> None:
    for kind in ("AWS::ECR::Repository", "AWS::KMS::Key", "AWS::S3::Bucket"):
        template.all_resources(kind, RETAINED)


def test_who_read_what_is_written_down_beside_the_artifacts_and_kept_for_a_year(template: Template) -> None:
    (logs,) = set(template.find_resources("AWS::S3::Bucket")) - {ARTIFACTS}
    written = {"DestinationBucketName": {"Ref": logs}, "LogFilePrefix": "artifacts/"}
    assert properties(template, ARTIFACTS)["LoggingConfiguration"] == written
    (rule,) = properties(template, logs)["LifecycleConfiguration"]["Rules"]
    assert rule["ExpirationInDays"] >= 365
    delivering = {"Action": "s3:PutObject", "Principal": {"Service": "logging.s3.amazonaws.com"}, "Effect": "Allow"}
    template.has_resource_properties(
        "AWS::S3::BucketPolicy",
        {
            "Bucket": {"Ref": logs},
            "PolicyDocument": {"Statement": Match.array_with([Match.object_like(delivering)])},
        },
    )


def test_an_image_is_what_it_was_when_it_was_pushed_and_is_scanned_then(template: Template) -> None:
    template.has_resource_properties(
        "AWS::ECR::Repository",
        {
            "ImageTagMutability": "IMMUTABLE",
            "ImageScanningConfiguration": {"ScanOnPush": True},
            "EncryptionConfiguration": {"EncryptionType": "KMS", "KmsKey": {"Fn::GetAtt": [KEY, "Arn"]}},
            "LifecyclePolicy": Match.absent(),
        },
    )


def test_a_throwaway_stack_may_ask_to_be_destroyed_whole() -> None:
    stack = StoreStack(new_app(), "trial-storage", project="trial", removal_policy=RemovalPolicy.DESTROY)
    trial = Template.from_stack(stack)
    for kind in ("AWS::ECR::Repository", "AWS::KMS::Key", "AWS::S3::Bucket"):
        trial.all_resources(kind, {"DeletionPolicy": "Delete"})


def test_cloudformation_chooses_every_physical_name(template: Template) -> None:
    for resource in template.to_json()["Resources"].values():
        names = {"BucketName", "AliasName", "KeyName", "RepositoryName"} & set(resource["Properties"])
        assert not names, resource


def test_the_stack_needs_no_custom_resource_and_no_lambda(template: Template) -> None:
    kinds = {resource["Type"] for resource in template.to_json()["Resources"].values()}
    assert kinds == {"AWS::ECR::Repository", "AWS::KMS::Key", "AWS::S3::Bucket", "AWS::S3::BucketPolicy"}


def test_the_outputs_name_the_bucket_and_the_key(template: Template) -> None:
    template.has_output("BucketName", {"Value": {"Ref": ARTIFACTS}})
    template.has_output("KeyArn", {"Value": {"Fn::GetAtt": [KEY, "Arn"]}})


def test_logical_ids_never_move_because_a_moved_id_is_a_new_empty_bucket(template: Template) -> None:
    assert ARTIFACTS in template.find_resources("AWS::S3::Bucket")
    assert set(template.find_resources("AWS::KMS::Key")) == {KEY}


def test_resources_carry_the_projects_name(template: Template) -> None:
    tag = {"Key": "nxpipe:project", "Value": "demo"}
    for kind in ("AWS::S3::Bucket", "AWS::KMS::Key"):
        template.has_resource_properties(kind, {"Tags": Match.array_with([tag])})


def test_the_store_is_made_changed_and_destroyed_and_a_fleet_may_read_and_no_more(aws: None) -> None:
    app = new_app()
    store = StoreStack(app, "demo-storage", project="demo", removal_policy=RemovalPolicy.DESTROY, env=HERE)
    fleet = Stack(app, "demo-fleet", env=HERE)
    role = aws_iam.Role(fleet, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    read_artifacts(store.handle, role, "models/")
    deploy(store, fleet)
    result = outputs(store)
    bucket, key = f"arn:aws:s3:::{result['BucketName']}", result["KeyArn"]
    may = partial(allowed, statements_of(resources(fleet, "AWS::IAM::Role")[0]))
    assert may("s3:GetObject", f"{bucket}/models/ac/x")
    assert may("s3:ListBucket", bucket)
    assert not may("s3:GetObject", f"{bucket}/others/ac/x")
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:GetObjectVersion"):
        assert not may(action, f"{bucket}/models/ac/x")
    assert may("kms:Decrypt", key, {"kms:ViaService": f"s3.{REGION}.amazonaws.com"})
    assert not may("kms:Decrypt", key)
    other = new_app()
    changed = StoreStack(other, "demo-storage", project="other", removal_policy=RemovalPolicy.DESTROY, env=HERE)
    kept = StoreStack(new_app(), "demo-storage", project="other", removal_policy=RemovalPolicy.RETAIN, env=HERE)
    deploy(changed)
    assert outputs(changed)["BucketName"] == result["BucketName"]
    deploy(kept)
    destroy(fleet, kept)
    assert result["BucketName"] in {entry["Name"] for entry in boto3.client("s3").list_buckets()["Buckets"]}


REGIONS = ("us-east-1", "eu-central-1", "ap-northeast-1")


def test_cfn_lint_finds_nothing_to_say_in_three_regions(template: Template) -> None:
    assert complaints(template.to_json(), *REGIONS) == []


def test_cfn_lint_would_find_a_property_that_s3_does_not_have(template: Template) -> None:
    faulty = template.to_json()
    faulty["Resources"][ARTIFACTS]["Properties"]["Versionning"] = True
    assert any("Versionning" in said for said in complaints(faulty, *REGIONS))
