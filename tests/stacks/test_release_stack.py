"""The roles that GitHub's OIDC tokens can assume, and their permissions."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from aws_cdk import App, RemovalPolicy
from aws_cdk.assertions import Annotations, Match

from nxpipe.artifact_store import Store, layout
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.channel.change import Author, Requirements, promote
from nxpipe.artifact_store.trust.kms import ALGORITHM
from nxpipe.pipeline.config import Config, Project, Signing
from nxpipe.pipeline.config.cloud import Release
from nxpipe.pipeline.config.sections import PromotingKey
from nxpipe.pipeline.fleet.github import setup_script
from nxpipe.stacks.iam import CREATED_ONCE, REPLACED, ReleaseStack
from nxpipe.stacks.storage import StoreStack
from tests.artifact_store.samples import publish_verified, put, watched
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy, destroy, new_app, outputs, template_of
from tests.stacks.permissions import Context, allowed, statements_of, trust_of

ISSUER = "token.actions.githubusercontent.com"
OIDC = f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}"
ASKED_FOR = Release(repository="example/models", environment="release")
OF_A_RELEASE = {"aud": "sts.amazonaws.com", "sub": "repo:example/models:environment:release"}


@dataclass(frozen=True)
class Made:
    store: StoreStack
    release: ReleaseStack


def make(
    release: Release = ASKED_FOR, prefix: str = "models/", app: App | None = None, signing: Signing | None = None
) -> Made:
    app = app or new_app()
    store = StoreStack(app, "demo-store", project="demo", env=HERE, removal_policy=RemovalPolicy.DESTROY)
    stack = ReleaseStack(
        app,
        "demo-release",
        project="demo",
        release=release,
        store=store.handle,
        prefix=prefix,
        signing=signing,
        env=HERE,
    )
    return Made(store, stack)


def of(subject: str, repository: str = "example/models") -> Context:
    return {f"{ISSUER}:aud": "sts.amazonaws.com", f"{ISSUER}:sub": f"repo:{repository}:{subject}"}


def role_of(made: Made, word: str = "") -> str:
    """The role of the publishing jobs, of pull requests ("Read"), or of promoting jobs ("PromoteStaging")."""
    return outputs(made.release)[f"{word}RoleArn"].rpartition("/")[2]


def token(**claims: str) -> Context:
    return {f"{ISSUER}:{name}": value for name, value in (OF_A_RELEASE | claims).items()}


def opened_by(made: Made, claims: Context, word: str = "") -> bool:
    return allowed(trust_of(role_of(made, word)), "sts:AssumeRoleWithWebIdentity", "", claims)


def refused(made: Made, word: str, writes: list[tuple[str, str]]) -> list[str]:
    """The paths that the role may not write; S3 knows which writes create objects."""
    may, bucket = statements_of(role_of(made, word)), f"arn:aws:s3:::{outputs(made.store)['BucketName']}"
    announced = [(act, path) for act, path in writes if act != "make durable"]
    assert announced
    return [
        path
        for act, path in announced
        if not allowed(
            may,
            "s3:DeleteObject" if act == "remove" else "s3:PutObject",
            f"{bucket}/models/{path}",
            _said(act, f"{bucket.rpartition(':')[2]}/models/{path}"),
        )
    ]


def _said(act: str, whole: str) -> Context:
    """The condition keys of a request: a creation has its header, a copy its source."""
    if act.startswith("create"):
        return {"s3:if-none-match": "*"}
    return {"s3:x-amz-copy-source": whole} if act == "touch" else {}


@pytest.fixture
def deployed(aws: None) -> Made:
    made = make()
    deploy(made.store, made.release)
    return made


def test_only_the_repositorys_jobs_in_the_environment_are_let_in(deployed: Made) -> None:
    assert opened_by(deployed, token())
    (statement,) = trust_of(role_of(deployed))
    assert statement["Principal"] == {"Federated": OIDC}
    for wrong in (
        token(sub="repo:somebody/models:environment:release"),
        token(sub="repo:example/models-fork:environment:release"),
        token(sub="repo:example/models:ref:refs/heads/main"),
        token(sub="repo:example/models:pull_request"),
        token(sub="repo:example/models:environment:staging"),
        token(sub="repo:example/models:environment:release-candidate"),
        token(sub="repo:example/models:environment:Release"),
        token(aud="https://github.com/example"),
        {f"{ISSUER}:sub": OF_A_RELEASE["sub"]},
        {f"{ISSUER}:aud": OF_A_RELEASE["aud"]},
        {},
    ):
        assert not opened_by(deployed, wrong), wrong
    assert not allowed(trust_of(role_of(deployed)), "sts:AssumeRole", "", token())


def test_a_release_adds_and_reads_but_never_deletes_nor_moves_a_channel(deployed: Made) -> None:
    may = statements_of(role_of(deployed))
    bucket = f"arn:aws:s3:::{outputs(deployed.store)['BucketName']}"
    anew: Context = {"s3:if-none-match": "*"}
    for folder in (*CREATED_ONCE, *REPLACED):
        assert allowed(may, "s3:PutObject", f"{bucket}/models/{folder}x", anew), folder
        assert allowed(may, "s3:GetObject", f"{bucket}/models/{folder}x"), folder
        assert allowed(may, "s3:PutObject", f"{bucket}/models/{folder}x") == (folder in REPLACED), folder
        assert not allowed(may, "s3:PutObject", f"{bucket}/{folder}x", anew), folder
    for folder in (layout.CHANNELS, layout.PINS, layout.RETIRED):
        assert not allowed(may, "s3:PutObject", f"{bucket}/models/{folder}x", anew), folder
    for action in ("s3:DeleteObject", "s3:DeleteObjectVersion", "s3:PutObjectAcl", "s3:PutBucketPolicy"):
        assert not allowed(may, action, f"{bucket}/models/cas/sha256/x"), action
        assert not allowed(may, action, bucket), action
    assert allowed(may, "s3:ListBucket", bucket)
    assert not allowed(may, "s3:GetObject", "arn:aws:s3:::elsewhere/models/ac/x")


def published_and_promoted(folder: Path, days: int = 0) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The writes of a publication, and of a promotion to production so many days later."""
    writes: list[tuple[str, str]] = []
    store = Store(watched(LocalFolder(folder), lambda act, path: writes.append((act, path))))
    manifest = put(store)
    published = publish_verified(store, manifest)
    made = list(writes)
    writes.clear()
    for path in (folder / "cas").rglob("*") if days else ():
        os.utime(path, (time.time() - days * 86_400,) * 2)
    promote(store, "production", [published], Author("ann", "because"), Requirements())
    return made, writes


def test_all_that_a_publication_writes_is_allowed_and_nothing_of_a_promotion(deployed: Made, tmp_path: Path) -> None:
    publication, promotion = published_and_promoted(tmp_path)
    assert refused(deployed, "", publication) == []
    assert {path.split("/")[0] for path in refused(deployed, "", promotion)} == {"channels", "pins"}


def test_a_channel_is_moved_from_its_own_environment_and_from_no_other(deployed: Made, tmp_path: Path) -> None:
    subjects = {
        "": "environment:release",
        "PromoteStaging": "environment:staging",
        "PromoteProduction": "environment:production",
        "Read": "pull_request",
    }
    for word in subjects:
        opens = [value for value, said in subjects.items() if opened_by(deployed, of(said), word)]
        assert opens == [word]
    publication, promotion = published_and_promoted(tmp_path)
    assert refused(deployed, "PromoteProduction", promotion) == []
    assert {path.split("/")[1] for path in refused(deployed, "PromoteStaging", promotion)} == {"production"}
    for word in ("PromoteProduction", "PromoteStaging"):
        assert len(refused(deployed, word, publication)) == len(
            [act for act, _ in publication if act != "make durable"]
        )


def test_who_promotes_removes_his_own_pins_and_replaces_no_generation(deployed: Made) -> None:
    may, bucket = (
        statements_of(role_of(deployed, "PromoteProduction")),
        f"arn:aws:s3:::{outputs(deployed.store)['BucketName']}",
    )
    assert not allowed(may, "s3:DeleteObject", f"{bucket}/models/pins/for-ever")
    for folder in ("channels/production/", "cas/", "sig/", "ac/"):
        assert not allowed(may, "s3:DeleteObject", f"{bucket}/models/{folder}x"), folder
    assert not allowed(may, "s3:PutObject", f"{bucket}/models/channels/production/log/0000000001")


def test_a_pull_request_reads_the_store_and_changes_nothing(deployed: Made, tmp_path: Path) -> None:
    may, stores = statements_of(role_of(deployed, "Read")), outputs(deployed.store)
    bucket, through_s3 = f"arn:aws:s3:::{stores['BucketName']}", {"kms:ViaService": f"s3.{REGION}.amazonaws.com"}
    assert allowed(may, "s3:ListBucket", bucket)
    assert allowed(may, "kms:Decrypt", stores["KeyArn"], through_s3)
    assert not allowed(may, "kms:GenerateDataKey", stores["KeyArn"], through_s3)
    assert not allowed(may, "s3:GetObject", f"{bucket}/elsewhere/x")
    for folder in (*CREATED_ONCE, *REPLACED, layout.CHANNELS, layout.PINS):
        assert allowed(may, "s3:GetObject", f"{bucket}/models/{folder}x"), folder
    for writes in published_and_promoted(tmp_path):
        assert len(refused(deployed, "Read", writes)) == len([act for act, _ in writes if act != "make durable"])
    for claims in (of("pull_request"), of("pull_request", repository="example/models-fork")):
        assert opened_by(deployed, claims, "Read") == (claims == of("pull_request"))


def test_the_key_serves_a_release_through_s3_alone(deployed: Made) -> None:
    may, key = statements_of(role_of(deployed)), outputs(deployed.store)["KeyArn"]
    through_s3 = {"kms:ViaService": f"s3.{REGION}.amazonaws.com"}
    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert allowed(may, action, key, through_s3)
        assert not allowed(may, action, key)
    assert not allowed(may, "kms:ScheduleKeyDeletion", key, through_s3)


def test_a_release_signs_with_the_key_of_the_file_alone_as_signatures_are_made(aws: None) -> None:
    key, other = (f"arn:aws:kms:{REGION}:{ACCOUNT}:key/{name}" for name in ("signs", "other"))
    made = make(signing=Signing(key=f"kms:{key}"))
    deploy(made.store, made.release)
    may, with_ours = statements_of(role_of(made)), {"kms:SigningAlgorithm": ALGORITHM}
    assert allowed(may, "kms:Sign", key, with_ours)
    assert allowed(may, "kms:GetPublicKey", key)
    assert not allowed(may, "kms:Sign", key, {"kms:SigningAlgorithm": "ECDSA_SHA_512"})
    for action in ("kms:Sign", "kms:GetPublicKey"):
        assert not allowed(may, action, other, with_ours)
        assert not allowed(may, action, outputs(made.store)["KeyArn"], with_ours)
    for action in ("kms:CreateGrant", "kms:PutKeyPolicy", "kms:ScheduleKeyDeletion"):
        assert not allowed(may, action, key, with_ours)


def test_each_duty_signs_with_its_own_key_and_with_no_other(aws: None) -> None:
    build, staging, production = (f"arn:aws:kms:{REGION}:{ACCOUNT}:key/{name}" for name in ("b", "s", "p"))
    promoting = tuple(
        PromotingKey(channel=channel, key=f"kms:{key}")
        for channel, key in (("staging", staging), ("production", production))
    )
    made = make(signing=Signing(key=f"kms:{build}", promoting=promoting))
    deploy(made.store, made.release)
    ours: Context = {"kms:SigningAlgorithm": ALGORITHM}
    keys = (build, staging, production)
    for word, own in (("", build), ("PromoteStaging", staging), ("PromoteProduction", production), ("Read", None)):
        may = statements_of(role_of(made, word))
        assert [key for key in keys if allowed(may, "kms:Sign", key, ours)] == ([own] if own else []), word
        # That the build has signed is seen by its public half.
        seen = [key for key in keys if allowed(may, "kms:GetPublicKey", key)]
        assert seen == ([entry for entry in keys if entry in (own, build)] if own else []), word


def test_a_publisher_damages_no_blob_and_no_signature_but_keeps_blobs_young(deployed: Made) -> None:
    name = outputs(deployed.store)["BucketName"]
    bucket = f"arn:aws:s3:::{name}"
    for word in ("", "PromoteStaging", "PromoteProduction"):
        may = statements_of(role_of(deployed, word))
        for path in ("cas/sha256/aa/x", "sig/x/y"):
            assert not allowed(may, "s3:PutObject", f"{bucket}/models/{path}"), path
            put_together = {"s3:ObjectCreationOperation": "true"}
            assert not allowed(may, "s3:PutObject", f"{bucket}/models/{path}", put_together), path
        blob = f"{bucket}/models/cas/sha256/aa/x"
        for source, may_be in (("models/cas/sha256/aa/x", True), ("models/tmp/x", False), ("cas/sha256/aa/x", False)):
            copied = {"s3:x-amz-copy-source": f"{name}/{source}", "s3:ObjectCreationOperation": "true"}
            assert allowed(may, "s3:PutObject", blob, copied) == may_be, source
        elsewhere = {"s3:x-amz-copy-source": "another-bucket/models/cas/sha256/aa/x"}
        assert not allowed(may, "s3:PutObject", blob, elsewhere)
    part: Context = {"s3:ObjectCreationOperation": "false"}
    assert allowed(statements_of(role_of(deployed)), "s3:PutObject", f"{bucket}/models/cas/sha256/aa/x", part)


def test_a_promotion_of_what_was_published_long_ago_is_allowed(deployed: Made, tmp_path: Path) -> None:
    """Its blobs are made young again."""
    publication, promotion = published_and_promoted(tmp_path, days=3)
    assert ("touch", "cas") in {(act, path.split("/")[0]) for act, path in promotion}
    assert refused(deployed, "PromoteProduction", promotion) == []
    assert refused(deployed, "", publication) == []


def test_a_release_without_a_key_in_kms_signs_with_none(deployed: Made) -> None:
    may = statements_of(role_of(deployed))
    assert not allowed(may, "kms:Sign", outputs(deployed.store)["KeyArn"], {"kms:SigningAlgorithm": ALGORITHM})


def test_every_folder_of_the_store_is_a_publishers_or_is_kept_from_it() -> None:
    names = ("BLOBS", "ACTIONS", "EVIDENCE", "PARTS", "FAILURES", "LEASES", "RUNS", "SIGNATURES", "REPORTS")
    published = [getattr(layout, name) for name in (*names, "RECORD_SEGMENTS", "INPUT_SEGMENTS", "LISTINGS")]
    for folder in published:
        assert any(folder.startswith(own) for own in (*CREATED_ONCE, *REPLACED)), folder
    for own in (*CREATED_ONCE, *REPLACED):
        assert any(folder.startswith(own) for folder in published), own


def test_no_action_that_writes_has_a_wildcard_and_no_statement_is_about_everything() -> None:
    policies = [
        resource
        for resource in template_of(make().release)["Resources"].values()
        if "ManagedPolicy" in resource["Type"]
    ]
    assert len(policies) == 4
    for statement in [entry for policy in policies for entry in policy["Properties"]["PolicyDocument"]["Statement"]]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not [action for action in actions if "*" in action]
        assert statement["Resource"] != "*"


def test_a_change_of_repository_locks_the_old_one_out_and_destroying_leaves_nothing(aws: None) -> None:
    made = make()
    deploy(made.store, made.release)
    assert census(REGION) == []
    role = role_of(made)
    changed = make(Release(repository="example/more", environment="release"))
    deploy(changed.release)
    assert role_of(changed) == role
    assert not opened_by(changed, token())
    assert opened_by(changed, token(sub="repo:example/more:environment:release"))
    destroy(changed.release)
    iam = boto3.client("iam")
    assert iam.list_roles()["Roles"] == []
    assert iam.list_open_id_connect_providers()["OpenIDConnectProviderList"] == []
    assert iam.list_policies(Scope="Local")["Policies"] == []


WITH_IDS = Release(repository="example/models", owner_id=123456, repository_id=456789)


@pytest.mark.parametrize(
    ("release", "trusted"),
    [(ASKED_FOR, "repo:example/models"), (WITH_IDS, "repo:example@123456/models@456789")],
)
def test_the_roles_trust_the_one_form_of_the_subject_that_the_file_describes(release: Release, trusted: str) -> None:
    """A pattern for any id would trust each later owner of the name."""
    roles = [entry for entry in template_of(make(release).release)["Resources"].values() if "::Role" in entry["Type"]]
    assert len(roles) == 4
    for role in roles:
        (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        assert set(statement["Condition"]) == {"StringEquals"}
        subject = statement["Condition"]["StringEquals"][f"{ISSUER}:sub"]
        assert subject.rpartition(":")[0].removesuffix(":environment") == trusted, subject


def test_synthesis_states_how_to_find_the_ids_of_the_repository() -> None:
    command = Match.string_like_regexp("gh api repos/example/models --jq '.owner.id, .id'")
    Annotations.from_stack(make(ASKED_FOR).release).has_warning("/demo-release", command)
    Annotations.from_stack(make(WITH_IDS).release).has_no_warning("/demo-release", Match.any_value())


def test_a_provider_that_the_account_has_is_used_and_outlives_the_stack(aws: None) -> None:
    iam = boto3.client("iam")
    arn = iam.create_open_id_connect_provider(Url=f"https://{ISSUER}", ClientIDList=["sts.amazonaws.com"])[
        "OpenIDConnectProviderArn"
    ]
    made = make(Release(repository="example/models", provider=arn))
    deploy(made.store, made.release)
    assert opened_by(made, token())
    destroy(made.release)
    assert len(iam.list_open_id_connect_providers()["OpenIDConnectProviderList"]) == 1


def test_a_publication_that_finds_old_evidence_is_allowed(deployed: Made, tmp_path: Path) -> None:
    """It is made young again, and comes from nowhere but the folder of evidence."""
    writes: list[tuple[str, str]] = []
    store = Store(watched(LocalFolder(tmp_path), lambda act, path: writes.append((act, path))))
    publish_verified(store, put(store))
    for path in (tmp_path / "evidence").rglob("*"):
        os.utime(path, (time.time() - 3 * 86_400,) * 2)
    publish_verified(store, put(store))
    assert ("touch", "evidence") in {(act, path.split("/")[0]) for act, path in writes}
    assert refused(deployed, "", writes) == []
    name = outputs(deployed.store)["BucketName"]
    document = f"arn:aws:s3:::{name}/models/evidence/x/y"
    for word, source, may_be in (
        ("", "models/evidence/x/y", True),
        ("", "models/cas/sha256/aa/x", False),
        ("", "evidence/x/y", False),
        ("PromoteProduction", "models/evidence/x/y", False),
    ):
        copied = {"s3:x-amz-copy-source": f"{name}/{source}", "s3:ObjectCreationOperation": "true"}
        assert allowed(statements_of(role_of(deployed, word)), "s3:PutObject", document, copied) == may_be, source


def test_the_commands_for_github_read_outputs_that_the_stacks_have() -> None:
    release = Release(repository="example/models", environment="publish", channels=("staging", "eu-production"))
    made = make(release)
    config = Config(project=Project(name="demo"), release=release)
    named = set(re.findall(r"output (demo-\w+) (\w+)", setup_script(config)))
    there = {("demo-storage", name) for name in template_of(made.store)["Outputs"]}
    roles = {("demo-release", name) for name in template_of(made.release)["Outputs"]}
    assert named == roles | {("demo-storage", "BucketName")}
    assert ("demo-storage", "BucketName") in there
