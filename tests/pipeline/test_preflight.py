"""`nxpipe infra preflight`: each obstacle is a row, an account without obstacles passes, permissions may be missing."""

import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.s3.exceptions import S3AccessDeniedError
from moto.s3.models import S3Backend
from moto.sns.models import sns_backends

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Manifest, ModelRef
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.capacity import CapacityBlock
from nxpipe.pipeline.config.cloud import Release
from nxpipe.pipeline.config.locks import ADDONS, FLEETS_PARAMETER, TRAINING_PARAMETER, ClusterLock, LockedImage
from nxpipe.pipeline.config.root import serving_fleets
from nxpipe.pipeline.fleet import preflight_rules as rules
from nxpipe.pipeline.fleet.account import Image, Quota, Reservation, quota_name
from nxpipe.pipeline.fleet.preflight_rules import ServedArtifact
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import MODEL, contents, manifest, publish_proven, put
from tests.localaws.install import install
from tests.localaws.moto_patches.ssm import image as image_of
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

REGION: Final = "us-east-1"  # its zones d (use1-az4) and f (use1-az5) offer all types; EKS refuses e (use1-az3)
REGISTRY: Final = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
BUNDLE: Final = "a" * 64
QUOTAS: Final = {"L-1945791B": 32, "L-2C3B7624": 256, "L-34B43A08": 64, "L-1216C47A": 6}
PROJECT: Final = """\
[project]
name = "demo"
region = "us-east-1"
account = "123456789012"

[store]
url = "s3://demo-artifacts/models"

[network]
kind = "closed"
zones = ["us-east-1d", "us-east-1f"]

[[models]]
name = "bert"
id = "acme/tiny-bert"
task = "fill-mask"
buckets = [128]
target = "inf2.xlarge"

[[models]]
name = "llama"
id = "acme/llama"
task = "text-generation"
buckets = [128]
target = "trn1.32xlarge"

[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 4 }

[[fleets]]
kind = "training"
name = "tune"
model = "llama"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-1f"
nodes = 2
capacity = { kind = "reservation", id = "RESERVED" }
image = "REGISTRY/train@IMAGE"

[cluster]
kubernetes = "1.34"
admins = ["arn:aws:iam::123456789012:role/platform"]

[[cluster.groups]]
name = "research"
instance_type = "trn1.32xlarge"
zone = "us-east-1d"
capacity = { kind = "on-demand" }
size = { min = 0, max = 2 }

[cluster.images]
device_plugin = "REGISTRY/train:plugin"
scheduler_extension = "REGISTRY/train:extension"
scheduler = "REGISTRY/train:scheduler"
efa_plugin = "REGISTRY/train:efa"

[release]
repository = "example/models"

[farm]
max_vcpus = 64
image = "REGISTRY/train@IMAGE"

[observe]
emails = ["oncall@example.com"]
"""

EFA: Final = "efa/aws-efa-installer-1.49.0.tar.gz"


class World:
    """An account that lacks nothing, and the files of a project for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ec2 = boto3.client("ec2")
        self.image = self._push("train")
        self.reserved: str = self.ec2.create_capacity_reservation(
            InstanceType="trn1.32xlarge",
            InstancePlatform="Linux/UNIX",
            AvailabilityZone="us-east-1f",
            InstanceCount=2,
        )["CapacityReservation"]["CapacityReservationId"]
        boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
        self.quotas(**QUOTAS)
        self._fill_store()
        boto3.client("sns").create_topic(Name="demo-alarms")
        self.topic = f"arn:aws:sns:{REGION}:123456789012:demo-alarms"
        subscribed = boto3.client("sns").subscribe(
            TopicArn=self.topic, Protocol="email", Endpoint="oncall@example.com", ReturnSubscriptionArn=True
        )
        self.subscription: str = subscribed["SubscriptionArn"]
        self.write()

    def quotas(self, **values: int) -> None:
        for code, value in values.items():
            boto3.client("service-quotas").request_service_quota_increase(
                ServiceCode="ec2", QuotaCode=code, DesiredValue=value
            )

    def _push(self, repository: str) -> str:
        ecr = boto3.client("ecr")
        ecr.create_repository(repositoryName=repository)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        config = {"mediaType": "application/json", "size": 1, "digest": f"sha256:{'1' * 64}"}
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []}
        pushed = ecr.put_image(repositoryName=repository, imageManifest=json.dumps(manifest), imageTag="one")
        digest: str = pushed["image"]["imageId"]["imageDigest"]
        return digest

    def _fill_store(self) -> None:
        self.s3 = boto3.client("s3")
        self.s3.create_bucket(Bucket="demo-artifacts")
        self.s3.put_object(Bucket="demo-artifacts", Key=f"models/agents/{BUNDLE}.tar", Body=b"")
        self.s3.put_object(Bucket="demo-artifacts", Key=f"models/{EFA}", Body=b"")
        self.promote("production", "neuronx")

    def promote(self, channel: str, backend: str) -> None:
        """Promote in a folder and upload it: moto sends no dates, which a publication requires."""
        place = self.folder / f"published-{channel}"
        store = open_store(place.as_uri())
        published = publish_proven(store, put(store, request=channel).model_copy(update={"backend": backend}))
        ChannelLog(store.backend, channel).append(lambda _: first_generation(channel, [Served.of(published)]))
        for path in filter(Path.is_file, place.rglob("*")):
            key = f"models/{path.relative_to(place).as_posix()}"
            self.s3.put_object(Bucket="demo-artifacts", Key=key, Body=path.read_bytes())

    def write(self, *changes: tuple[str, str], more: str = "") -> None:
        """Write nxpipe.toml with changes, and the lock files."""
        text = PROJECT
        for old, new in (*changes, ("RESERVED", self.reserved), ("REGISTRY", REGISTRY), ("IMAGE", self.image)):
            assert old in text
            text = text.replace(old, new)
        (self.folder / "nxpipe.toml").write_text(text + more)
        (self.folder / "nxpipe.agent.lock").write_text(json.dumps({"sha256": BUNDLE}))
        self.lock_images(image_of(REGION, FLEETS_PARAMETER), image_of(REGION, TRAINING_PARAMETER))
        tags = [f"{REGISTRY}/train:{tag}" for tag in ("plugin", "extension", "scheduler", "efa")]
        nodes = {"release": "1.34.1-20261012", "image": "ami-0123456789abcdef0"}
        lock = {"region": REGION, "kubernetes": "1.34", "neuron": nodes, "system": nodes}
        parts = {"addons": dict.fromkeys(ADDONS, "v1.20.4-eksbuild.1"), "images": dict.fromkeys(tags, self.image)}
        (self.folder / "nxpipe.cluster.lock").write_text(ClusterLock.model_validate(lock | parts).text())

    def endpoint(self, artifact: str, document: bytes, *changes: tuple[str, str]) -> None:
        """An endpoint of this artifact, whose folder has this manifest."""
        text = ENDPOINT.replace("0" * 64 + '"\nimage', artifact + '"\nimage')
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        key = f"models/endpoints/answers/{artifact}/manifest.json"
        self.s3.put_object(Bucket="demo-artifacts", Key=key, Body=document)
        self.write(more=text)

    def lock_images(self, serving: str, training: str) -> None:
        dates = "created = 2026-08-20\nexpires = 2099-01-01\n"
        row = '[[image]]\nregion = "{}"\n{}id = "{}"\nname = "n"\nsource = "s"\n' + dates
        rows = (row.format(REGION, 'sdk = "2.32.0"\n', serving), row.format(REGION, "", training))
        (self.folder / "nxpipe.amis.lock").write_text("\n".join(rows))


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty account, and the folder of a project."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.chdir(tmp_path)
    install()
    with mock_aws():
        yield tmp_path


@pytest.fixture
def world(account: Path) -> World:
    return World(account)


def examined(nxpipe: InProcess, code: int) -> list[dict[str, str]]:
    answer = nxpipe("infra", "preflight", "--json")
    assert answer.code == code, answer.out + answer.err
    document = json.loads(answer.out)
    assert document.keys() == {"format", "account", "region", "rows"}
    assert (document["account"], document["region"]) == ("123456789012", REGION)
    rows: list[dict[str, str]] = document["rows"]
    return rows


def test_an_account_that_lacks_nothing_passes_every_check(world: World, nxpipe: InProcess) -> None:
    rows = examined(nxpipe, 0)
    assert {row["state"] for row in rows} == {"ok"}, [row for row in rows if row["state"] != "ok"]
    assert {row["check"] for row in rows} == {
        *("account", "bootstrap", "zone", "offering", "vpc-endpoint", "quota", "reservation", "ebs-key"),
        *("image", "container", "agent", "efa", "channel", "oidc", "subscription"),
    }


def test_a_project_that_only_trains_needs_confirmed_addresses_as_well(world: World, nxpipe: InProcess) -> None:
    start, end = PROJECT.index("[[fleets]]"), PROJECT.index('[[fleets]]\nkind = "training"')
    world.write((PROJECT[start:end], ""))
    assert ("subscription", "ok") in {(row["check"], row["state"]) for row in examined(nxpipe, 0)}


ENDPOINT: Final = f"""
[budget]
monthly = 5000

[[endpoints]]
name = "answers"
model = "bert"
artifact = "{"0" * 64}"
image = "{REGISTRY}/serve@sha256:{"0" * 64}"
instance_type = "ml.inf2.xlarge"
instances = 4
shift = {{ kind = "canary", percent = 25, bake = "10m" }}
"""


def test_each_obstacle_is_a_row_that_fails_with_its_remedy(world: World, nxpipe: InProcess) -> None:
    boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="5", Type="String", Overwrite=True)
    world.ec2.run_instances(ImageId="ami-12345678", MinCount=1, MaxCount=1, InstanceType="inf2.8xlarge")
    boto3.client("iam").create_open_id_connect_provider(Url="https://token.actions.githubusercontent.com")
    key = boto3.client("kms").create_key()["KeyMetadata"]["Arn"]
    world.ec2.modify_ebs_default_kms_key_id(KmsKeyId=key)
    sns_backends["123456789012"][REGION].subscriptions[world.subscription].arn = "PendingConfirmation"
    world.s3.delete_object(Bucket="demo-artifacts", Key=f"models/agents/{BUNDLE}.tar")
    world.s3.delete_object(Bucket="demo-artifacts", Key=f"models/{EFA}")
    world.promote("rehearsal", "emulator")
    world.write(
        ('account = "123456789012"', 'account = "210987654321"'),
        ('"us-east-1d", "us-east-1f"]', '"us-east-1d", "us-east-1f", "us-east-1e"]'),
        ('channel = "production"\ninstance_types = ["inf2', 'channel = "rehearsal"\ninstance_types = ["inf2'),
        ("nodes = 2", "nodes = 3"),
        more=ENDPOINT,
    )
    world.lock_images("ami-00000000000000009", image_of(REGION, TRAINING_PARAMETER))
    fails = {row["what"]: row for row in examined(nxpipe, 33) if row["state"] == "fails"}
    assert all(row["remedy"] for row in fails.values())
    expected = {
        "credentials": "210987654321",
        f"CDK in {REGION}": f"npx cdk bootstrap aws://123456789012/{REGION}",
        "us-east-1e": "use1-az3",
        "inf2.xlarge of fleet search": "us-east-1d, us-east-1f",
        "m7i.large of cluster (system nodes)": "use1-az3",
        "Running On-Demand Inf instances": "--quota-code L-1945791B --desired-value 64",  # 32, and 32 in use
        "ml.inf2.xlarge for endpoint usage": "8 instances (endpoint answers: 2 x 4)",
        f"reservation {world.reserved} of fleet tune": "reserve 3 instances",
        "default key of EBS": f"create-grant --key-id {key}",
        "AMI of serving instances": "ami-00000000000000009: no such image",
        "serve@sha256:000000000000": f"push the image to {REGISTRY}/serve",
        "the agent's bundle": f"agents/{BUNDLE}.tar",
        "the EFA installer": f"s3://demo-artifacts/models/{EFA}",
        "channel rehearsal of fleet search": "backend emulator",
        "artifact of endpoint answers": f"endpoints/answers/{'0' * 64}/manifest.json",
        "OIDC provider of GitHub": 'provider = "arn:aws:iam::123456789012:oidc-provider/token.actions',
        "[budget] monthly": "no price of ml.inf2.xlarge in us-east-1",
        "alarm e-mails": "not confirmed: oncall@example.com",
    }
    for what, text in expected.items():
        assert text in " | ".join(fails[what].values()), what
    assert fails.keys() == expected.keys()


REHEARSAL: Final = ("instances = 4\n", "instances = 4\nrehearsal = true\n")


@pytest.mark.parametrize(
    ("changes", "setting", "found"),
    [
        ({"backend": "neuronx"}, None, None),
        ({"backend": "emulator"}, REHEARSAL, None),
        ({"backend": "emulator"}, None, "backend emulator, tp 1, for inf2"),
        ({"backend": "neuronx", "target": "trn1"}, None, "for trn1"),
        (
            {"backend": "neuronx", "model": ModelRef(id="acme/other", revision=None, task="fill-mask")},
            None,
            "acme/other",
        ),
        ({"backend": "neuronx", "degree": 4}, None, "tp 4"),
    ],
)
def test_the_artifact_of_an_endpoint_is_one_that_its_instances_can_run(
    changes: dict[str, Any], setting: tuple[str, str] | None, found: str | None, world: World, nxpipe: InProcess
) -> None:
    made = manifest_of(**changes)
    world.endpoint(made.digest, made.to_bytes(), *([setting] if setting else []))
    (row,) = (row for row in examined(nxpipe, 33) if row["check"] == "artifact")  # a new account has no quota for it
    assert row["state"] == ("fails" if found else "ok"), row
    assert (found or made.name) in row["found"]
    assert row["needed"].startswith("bert for inf2, any backend" if setting else "bert for inf2, backend neuronx")
    assert ("--endpoint answers" in row["remedy"]) == bool(found)


def test_a_folder_with_another_manifest_than_its_name_is_not_that_artifact(world: World, nxpipe: InProcess) -> None:
    made = manifest_of(backend="neuronx")
    world.endpoint("1" * 64, made.to_bytes())
    (row,) = (row for row in examined(nxpipe, 33) if row["check"] == "artifact")
    assert (row["state"], row["found"]) == ("fails", f"a manifest of SHA-256 {made.digest}")
    assert "upload the artifact's folder" in row["remedy"]


def manifest_of(degree: int = 1, **changes: Any) -> Manifest:
    made = manifest([Blob(sha256=sha256_hex(data), size=len(data)) for data in contents()])
    programs = tuple(program.model_copy(update={"tensor_parallel": degree}) for program in made.executables)
    return made.model_copy(update={"executables": programs, **changes})


def test_a_deployed_project_is_no_obstacle_to_itself_and_its_environments_have_channels(
    world: World, nxpipe: InProcess
) -> None:
    tags: list[Any] = [{"Key": "nxpipe:project", "Value": "demo"}]
    world.ec2.run_instances(
        ImageId="ami-12345678",
        MinCount=4,
        MaxCount=4,
        InstanceType="inf2.xlarge",
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    issuer = "https://token.actions.githubusercontent.com"
    boto3.client("iam").create_open_id_connect_provider(Url=issuer, Tags=tags)
    kms = boto3.client("kms")
    key = kms.create_key()["KeyMetadata"]["Arn"]
    world.ec2.modify_ebs_default_kms_key_id(KmsKeyId=key)
    role = "arn:aws:iam::123456789012:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    kms.create_grant(KeyId=key, GranteePrincipal=role, Operations=["Decrypt"])
    world.promote("search--blue", "emulator")
    rows = {
        row["what"]: row["state"] for row in examined(nxpipe, 33) if row["check"] == "channel" or row["state"] != "ok"
    }
    assert rows == {"channel search--blue of fleet search": "fails", "channel production of fleet search": "ok"}


def test_a_store_in_a_folder_and_missing_locks_are_rows(world: World, nxpipe: InProcess) -> None:
    world.write(('[store]\nurl = "s3://demo-artifacts/models"\n', ""))
    (world.folder / "nxpipe.cluster.lock").unlink()
    (world.folder / "nxpipe.amis.lock").unlink()
    rows = examined(nxpipe, 33)
    assert {row["what"] for row in rows if row["state"] == "fails"} == {"[store] url", "images of the cluster"}
    images = [row for row in rows if row["check"] == "image"]
    assert all("not locked; now it is ami-" in row["found"] and "ami lock" in row["remedy"] for row in images)
    world.write(("demo-artifacts", "no-such-bucket"))
    (world.folder / "nxpipe.agent.lock").unlink()
    failing = {row["what"]: row["found"] for row in examined(nxpipe, 33) if row["state"] == "fails"}
    assert failing.keys() == {"nxpipe.agent.lock", EFA, "channel production of fleet search"}
    assert "no-such-bucket" in failing["channel production of fleet search"]


def refused(*_: object) -> None:
    raise EC2ClientError("UnauthorizedOperation", "You are not authorized to perform this operation.")


def denied(*_: object, **__: object) -> None:
    raise S3AccessDeniedError


def test_a_missing_permission_is_an_unknown_row_and_ends_no_other_check(
    world: World, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("describe_instance_type_offerings", "describe_instances", "get_ebs_default_kms_key_id"):
        monkeypatch.setattr(EC2Response, call, refused)
    for name in ("head_object", "get_object"):
        monkeypatch.setattr(S3Backend, name, denied)
    rows = examined(nxpipe, 0)
    unknown = {row["check"]: row["remedy"] for row in rows if row["state"] == "unknown"}
    assert unknown == {
        "offering": "allow ec2:DescribeInstanceTypeOfferings",
        "quota": "allow ec2:DescribeInstances",
        "ebs-key": "allow ec2:GetEbsDefaultKmsKeyId",
        "agent": "allow s3:GetObject, or s3:ListBucket where there is no such object",
        "efa": "allow s3:GetObject, or s3:ListBucket where there is no such object",
        "channel": "allow s3:GetObject",
    }
    assert {row["state"] for row in rows if row["check"] not in unknown} == {"ok"}


def test_without_credentials_there_is_one_sentence_and_no_table(
    account: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (account / "nxpipe.toml").write_text(NO_FLEETS)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(account / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    answer = nxpipe("infra", "preflight")
    assert (answer.code, answer.out) == (32, "")
    assert (
        "no AWS credentials found, which it takes to identify the account of the credentials in us-east-1" in answer.err
    )
    assert len(answer.err.strip().splitlines()) <= 3


def test_a_configuration_that_no_account_can_deploy_is_invalid(account: Path, nxpipe: InProcess) -> None:
    text = PROJECT.replace("RESERVED", "cr-0a1b2c3d4e5f60718").replace("REGISTRY", REGISTRY)
    text = text.replace("IMAGE", f"sha256:{'0' * 64}").replace('zone = "us-east-1f"', 'zone = "us-east-1a"')
    (account / "nxpipe.toml").write_text(text)
    answer = nxpipe("infra", "preflight")
    assert (answer.code, answer.out) == (3, "")
    assert 'fleets[1].zone: found "us-east-1a"; expected a zone that has a subnet' in answer.err


NO_FLEETS: Final = '[project]\nname = "demo"\nregion = "us-east-1"\n'


def test_only_what_the_configuration_needs_is_checked_and_the_region_may_be_another(
    account: Path, nxpipe: InProcess
) -> None:
    (account / "nxpipe.toml").write_text(NO_FLEETS)
    boto3.client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")
    assert {row["check"] for row in examined(nxpipe, 0)} == {"account", "bootstrap"}
    document = json.loads(nxpipe("infra", "preflight", "--region", "us-west-2", "--json").out)
    assert document["region"] == "us-west-2"
    assert [row["state"] for row in document["rows"]] == ["ok", "fails"]  # not bootstrapped there
    lines = nxpipe("infra", "preflight", "--region", "us-west-2").out.splitlines()
    assert lines[0].split() == ["STATE", "CHECK", "WHAT", "FOUND", "NEEDED", "REMEDY"]
    assert [line.split()[0] for line in lines[1:]] == ["fails", "ok"]  # obstacles first


# The rules by themselves

_AMOUNTS = st.integers(0, 10_000)


@given(need=_AMOUNTS, used=_AMOUNTS, value=_AMOUNTS)
def test_a_quota_holds_exactly_if_it_covers_the_need_and_the_use_of_others(need: int, used: int, value: int) -> None:
    needs = {"q": rules.QuotaNeed(need, ("fleet f",))}
    (row,) = rules.quota_rows(needs, {"q": Quota("ec2", "L-1", value)}, {"q": used}, "vCPUs", REGION)
    assert (row.state == "ok") == (value >= need + used)
    assert row.state == "ok" or f"--desired-value {need + used} " in row.remedy
    (absent,) = rules.quota_rows(needs, {}, {}, "vCPUs", REGION)
    assert absent.state == "fails"


def config_of(text: str) -> Config:
    return Config.model_validate(tomllib.loads(text))


@given(
    kind=st.sampled_from(["on-demand", "spot", "reservation"]),
    type_=st.sampled_from(["inf2.xlarge", "inf2.48xlarge", "trn1.2xlarge", "trn2.48xlarge"]),
    most=st.integers(0, 20),
    base=st.integers(0, 25),
)
def test_a_rollout_needs_both_groups_at_their_largest_size(kind: str, type_: str, most: int, base: int) -> None:
    capacity = {
        "on-demand": '{ kind = "on-demand" }',
        "spot": f'{{ kind = "spot", on_demand_base = {base} }}',
        "reservation": '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }',
    }[kind]
    config = config_of(
        f"""
[project]
name = "demo"
region = "{REGION}"
[[models]]
name = "bert"
id = "{MODEL}"
task = "fill-mask"
buckets = [128]
target = "{type_}"
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["{type_}"]
capacity = {capacity}
zone = "{REGION}a"
size = {{ min = 0, max = {most} }}
"""
    )
    needs = rules.vcpu_needs(config, {})
    total = 0 if kind == "reservation" else 2 * most * INSTANCES[type_].vcpus
    assert sum(need.amount for need in needs.values()) == total
    on_demand = needs.get(quota_name(type_, spot=False))
    share = {"on-demand": most, "spot": min(base, most), "reservation": 0}[kind]
    assert (on_demand.amount if on_demand else 0) == 2 * share * INSTANCES[type_].vcpus


@given(
    zones=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    offers=st.fixed_dictionaries({name: st.sets(st.sampled_from("123")) for name in ("inf2.xlarge", "inf2.8xlarge")}),
)
def test_a_type_is_offered_if_each_zone_of_the_fleet_has_one_of_its_types(
    zones: list[str], offers: dict[str, set[str]]
) -> None:
    ids = {"a": "1", "b": "2", "c": "3"}
    demand = rules.Demand("fleet f", ("inf2.xlarge", "inf2.8xlarge"), 2, tuple(zones))
    (row,) = rules.offering_rows([demand, demand], offers, ids)
    assert (row.state == "ok") == all(any(ids[zone] in of for of in offers.values()) for zone in zones)


def test_a_service_without_an_endpoint_in_a_zone_has_a_row_of_its_own() -> None:
    offered = {"logs": ["z-a", "z-b"], "ecs": ["z-a"]}
    right, *wrong = reversed(list(rules.service_rows(["logs", "ecs", "eks"], offered, ["z-a", "z-b"])))
    assert (right.what, right.state) == ("logs", "ok")
    assert {(row.what, row.state, row.found) for row in wrong} == {
        ("ecs", "fails", "z-a"),
        ("eks", "fails", "no such service in this region"),
    }


def test_a_zone_is_one_of_the_account_and_of_eks_if_there_is_a_cluster() -> None:
    ids = {"us-east-1a": "use1-az3", "us-east-1b": "use1-az1"}
    states = {
        eks: [row.state for row in rules.zone_rows(["us-east-1a", "us-east-1b", "us-east-1z"], ids, eks=eks)]
        for eks in (False, True)
    }
    assert states == {False: ["ok", "ok", "fails"], True: ["fails", "ok", "fails"]}


@pytest.mark.parametrize(
    ("artifact", "others", "found", "remedy"),
    [
        (None, [], "empty", "promote to production"),
        (None, ["acme/llama for trn1"], "serves only acme/llama for trn1", "promote to production"),
        (ServedArtifact("a@1", "emulator", 1), [], "backend emulator", "--backend neuronx"),
        (ServedArtifact("a@1", "neuronx", 4), [], "tp 4", "a tp of at most 2"),
        (ServedArtifact("a@1", "neuronx", 2), [], "tp 2", None),
        (
            ServedArtifact("a@1", "neuronx", 2, {"device": "it has no evidence of kind device; prove it"}),
            [],
            "tp 2; it has no evidence of kind device",
            "--without-evidence device",
        ),
    ],
)
def test_a_channel_has_an_artifact_that_every_type_of_the_fleet_can_run(
    artifact: ServedArtifact | None, others: list[str], found: str, remedy: str | None
) -> None:
    text = PROJECT.replace("RESERVED", "cr-0a1b2c3d4e5f60718").replace("REGISTRY", REGISTRY)
    text = text.replace("IMAGE", f"sha256:{'0' * 64}").replace('["inf2.xlarge"]', '["inf2.48xlarge", "inf2.xlarge"]')
    fleet = serving_fleets(config_of(text))["search"]
    row = rules.channel_row(fleet, "production", "inf2", others, artifact)
    assert found in row.found
    assert (row.state == "ok", (remedy or "") in row.remedy) == (remedy is None, True)


def test_a_provider_that_the_configuration_names_exists() -> None:
    arn = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    named, unnamed = Release(repository="a/b", provider=arn), Release(repository="a/b")
    states = [rules.provider_row(named, {arn: False}).state, rules.provider_row(named, {}).state]
    states += [rules.provider_row(unnamed, providers).state for providers in ({}, {arn: True}, {arn: False})]
    assert states == ["ok", "fails", "ok", "ok", "fails"]


LOCKED: Final = LockedImage(
    region=REGION,
    sdk="2.32.0",
    id="ami-00000000000000001",
    name="n",
    created=date(2026, 1, 1),
    expires=date(2028, 1, 1),
    source="s",
)


@given(days=st.integers(-3, 3))
def test_an_image_fails_from_the_day_of_its_deprecation(days: int) -> None:
    today = date(2026, 11, 1)
    image = Image("available", date(2026, 10, 1), today + timedelta(days=days))
    row = rules.image_row("serving instances", LOCKED, LOCKED.id, image, today)
    assert row.state == ("ok" if days > 0 else "fails")
    assert "31 days old" in row.found


NOW: Final = datetime(2026, 11, 5, tzinfo=UTC)
HELD: Final = Reservation("active", "trn1.32xlarge", "z-a", 4, NOW - timedelta(days=4), NOW + timedelta(days=3))


def block(**moments: datetime) -> Any:
    window = {"start": HELD.start, "end": HELD.end} | moments
    return CapacityBlock.model_validate({"kind": "capacity-block", "id": "cr-0a1b2c3d4e5f60718", **window})


def booking(**changes: Any) -> rules.Booking:
    fields: dict[str, Any] = {"type": "trn1.32xlarge", "count": 4, "zones": ("z-a",), "block": block()}
    return rules.Booking("cr-1", "fleet tune", **(fields | changes))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, None),
        ({"block": None}, None),
        ({"count": 5}, "reserve 5 instances"),
        ({"type": "trn2.48xlarge"}, "set the instance type to trn1.32xlarge"),
        ({"zones": ("z-b", "z-c")}, "use the zone z-a"),
        ({"block": block(start=NOW - timedelta(days=5))}, "set start to 2026-11-01T00:00Z"),
        ({"block": block(end=NOW + timedelta(days=4))}, "set end to 2026-11-08T00:00Z"),
        ({"block": block(end=NOW - timedelta(days=1))}, "has not ended"),
    ],
)
def test_a_reservation_is_of_the_type_zone_count_and_dates(changes: dict[str, Any], remedy: str | None) -> None:
    row = rules.reservation_row(booking(**changes), HELD, NOW)
    assert (row.state == "ok") == (remedy is None)
    assert (remedy or "") in row.remedy


@pytest.mark.parametrize("state", ["expired", "cancelled", "failed", "scheduled"])
def test_a_reservation_is_active_and_a_block_may_be_scheduled(state: str) -> None:
    held = Reservation(state, HELD.type, HELD.zone, HELD.count, HELD.start, HELD.end)
    assert rules.reservation_row(booking(block=None), held, NOW).state == "fails"
    assert rules.reservation_row(booking(), held, NOW).state == ("ok" if state == "scheduled" else "fails")
    assert rules.reservation_row(booking(), None, NOW).state == "fails"


def test_a_network_with_a_nat_gateway_has_no_interface_endpoints() -> None:
    for kind, expected in (("nat", 0), ("closed", 6)):
        config = config_of(
            PROJECT.partition("[network]")[0]
            + f"""
[network]
kind = "{kind}"
[farm]
image = "{REGISTRY}/nxpipe@sha256:{"0" * 64}"
"""
        )
        assert len(rules.interface_services(config)) == expected


def test_an_image_that_the_project_names_is_examined_in_place_of_the_locked_one_of_aws(
    world: World, nxpipe: InProcess
) -> None:
    world.write(more='\n[amis]\nimage = "ami-0000000000000000b"\nowner = "self"\n')
    (row,) = (row for row in examined(nxpipe, 33) if row["what"] == "AMI of serving instances")
    assert (row["state"], row["found"]) == ("fails", "ami-0000000000000000b: no such image")
