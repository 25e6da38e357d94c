"""Class D of the review: what roles, policies, machines and workflows may do; and what a forged record leads to (E30).

The templates are those of a project with everything, with a key for each duty; the local AWS asks IAM for nothing, so
that what a role may do is read off its policies (tests/stacks/permissions.py answers as IAM would).
"""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import boto3
import pytest
from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl

from nxpipe.artifact_store.trust.keys import make_key_file
from nxpipe.pipeline.config import Signing
from nxpipe.stacks.lint.data_rules import SIGNER
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read
from tests.conftest import ROOT
from tests.github.documents import ACTION, ACTIONS, TEMPLATES, WORKFLOWS, steps
from tests.localaws.visitors import Fleet
from tests.stacks.audit import synthesise
from tests.stacks.local import template_of
from tests.stacks.permissions import allowed
from tests.stacks.rollout_world import FLEET, MACHINE, TABLE, WHO, ended, fleet_there, given_away, record, start, until
from tests.stacks.test_release_stack import make
from tests.stacks.whole import WHOLE, write_locks

Statement: TypeAlias = Mapping[str, Any]
Held: TypeAlias = tuple[str, str, Statement]  # stack, logical id, statement

KEYS: Final = {name: f"arn:aws:kms:us-east-2:123456789012:key/{name}" for name in ("build", "staging", "production")}
SIGNING: Final = f"""
[signing]
key = "kms:{KEYS["build"]}"
require = ["production"]
[[signing.promoting]]
channel = "staging"
key = "kms:{KEYS["staging"]}"
[[signing.promoting]]
channel = "production"
key = "kms:{KEYS["production"]}"
[[signing.trusted]]
name = "build"
key = "file:build.key.pub"
signs = "artifacts"
[[signing.trusted]]
name = "production"
key = "file:production.key.pub"
signs = "channels"
"""
YAML: Final = [*WORKFLOWS, *ACTIONS, *TEMPLATES.values()]


def attempt(*ids: str) -> Any:
    return pytest.mark.attempt(*ids)


# Templates


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    write_locks(folder)
    for name in ("build", "production"):
        make_key_file(folder / f"{name}.key")
    (folder / "nxpipe.toml").write_text(WHOLE + SIGNING)
    synthesise(folder / "nxpipe.toml", folder / "out")
    found = {path.name.split(".")[0]: json.loads(path.read_text()) for path in folder.glob("out/*.template.json")}
    assert len(found) >= 12
    return found


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def resources(templates: dict[str, dict[str, Any]], *types: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for stack, template in templates.items():
        for name, resource in template["Resources"].items():
            if resource["Type"] in types:
                yield stack, name, resource.get("Properties", {})


def granted(templates: dict[str, dict[str, Any]]) -> Iterator[Held]:
    """Statements of identity policies that allow something."""
    for stack, name, said in resources(templates, "AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
        for statement in said["PolicyDocument"]["Statement"]:
            if statement["Effect"] == "Allow":
                yield stack, name, statement
    for stack, name, said in resources(templates, "AWS::IAM::Role"):
        for policy in said.get("Policies", []):
            for statement in policy["PolicyDocument"]["Statement"]:
                yield stack, name, statement


def writes(statement: Statement) -> list[str]:
    return [
        entry
        for entry in listed(statement["Action"])
        if not re.match(r"\w[\w-]*:(Get|List|Describe|Batch(Get|Check))", entry)
    ]


@pytest.mark.sample(2, "whole project")
@attempt("D01")
def test_no_role_may_pass_a_role_or_change_iam(templates: dict[str, dict[str, Any]]) -> None:
    assert [
        held for held in granted(templates) if any(entry.startswith("iam:") for entry in listed(held[2]["Action"]))
    ] == []


@pytest.mark.sample(2, "whole project")
@attempt("D02")
def test_what_writes_to_everything_has_no_resources_and_a_condition(templates: dict[str, dict[str, Any]]) -> None:
    found = [held for held in granted(templates) if writes(held[2]) and "*" in listed(held[2]["Resource"])]
    for stack, _, statement in found:
        assert stack.startswith("demo-endpoint-"), statement
        assert listed(statement["Action"]) == ["cloudwatch:PutMetricData"]
        assert statement["Condition"]["StringEquals"].keys() == {"cloudwatch:namespace"}


@pytest.mark.sample(2, "whole project")
@attempt("D03")
def test_no_action_has_a_wildcard(templates: dict[str, dict[str, Any]]) -> None:
    assert [held for held in granted(templates) if any("*" in entry for entry in listed(held[2]["Action"]))] == []


@pytest.mark.sample(2, "whole project")
@attempt("D04")
def test_github_is_believed_for_exact_subjects(templates: dict[str, dict[str, Any]]) -> None:
    subjects = []
    for _, _, said in resources(templates, "AWS::IAM::Role"):
        for statement in said["AssumeRolePolicyDocument"]["Statement"]:
            if statement["Action"] == "sts:AssumeRoleWithWebIdentity":
                (operator,) = statement["Condition"]
                assert operator == "StringEquals"
                issuer = "token.actions.githubusercontent.com"
                assert statement["Condition"][operator][f"{issuer}:aud"] == "sts.amazonaws.com"
                subjects.append(statement["Condition"][operator][f"{issuer}:sub"])
    assert sorted(subjects) == [
        *(f"repo:example@1/models@2:environment:{entry}" for entry in ("production", "release", "staging")),
        "repo:example@1/models@2:pull_request",
    ]


def of_a_service(statement: Statement) -> list[str]:
    return listed(statement.get("Principal", {}).get("Service", [])) if isinstance(statement["Principal"], dict) else []


def knows_whose(statement: Statement) -> bool:
    keys = {key.lower() for tests in statement.get("Condition", {}).values() for key in tests}
    return bool(keys & {"aws:sourceaccount", "aws:sourcearn"})


# The balancer's is bound to this account by the path that it writes to.
_ACCOUNT: Final = {"Ref": "AWS::AccountId"}
_BY_PATH: Final = "logdelivery.elasticloadbalancing.amazonaws.com"


@pytest.mark.sample(2, "whole project")
@attempt("D05")
def test_no_service_writes_into_a_bucket_for_another_account(templates: dict[str, dict[str, Any]]) -> None:
    let_in, kept_out = [], []
    for stack, name, said in resources(
        templates, "AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy", "AWS::SQS::QueuePolicy"
    ):
        for statement in said["PolicyDocument"]["Statement"]:
            for service in of_a_service(statement):
                if statement["Effect"] == "Deny":
                    assert statement["Condition"].keys() == {"StringNotEquals"}
                    assert statement["Condition"]["StringNotEquals"].keys() == {"aws:SourceAccount"}
                    kept_out.append((stack, name, service))
                elif service == _BY_PATH:
                    assert statement["Resource"]["Fn::Join"][1][-2:] in (["/AWSLogs/123456789012/*"], [_ACCOUNT, "/*"])
                elif not knows_whose(statement):
                    let_in.append((stack, name, service))
    assert let_in  # those of other stacks, that CDK adds by itself
    assert set(let_in) <= set(kept_out)


# Those that nobody can lend: a role reaches them with an instance or a function of this account alone.
_OF_THIS_ACCOUNT: Final = {"ec2.amazonaws.com", "lambda.amazonaws.com"}


@pytest.mark.sample(2, "whole project")
@attempt("D06")
def test_no_service_takes_a_role_for_another_account(templates: dict[str, dict[str, Any]]) -> None:
    seen = set()
    for stack, name, said in resources(templates, "AWS::IAM::Role"):
        for statement in said["AssumeRolePolicyDocument"]["Statement"]:
            services = set(of_a_service(statement))
            seen |= services
            assert not services or services <= _OF_THIS_ACCOUNT or knows_whose(statement), (stack, name)
    assert {f"{entry}.amazonaws.com" for entry in ("events", "vpc-flow-logs", "eks", "states")} <= seen


@pytest.mark.sample(2, "whole project")
@attempt("D07")
def test_every_instance_asks_for_a_token_of_one_hop(templates: dict[str, dict[str, Any]]) -> None:
    found = [
        said["LaunchTemplateData"]["MetadataOptions"] for *_, said in resources(templates, "AWS::EC2::LaunchTemplate")
    ]
    assert len(found) >= 4
    assert {entry["HttpTokens"] for entry in found} == {"required"}
    assert {entry["HttpPutResponseHopLimit"] for entry in found} <= {1, 2}


@pytest.mark.sample(2, "whole project")
@attempt("D08")
def test_nothing_is_open_to_the_world(templates: dict[str, dict[str, Any]]) -> None:
    for *_, said in resources(templates, "AWS::EC2::SecurityGroup", "AWS::EC2::SecurityGroupIngress"):
        rules = [*said.get("SecurityGroupIngress", []), said]
        assert not [rule for rule in rules if rule.get("CidrIp") == "0.0.0.0/0" or rule.get("CidrIpv6") == "::/0"]


@pytest.mark.sample(2, "whole project")
@attempt("D09")
def test_user_data_holds_public_keys_and_no_secret(templates: dict[str, dict[str, Any]]) -> None:
    result = [
        json.dumps(said["LaunchTemplateData"]["UserData"])
        for *_, said in resources(templates, "AWS::EC2::LaunchTemplate")
        if "UserData" in said["LaunchTemplateData"]
    ]
    assert any("BEGIN PUBLIC KEY" in entry for entry in result)
    for entry in result:
        assert not re.search("PRIVATE KEY|AKIA[0-9A-Z]{16}|aws_secret|password", entry, re.IGNORECASE)


@pytest.mark.sample(2, "whole project")
@attempt("D10")
def test_each_role_signs_with_the_key_of_its_duty(templates: dict[str, dict[str, Any]]) -> None:
    signs = {
        name.removesuffix("Policy")[: name.index("Policy")]: listed(statement["Resource"])
        for _, name, statement in granted(templates)
        if "kms:Sign" in listed(statement["Action"])
    }
    assert signs == {
        "": [KEYS["build"]],
        "PromoteStaging": [KEYS["staging"]],
        "PromoteProduction": [KEYS["production"]],
    }


@attempt("D10")
def test_one_key_for_all_duties_is_a_finding() -> None:
    made = make(signing=Signing(key=f"kms:{KEYS['build']}"))
    read_again = Templates((read("demo-release", template_of(made.release), "us-east-2"),))
    found = {entry.resource.id[: -len("Policy12345678")] for entry in lint(read_again, Facts()) if entry.rule == SIGNER}
    assert sorted(found) == ["PromoteProduction", "PromoteStaging"]


def publishers(templates: dict[str, dict[str, Any]]) -> list[list[Statement]]:
    """The roles of releases and of the farm's jobs."""
    found = [may for may in _creators(templates) if allowed(may, "s3:PutObject", _ACTION, _ONCE)]
    assert len(found) == 2
    return found


_ONCE: Final = {"s3:if-none-match": "*"}
_ACTION: Final = "arn:aws:s3:::bucket/ac/aa/x"


def _creators(templates: dict[str, dict[str, Any]]) -> list[list[Statement]]:
    """The policies that permit to add objects to the store."""
    by_policy: dict[tuple[str, str], list[Statement]] = {}
    for stack, name, statement in granted(templates):
        named = json.loads(json.dumps(statement), object_hook=_named)
        whole = [
            f"arn:aws:s3:::{entry}" if entry.startswith("bucket") else entry for entry in listed(named["Resource"])
        ]
        by_policy.setdefault((stack, name), []).append({**named, "Resource": whole})
    return [entry for entry in by_policy.values() if any(item.get("Sid") == "AddRecords" for item in entry)]


def _named(said: dict[str, Any]) -> Any:
    """The statement with the deployment's values replaced, as if the bucket were called "bucket"."""
    if "Fn::Join" in said:
        return "".join(said["Fn::Join"][1])
    return "bucket" if len(said) == 1 and next(iter(said)).startswith(("Fn::", "Ref")) else said


@pytest.mark.sample(2, "whole project")
@attempt("D11")
@pytest.mark.parametrize("folder", ["cas/sha256/aa/x", "sig/aa/x", "ac/aa/x", "parts/aa/x"])
def test_a_publisher_creates_and_damages_nothing(templates: dict[str, dict[str, Any]], folder: str) -> None:
    for may in publishers(templates):
        path = f"arn:aws:s3:::bucket/{folder}"
        assert allowed(may, "s3:PutObject", path, {"s3:if-none-match": "*"})
        assert not allowed(may, "s3:PutObject", path)
        assert not allowed(may, "s3:PutObject", path, {"s3:ObjectCreationOperation": "true"})
        assert not allowed(may, "s3:PutObject", path, {"s3:x-amz-copy-source": "elsewhere/cas/x"})
        assert not allowed(may, "s3:DeleteObject", path)
        young = {"s3:x-amz-copy-source": f"bucket/{folder}"}
        assert allowed(may, "s3:PutObject", path, young) == folder.startswith("cas/")


@pytest.mark.sample(2, "whole project")
@attempt("D11")
def test_a_job_on_devices_adds_evidence_and_what_it_names_and_publishes_nothing(
    templates: dict[str, dict[str, Any]],
) -> None:
    (may,) = [each for each in _creators(templates) if not allowed(each, "s3:PutObject", _ACTION, _ONCE)]
    for folder in ("evidence/aa/x", "cas/sha256/aa/x"):
        assert allowed(may, "s3:PutObject", f"arn:aws:s3:::bucket/{folder}", _ONCE)
        assert not allowed(may, "s3:PutObject", f"arn:aws:s3:::bucket/{folder}")
    for folder in ("sig/aa/x", "ac/aa/x", "parts/aa/x", "channels/production/log/0000000001", "pins/x", "agents/x"):
        assert not allowed(may, "s3:PutObject", f"arn:aws:s3:::bucket/{folder}", _ONCE)
    assert not allowed(may, "s3:DeleteObject", "arn:aws:s3:::bucket/evidence/aa/x")


@pytest.mark.sample(2, "whole project")
@attempt("D12")
@pytest.mark.parametrize("folder", ["channels/production/log/0000000001", "pins/x", "agents/x"])
def test_a_publisher_moves_no_channel(templates: dict[str, dict[str, Any]], folder: str) -> None:
    for may in publishers(templates):
        assert not allowed(may, "s3:PutObject", f"arn:aws:s3:::bucket/{folder}", {"s3:if-none-match": "*"})


@pytest.mark.sample(2, "whole project")
@attempt("D13")
def test_who_releases_writes_the_lock_and_a_word_and_never_which_colour_is_stable(
    templates: dict[str, dict[str, Any]],
) -> None:
    found = [
        statement
        for _, name, statement in granted(templates)
        if "Releasing" in name and "dynamodb:UpdateItem" in listed(statement["Action"])
    ]
    assert found
    for statement in found:
        keys = statement["Condition"]["ForAllValues:StringEquals"]
        assert sorted(keys["dynamodb:Attributes"]) == ["fleet", "owner", "signal", "since"]
        assert keys["dynamodb:LeadingKeys"] == ["search"]
        # A request without them would pass ForAllValues.
        assert statement["Condition"]["Null"] == {"dynamodb:Attributes": "false", "dynamodb:LeadingKeys": "false"}


@pytest.mark.sample(2, "whole project")
@attempt("D14")
def test_every_bucket_is_private(templates: dict[str, dict[str, Any]]) -> None:
    found = [said["PublicAccessBlockConfiguration"] for *_, said in resources(templates, "AWS::S3::Bucket")]
    assert found
    assert all(set(entry.values()) == {True} and len(entry) == 4 for entry in found)


# Workflows


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


@attempt("D15")
@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_actions_of_others_are_named_by_commit(path: Path) -> None:
    for uses in re.findall(r"uses: (\S+)", path.read_text()):
        assert uses.startswith("$/") or re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", uses), uses


@attempt("D16")
@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_no_expression_stands_in_a_script(path: Path) -> None:
    assert [script for script in scripts(path) if "${{" in script] == []


@attempt("D17")
@pytest.mark.parametrize("path", [path for path in YAML if path.name != "action.yml"], ids=lambda path: path.name)
def test_a_workflow_has_no_secret_and_no_permission_of_its_own(path: Path) -> None:
    text = path.read_text()
    assert "secrets." not in text
    assert "pull_request_target" not in text
    assert re.search(r"^permissions: *(\{\}|$)", text, re.MULTILINE)


def wheel(folder: Path) -> Path:
    """A wheel without dependencies."""
    made = folder / "nxpipe-1.0-py3-none-any.whl"
    about = "nxpipe-1.0.dist-info"
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("tiny.py", "")
        packed.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: nxpipe\nVersion: 1.0\n")
        packed.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{about}/RECORD", "")
    return made


@attempt("D18")
@pytest.mark.parametrize(
    ("requirements", "code", "said"),
    [
        ("nxpipe @ file://{wheel} --hash=sha256:{digest}", 0, ""),
        ("nxpipe @ file://{wheel} --hash=sha256:" + "0" * 64, 1, "DO NOT MATCH THE HASHES"),
        ("nxpipe @ file://{wheel}", 1, "require"),
        ("nxpipe @ file://{wheel} --hash=sha256:{digest}\nboto3", 1, "pinned"),
        (None, 1, "There is no requirements/nxpipe.txt"),
        ("", 1, "There is no requirements/nxpipe.txt"),
    ],
    ids=["by hash", "another hash", "no hash", "one without a hash", "no file", "empty file"],
)
def test_a_job_installs_by_hash_or_not_at_all(tmp_path: Path, requirements: str | None, code: int, said: str) -> None:
    """The script of the action, with the pip of this environment; an index in a variable is not asked."""
    (script,) = (entry for entry in scripts(ACTION) if "pip install" in entry)
    made = wheel(tmp_path)
    if requirements is not None:
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        (tmp_path / "requirements").mkdir()
        (tmp_path / "requirements/nxpipe.txt").write_text(requirements.format(wheel=made, digest=digest))
    (tmp_path / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@" --no-cache-dir --target installed\n')
    (tmp_path / "pip").chmod(0o755)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "REQUIREMENTS": "requirements/nxpipe.txt",
            "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:1/evil",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "127.0.0.1" in done.stderr) == (code, False), done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert (tmp_path / "installed/tiny.py").exists() == (code == 0)


@attempt("D19")
def test_ci_runs_on_a_node_that_is_supported() -> None:
    """By AWS's page of Node.js versions for CDK: 20 until 2026-10-30, 22 until 2027-10-30, 24 until 2028-10-30."""
    (version,) = re.findall(r'node-version: "(\d+)"', (ROOT / ".github/workflows/ci.yml").read_text())
    assert int(version) >= 24


# E30


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_there(tmp_path_factory.mktemp("fleet")) as front:
        yield front


def forge(**values: str) -> None:
    """Write the item with no other right; D13 keeps `stable` from such a writer."""
    boto3.client("dynamodb").update_item(
        TableName=TABLE,
        Key={"fleet": {"S": FLEET}},
        UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in values),
        ExpressionAttributeNames={f"#{name}": name for name in values},
        ExpressionAttributeValues={f":{name}": {"S": value} for name, value in values.items()},
    )


def watchdogs() -> list[dict[str, Any]]:
    found = boto3.client("stepfunctions").list_executions(stateMachineArn=MACHINE.replace("rollout", "watchdog"))
    return list(found["executions"])


@pytest.mark.slow
@attempt("E30")
def test_a_forged_record_moves_no_traffic_and_empties_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHO.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrier_decl, "time", SimpleNamespace(sleep=lambda seconds: None))
    weights, sizes = fleet.weights(), fleet.sizes()
    known = start(plan={})  # is refused, and so is an execution that has ended
    ended(known)
    assert "owner" not in record()
    for owner in (None, known):
        before = len(watchdogs())
        given_away()
        forge(stable="green", **({"owner": owner} if owner else {}))
        assert ended(start())["error"] == "Rollout.Busy"
        for entry in _settled(before):
            assert entry["status"] == ("SUCCEEDED" if owner is None else "FAILED")
        assert (fleet.weights(), fleet.sizes()) == (weights, sizes), owner


def _settled(before: int) -> list[dict[str, Any]]:
    """Wait for the watchdogs started since then."""

    def over() -> list[dict[str, Any]]:
        new = watchdogs()[: len(watchdogs()) - before]
        return new if new and all(entry["status"] != "RUNNING" for entry in new) else []

    found: list[dict[str, Any]] = until(over)
    return found
