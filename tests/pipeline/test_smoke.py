"""`nxpipe infra smoke`: price, refusals, hard stop, removal. tests/localaws/test_smoke.py runs the whole."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.fleet.account import Account
from nxpipe.pipeline.fleet.agent.wheels import Bundle
from nxpipe.pipeline.fleet.smoke import SmokeTest
from nxpipe.pipeline.fleet.smoke_project import SmokePrice, SmokeProject
from nxpipe.pipeline.fleet.teardown import SmokeSteps, StepFailed, Teardown
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.template import Templates, read
from nxpipe.stacks.names import fleet_log
from tests.localaws.install import install
from tests.localaws.server import local_aws
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.rules.fixtures import group, launch, resource

__all__ = ["nxpipe"]

REGION: Final = "us-east-2"
PROJECT: Final = "demo-smoke"
TAGS: Final = [{"Key": "nxpipe:project", "Value": PROJECT}, {"Key": "nxpipe:smoke", "Value": "true"}]
FLEET: Final = {
    "Launch": launch(InstanceType="inf2.xlarge"),
    "Nodes": group(DesiredCapacity="1"),
    "Front": resource("AWS::ElasticLoadBalancingV2::LoadBalancer"),
}
STORAGE: Final = {
    "Artifacts": {
        "Type": "AWS::S3::Bucket",
        "DeletionPolicy": "Retain",
        "Properties": {"VersioningConfiguration": {"Status": "Enabled"}, "Tags": TAGS},
    },
    "Key": {
        "Type": "AWS::KMS::Key",
        "DeletionPolicy": "Retain",
        "Properties": {"KeyPolicy": {"Version": "2012-10-17", "Statement": []}, "Tags": TAGS},
    },
}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    install()
    with mock_aws():
        yield


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose agent is bundled, with a CDK CLI that writes fixed templates and whose deployments last."""
    (tmp_path / "nxpipe.toml").write_text(
        f'[project]\nname = "demo"\nregion = "{REGION}"\n[store]\nurl = "file://store"\n'
    )
    bundle = Bundle(("nxpipe",), "3.12", b"a tar file")
    bundle.put(open_store(f"file://{tmp_path / 'store'}"))
    (tmp_path / "nxpipe.agent.lock").write_text(bundle.lock())
    cdk = tmp_path / "node_modules" / ".bin" / "cdk"
    cdk.parent.mkdir(parents=True)
    stacks = {f"{PROJECT}-storage": {"Resources": STORAGE}, f"{PROJECT}-serve-one": {"Resources": FLEET}}
    cdk.write_text(_CDK.format(python=sys.executable, stacks=stacks, region=REGION, tags=TAGS))
    cdk.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


_CDK: Final = """\
#!{python}
import json, sys, time
from pathlib import Path
stacks = {stacks!r}
if sys.argv[1] == "synth":
    out, artifacts = Path("cdk.out"), {{}}
    out.mkdir()
    for name, template in stacks.items():
        (out / f"{{name}}.template.json").write_text(json.dumps(template))
        artifacts[name] = {{
            "type": "aws:cloudformation:stack",
            "environment": "aws://123456789012/{region}",
            "properties": {{"templateFile": f"{{name}}.template.json"}},
        }}
    (out / "manifest.json").write_text(json.dumps({{"version": "55.0.0", "artifacts": artifacts}}))
else:
    import boto3
    cloudformation = boto3.client("cloudformation", region_name="{region}")
    cloudformation.create_stack(StackName=sys.argv[2], TemplateBody=json.dumps(stacks[sys.argv[2]]), Tags={tags!r})
    time.sleep(120)
"""


def create(name: str, resources: dict[str, Any], tags: list[dict[str, str]]) -> None:
    body = json.dumps({"Resources": resources})
    boto3.client("cloudformation").create_stack(StackName=name, TemplateBody=body, Tags=tags)


def stacks() -> set[str]:
    return {entry["StackName"] for entry in boto3.client("cloudformation").describe_stacks()["Stacks"]}


def quiet_steps() -> SmokeSteps:
    return SmokeSteps(lambda title: nullcontext(), lambda text: None, poll=0.01)


def test_an_unknown_price_is_named_and_in_no_sum() -> None:
    templates = Templates((read(f"{PROJECT}-serve-one", {"Resources": FLEET}, REGION),))
    price = SmokePrice.of(estimate(templates, load_prices()), 3600, ["KMS key"])
    assert [(line.what.split(" (")[0], line.hourly) for line in price.lines] == [
        ("1 × inf2.xlarge", 0.7582),
        ("AWS::ElasticLoadBalancingV2::LoadBalancer", None),
        ("KMS key", None),
    ]
    assert (price.hourly, price.unknown) == (0.7582, 2)


@pytest.mark.parametrize(("minutes", "hours"), [(15, 1), (30, 1), (60, 2), (90, 2), (91, 3)])
def test_the_price_counts_started_hours_of_the_limit_and_of_the_deletion(minutes: int, hours: int) -> None:
    templates = Templates((read("s", {"Resources": FLEET}, REGION),))
    price = SmokePrice.of(estimate(templates, load_prices()), minutes * 60, [])
    assert (price.hours, price.total) == (hours, 0.7582 * hours)


def test_the_price_is_shown_and_nothing_starts_without_a_confirmation(
    aws: None, repository: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        answer = nxpipe("infra", "smoke")
    assert answer.code == 2, answer.err
    assert "confirm it with --yes" in answer.err
    assert "$0.7582  1 × inf2.xlarge" in answer.err
    assert "unknown  AWS::ElasticLoadBalancingV2::LoadBalancer" in answer.err
    assert "$1.52 for 2 started hours. 4 prices are unknown" in answer.err
    assert stacks() == set()


def test_an_account_with_an_obstacle_is_left_as_it_is(aws: None, repository: Path, nxpipe: InProcess) -> None:
    answer = nxpipe("infra", "smoke", "--yes", "--json")
    (row,) = json.loads(answer.out)["rows"]
    assert (answer.code, row["step"], row["state"]) == (33, "preflight", "fails")
    assert "cdk bootstrap" in row["found"]
    assert "L-1945791B" in row["found"]
    assert stacks() == set()


def test_stacks_of_an_earlier_test_and_foreign_stacks_of_that_name_are_refused(
    aws: None, repository: Path, nxpipe: InProcess
) -> None:
    create(f"{PROJECT}-storage", STORAGE, TAGS)
    earlier = nxpipe("infra", "smoke", "--yes")
    assert earlier.code == 2
    assert f"{PROJECT}-storage; continue it with --resume, or delete them with --destroy" in earlier.err
    create(f"{PROJECT}-network", STORAGE, TAGS[:1])
    for option in ("--yes", "--resume", "--destroy"):
        foreign = nxpipe("infra", "smoke", option)
        assert (foreign.code, foreign.out) == (2, "")
        assert f"no tag nxpipe:smoke: {PROJECT}-network" in foreign.err
    assert stacks() == {f"{PROJECT}-storage", f"{PROJECT}-network"}


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("nxpipe.agent.lock", "nxpipe.agent.lock does not exist"), ("store", "has no agents/")],
)
def test_a_missing_bundle_is_refused_before_anything_starts(
    aws: None, repository: Path, nxpipe: InProcess, missing: str, sentence: str
) -> None:
    (repository / missing).rename(repository / "elsewhere")
    answer = nxpipe("infra", "smoke", "--yes")
    assert answer.code == 2
    assert sentence in answer.err
    assert "nxpipe agent bundle" in answer.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(("--limit", "5m"), "at least 15m"), (("--resume", "--destroy"), "pass one of them")],
)
def test_options_that_make_no_sense_are_refused(
    repository: Path, nxpipe: InProcess, arguments: tuple[str, ...], sentence: str
) -> None:
    answer = nxpipe("infra", "smoke", *arguments)
    assert (answer.code, sentence in answer.err) == (2, True)


def test_a_removal_takes_stacks_and_what_they_retain_and_nothing_of_others(aws: None) -> None:
    create(f"{PROJECT}-storage", STORAGE, TAGS)
    create("demo-storage", {"Artifacts": STORAGE["Artifacts"] | {"Properties": {}}}, TAGS[:1])
    boto3.client("cloudformation").update_termination_protection(
        StackName=f"{PROJECT}-storage", EnableTerminationProtection=True
    )
    s3, kms = boto3.client("s3"), boto3.client("kms")
    buckets = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
    (own,) = (name for name in buckets if name.startswith(PROJECT))
    for _ in range(2):
        s3.put_object(Bucket=own, Key="blob", Body=b"a version")
    s3.delete_object(Bucket=own, Key="blob")
    # What an interrupted removal leaves: a bucket of no stack.
    s3.create_bucket(Bucket="orphan", CreateBucketConfiguration={"LocationConstraint": REGION})
    s3.put_bucket_tagging(Bucket="orphan", Tagging={"TagSet": TAGS})
    steps = quiet_steps()
    assert Teardown(Account(REGION), PROJECT, steps).run()
    assert {row.step: row.state for row in steps.rows} == dict.fromkeys(
        ("instances", "stacks", "retained", "left"), "ok"
    )
    assert stacks() == {"demo-storage"}
    assert {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]} == buckets - {own}
    (key,) = kms.list_keys()["Keys"]
    assert kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"]["KeyState"] == "PendingDeletion"
    again = quiet_steps()
    assert Teardown(Account(REGION), PROJECT, again).run()
    assert [row.found for row in again.rows] == ["no group", "no stack", "nothing", "nothing"]


def test_a_stack_is_deleted_when_the_operation_on_it_has_ended(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    create(f"{PROJECT}-storage", STORAGE, TAGS)
    call, refusals = Account.call, [1, 2]

    def busy(account: Account, service: str, method: str, **parameters: Any) -> dict[str, Any]:
        if method == "delete_stack" and refusals:
            refusals.pop()
            error = {
                "Code": "ValidationError",
                "Message": "Stack is in UPDATE_IN_PROGRESS state and can not be updated",
            }
            raise AwsError(error["Message"]) from ClientError({"Error": error}, "DeleteStack")
        return call(account, service, method, **parameters)

    monkeypatch.setattr(Account, "call", busy)
    assert Teardown(Account(REGION), PROJECT, quiet_steps()).run()
    assert (stacks(), refusals) == (set(), [])


def test_instances_end_before_the_stacks_are_deleted(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion can take half an hour, and a stack whose deletion fails keeps its group."""
    nodes = {
        "Launch": {
            "Type": "AWS::EC2::LaunchTemplate",
            "Properties": {"LaunchTemplateData": {"ImageId": "ami-0123456789abcdef0", "InstanceType": "inf2.xlarge"}},
        },
        "Nodes": {
            "Type": "AWS::AutoScaling::AutoScalingGroup",
            "Properties": {
                "MinSize": "0",
                "MaxSize": "1",
                "DesiredCapacity": "1",
                "AvailabilityZones": [f"{REGION}a"],
                "LaunchTemplate": {
                    "LaunchTemplateId": {"Ref": "Launch"},
                    "Version": {"Fn::GetAtt": ["Launch", "LatestVersionNumber"]},
                },
            },
        },
    }
    create(f"{PROJECT}-serve-one", nodes, TAGS)
    scaling = boto3.client("autoscaling")

    def sizes() -> list[tuple[int, int]]:
        groups = scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
        return [(entry["DesiredCapacity"], entry["MaxSize"]) for entry in groups]

    assert sizes() == [(1, 1)]
    seen: list[list[tuple[int, int]]] = []

    def look(teardown: Teardown, retained: object) -> str:
        seen.append(sizes())
        return ""

    monkeypatch.setattr(Teardown, "_delete_stacks", look)
    monkeypatch.setattr("nxpipe.pipeline.fleet.teardown._LISTED_FOR", 0)
    Teardown(Account(REGION), PROJECT, quiet_steps()).run()
    assert seen == [[(0, 0)]]


def test_a_resource_that_is_left_fails_the_removal_and_is_named(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxpipe.pipeline.fleet.teardown._LISTED_FOR", 0)
    arn = boto3.client("sns").create_topic(Name="stray", Tags=TAGS[:1])["TopicArn"]
    steps = quiet_steps()
    assert not Teardown(Account(REGION), PROJECT, steps).run()
    assert steps.rows[-1].state == "fails"
    assert arn in steps.rows[-1].found


class Scripted(SmokeTest):
    """A test whose steps are one function."""

    script: Any = None

    def _examine(self) -> str:
        return "2 checks pass, 0 are unknown"

    def _storage(self) -> str:
        found: str = type(self).script()
        return found


def scripted(folder: Path, limit: float, script: Any) -> SmokeTest:
    Scripted.script = staticmethod(script)
    return Scripted(SmokeProject.of(folder / "nxpipe.toml"), limit, quiet_steps())


@pytest.mark.sample(2)
def test_the_limit_ends_a_step_that_waits_and_removes_what_exists(aws: None, repository: Path) -> None:
    def deploy() -> str:
        create(f"{PROJECT}-storage", STORAGE, TAGS)
        time.sleep(60)
        return ""

    began = time.monotonic()
    report = scripted(repository, 1, deploy).run()
    assert time.monotonic() - began < 20
    assert str(report.stopped) == "the limit of 0.0166667m is reached"
    assert [(row.step, row.state) for row in report.rows[:2]] == [("preflight", "ok"), ("storage", "fails")]
    assert {row.state for row in report.rows[2:]} == {"ok"}
    assert (report.exit_code.number, stacks()) == (33, set())


@pytest.mark.parametrize("error", [StepFailed("no capacity"), AwsError("AWS: no answer"), KeyError("a fault of ours")])
def test_what_exists_is_removed_after_each_failure(aws: None, repository: Path, error: Exception) -> None:
    def deploy() -> str:
        create(f"{PROJECT}-storage", STORAGE, TAGS)
        raise error

    test = scripted(repository, 60, deploy)
    if isinstance(error, KeyError):
        with pytest.raises(KeyError, match="a fault of ours"):
            test.run()
    else:
        report = test.run()
        assert (report.rows[1].found, report.exit_code.number) == (str(error), 33)
    assert stacks() == set()
    assert [row.step for row in test.steps.rows[2:]] == ["instances", "stacks", "retained", "left"]


@pytest.mark.parametrize(
    ("message", "state"),
    [
        (None, "fails"),
        ("fetch smoke from channel smoke", "ok"),
        ('{"_aws": {"Timestamp": 1}, "neuroncore": 0}', "fails"),  # a metric is no line of the log
    ],
)
def test_the_log_must_have_lines_of_the_instance(
    aws: None, repository: Path, monkeypatch: pytest.MonkeyPatch, message: str | None, state: str
) -> None:
    monkeypatch.setattr("nxpipe.pipeline.fleet.smoke._LOGGED_WITHIN", 0)
    logs, stream = boto3.client("logs"), {"logGroupName": fleet_log(PROJECT, "one"), "logStreamName": "i-1/agent"}
    logs.create_log_group(logGroupName=stream["logGroupName"])
    if message:
        logs.create_log_stream(**stream)
        logs.put_log_events(**stream, logEvents=[{"timestamp": int(time.time() * 1000), "message": message}])
    test = scripted(repository, 60, str)
    test.instance = "i-1"
    test.steps.run("logs", "look", test._logs)
    assert test.steps.rows[0].state == state, test.steps.rows


@pytest.mark.sample(4)
def test_ctrl_c_removes_what_exists_and_a_second_one_names_the_command_that_does(
    sealed_environment: None, repository: Path
) -> None:
    with local_aws() as there:
        boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
        boto3.client("service-quotas").request_service_quota_increase(
            ServiceCode="ec2", QuotaCode="L-1945791B", DesiredValue=8
        )
        # A resource that no removal takes: the search for it lasts until the second Ctrl-C.
        boto3.client("sns").create_topic(Name="stray", Tags=TAGS)
        command = [str(Path(sys.executable).parent / "nxpipe"), "infra", "smoke", "--yes"]
        with subprocess.Popen(
            command, env={**os.environ, **there}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            try:
                _wait(lambda: f"{PROJECT}-storage" in stacks(), running)
                running.send_signal(signal.SIGINT)
                _wait(lambda: not stacks(), running)
                time.sleep(3)  # for the search
                running.send_signal(signal.SIGINT)
                out, err = running.communicate(timeout=20)
            finally:
                running.kill()
    assert running.returncode == 130, err
    assert "interrupted by Ctrl-C: deleting what exists" in err
    assert "run `nxpipe infra smoke --destroy`" in err
    found = {line.split()[1]: line for line in out.splitlines()[1:]}
    assert [*found] == ["preflight", "storage", "instances", "stacks", "retained", "left"]
    assert "interrupted; still listed: arn:aws:sns" in found["left"]


def _wait(reached: Any, running: "subprocess.Popen[str]") -> None:
    ends = time.monotonic() + 60
    while not reached():
        assert running.poll() is None, running.communicate()
        if time.monotonic() > ends:
            running.kill()
            pytest.fail(f"{stacks()}: {running.communicate()}")
        time.sleep(0.05)
