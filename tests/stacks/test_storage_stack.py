"""What the storage stack promises about the one bucket that holds a team's artifacts."""

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App, Environment, RemovalPolicy, Stack, aws_iam
from aws_cdk.assertions import Match, Template

from stacks.storage import StorageStack

CDK_JSON = Path(__file__).parents[2] / "cdk.json"
RETAINED = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}


def new_app() -> App:
    """An app under the feature flags that the real one runs with."""
    return App(context=json.loads(CDK_JSON.read_text())["context"])


@pytest.fixture(scope="module")
def template() -> Template:
    return Template.from_stack(StorageStack(new_app(), "demo-storage", project="demo"))


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


def test_there_is_one_bucket_and_one_key(template: Template) -> None:
    template.resource_count_is("AWS::S3::Bucket", 1)
    template.resource_count_is("AWS::KMS::Key", 1)


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
def test_nobody_reaches_the_bucket_without_modern_tls(template: Template, condition: dict[str, Any]) -> None:
    template.has_resource_properties(
        "AWS::S3::BucketPolicy",
        {"PolicyDocument": {"Statement": Match.array_with([deny_statement(condition)])}},
    )


def test_nothing_in_the_bucket_can_become_public(template: Template) -> None:
    every_way = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    template.has_resource_properties(
        "AWS::S3::Bucket",
        {
            "PublicAccessBlockConfiguration": dict.fromkeys(every_way, True),
            "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        },
    )


def test_a_rollback_always_finds_its_artifact_because_current_versions_never_expire(template: Template) -> None:
    (bucket,) = template.find_resources("AWS::S3::Bucket").values()
    rules = bucket["Properties"]["LifecycleConfiguration"]["Rules"]
    of_current_versions = {"ExpirationInDays", "ExpirationDate", "Transition", "Transitions"}
    assert not [rule for rule in rules if of_current_versions & set(rule)]
    assert bucket["Properties"]["VersioningConfiguration"] == {"Status": "Enabled"}


def test_a_deletion_can_be_undone_for_90_days_and_unfinished_uploads_go_after_a_week(template: Template) -> None:
    undo = Match.object_like({"Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 90}})
    unfinished = Match.object_like({"Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}})
    for rule in (undo, unfinished):
        template.has_resource_properties(
            "AWS::S3::Bucket", {"LifecycleConfiguration": {"Rules": Match.array_with([rule])}}
        )


def test_destroying_the_stack_keeps_the_artifacts_and_the_key_that_reads_them(template: Template) -> None:
    template.has_resource("AWS::S3::Bucket", RETAINED)
    template.has_resource("AWS::KMS::Key", RETAINED)


def test_a_throwaway_stack_may_ask_to_be_destroyed_whole() -> None:
    stack = StorageStack(new_app(), "trial-storage", project="trial", removal_policy=RemovalPolicy.DESTROY)
    trial = Template.from_stack(stack)
    trial.has_resource("AWS::S3::Bucket", {"DeletionPolicy": "Delete"})
    trial.has_resource("AWS::KMS::Key", {"DeletionPolicy": "Delete"})


def test_cloudformation_chooses_every_physical_name(template: Template) -> None:
    for resource in template.to_json()["Resources"].values():
        names = {"BucketName", "AliasName", "KeyName"} & set(resource["Properties"])
        assert not names, resource


def test_the_stack_needs_no_custom_resource_and_no_lambda(template: Template) -> None:
    kinds = {resource["Type"] for resource in template.to_json()["Resources"].values()}
    assert kinds == {"AWS::KMS::Key", "AWS::S3::Bucket", "AWS::S3::BucketPolicy"}


def test_the_outputs_name_the_bucket_and_the_key(template: Template) -> None:
    (bucket,) = template.find_resources("AWS::S3::Bucket")
    (key,) = template.find_resources("AWS::KMS::Key")
    template.has_output("BucketName", {"Value": {"Ref": bucket}})
    template.has_output("KeyArn", {"Value": {"Fn::GetAtt": [key, "Arn"]}})


def test_logical_ids_never_move_because_a_moved_id_is_a_new_empty_bucket(template: Template) -> None:
    assert set(template.find_resources("AWS::S3::Bucket")) == {"Artifacts82DD59A1"}
    assert set(template.find_resources("AWS::KMS::Key")) == {"Key961B73FD"}


def test_resources_carry_the_projects_name(template: Template) -> None:
    tag = {"Key": "nxpipe:project", "Value": "demo"}
    for kind in ("AWS::S3::Bucket", "AWS::KMS::Key"):
        template.has_resource_properties(kind, {"Tags": Match.array_with([tag])})


def test_another_stack_can_grant_itself_reading_through_the_handles() -> None:
    app = new_app()
    env = Environment(account="123456789012", region="us-east-1")
    storage = StorageStack(app, "demo-storage", project="demo", env=env)
    fleet = Stack(app, "demo-fleet", env=env)
    role = aws_iam.Role(fleet, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    storage.bucket.grant_read(role)
    decrypting = Match.object_like({"Effect": "Allow", "Action": Match.array_with(["kms:Decrypt"])})
    reading = Match.object_like({"Effect": "Allow", "Action": Match.array_with(["s3:GetObject*"])})
    Template.from_stack(fleet).has_resource_properties(
        "AWS::IAM::Policy", {"PolicyDocument": {"Statement": Match.array_with([reading])}}
    )
    Template.from_stack(fleet).has_resource_properties(
        "AWS::IAM::Policy", {"PolicyDocument": {"Statement": Match.array_with([decrypting])}}
    )


def cfn_lint(template: dict[str, Any], folder: Path) -> tuple[int, str]:
    written = folder / "storage.template.json"
    written.write_text(json.dumps(template))
    program = Path(sysconfig.get_path("scripts"), "cfn-lint")
    command = [str(program), "--regions", "us-east-1", "eu-central-1", "ap-northeast-1", "--", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_cfn_lint_finds_nothing_to_say_in_three_regions(template: Template, tmp_path: Path) -> None:
    assert cfn_lint(template.to_json(), tmp_path) == (0, "")


def test_cfn_lint_would_find_a_property_that_s3_does_not_have(template: Template, tmp_path: Path) -> None:
    faulty = template.to_json()
    (bucket,) = template.find_resources("AWS::S3::Bucket")
    faulty["Resources"][bucket]["Properties"]["Versionning"] = True
    code, findings = cfn_lint(faulty, tmp_path)
    assert code != 0
    assert "Versionning" in findings
