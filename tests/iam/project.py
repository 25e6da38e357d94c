"""A project with every feature, and its users: the commands of each role, run against the local AWS.

The commands and the synthesis read the same nxpipe.toml, and resources have the names that templates.py gives them.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.backends.s3_multipart import PartsUploader
from nxpipe.artifact_store.builds import record_failure, record_outcome
from nxpipe.artifact_store.evidence import DEVICE, Limits
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.pipeline.build.executors.batch import BatchExecutor, PollIntervals, find_farm
from nxpipe.pipeline.build.jobs import JobLimits
from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.fleet.agent.logs import AGENT
from nxpipe.pipeline.fleet.agent.watch import FleetLog
from nxpipe.pipeline.fleet.batch_prove import Pace, ProofJob, find_queue, submit
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import NotReady
from nxpipe.pipeline.verify.prove import ProveOptions
from nxpipe.stacks import app
from tests.agent.journal import Journal
from tests.agent.metadata import metadata_service
from tests.artifact_store.samples import evidence, publish_verified, put
from tests.executors.farm_world import deploy_farm, deploy_prover, job
from tests.iam.calls import Call
from tests.iam.recording import ACCESS_KEY, Recorder, recording
from tests.iam.templates import REGION, Templates
from tests.localaws.moto_patches.batch_jobs import JOB_HOST
from tests.localaws.server import local_aws
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess
from tests.pipeline.rollout_world import Fleet, make_front
from tests.stacks.local import new_app
from tests.stacks.whole import WHOLE, write_locks

PREFIX: Final = "models/"
PROOFS: Final = "/nxpipe/demo/proofs"
CHANNELS: Final = ("staging", "production")
_DAY: Final = 86_400
_MORE: Final = """
[signing]
key = "kms:{build}"
require = ["staging", "production"]
[[signing.promoting]]
channel = "staging"
key = "kms:{staging}"
[[signing.promoting]]
channel = "production"
key = "kms:{production}"
[[signing.trusted]]
name = "build"
key = "file:build.pub"
signs = "artifacts"
[[signing.trusted]]
name = "staging"
key = "file:staging.pub"
channels = ["staging"]
signs = "channels"
[[signing.trusted]]
name = "production"
key = "file:production.pub"
channels = ["production", "experiments"]
signs = "channels"
[store]
url = "s3://{bucket}/models"
[[fleets]]
kind = "training"
name = "block"
model = "llama"
channel = "experiments"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2a"
nodes = 1
capacity = {{ {block} }}
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{digest}"
[[cluster.groups]]
name = "reserved"
instance_type = "trn1.32xlarge"
zone = "us-east-2b"
capacity = {{ {block} }}
size = {{ min = 0, max = 2 }}
"""
_CACHE: Final = 'compile_cache = "s3://demo-caches/neuron"\n'
_BLOCK: Final = (
    'kind = "capacity-block", id = "cr-0a1b2c3d4e5f60718", start = 2098-12-01T11:30:00Z, end = 2098-12-08T11:30:00Z'
)


def configuration(bucket: str, keys: Mapping[str, str]) -> str:
    """WHOLE with small local models, a bucket, a KMS key for each duty, and schedules of capacity blocks."""
    text = WHOLE.replace('id = "bert-base-uncased"', 'path = "bert"\nweights = "random:0"')
    text = text.replace('id = "acme/llama"', 'path = "llama"\nweights = "random:0"').replace("[128]", "[8]")
    text = text.replace('task = "fill-mask"', 'task = "feature-extraction"')
    text = text.replace('command = ["python", "-m", "server"]\n', "command = []\n")
    rehearsed = 'kind = "serving"\nrehearsal = true\ngolden_inputs = false\nssm = true\n'
    text = text.replace('kind = "serving"\n', rehearsed + _CACHE)
    assert text.count("random:0") == 2
    assert "rehearsal = true" in text
    return text + _MORE.format(bucket=bucket, block=_BLOCK, digest="0" * 64, **keys)


def synthesised(folder: Path) -> Templates:
    """The templates of the folder's nxpipe.toml, in this process."""
    cdk = new_app(outdir=str(folder / "out"))
    config = app.deployable(folder / "nxpipe.toml")
    app.add_stacks(cdk, config, folder)
    cdk.synth()
    written = (folder / "out").glob("*.template.json")
    return Templates({path.name.removesuffix(".template.json"): json.loads(path.read_text()) for path in written})


@dataclass(frozen=True)
class Recorded:
    """The templates, and the calls of each session of users and machines."""

    templates: Templates
    calls: Mapping[str, set[Call]]


@dataclass
class _User:
    patch: pytest.MonkeyPatch
    said: StringIO = field(default_factory=StringIO)

    def __call__(self, *words: str) -> Any:
        """Run a command in this process; its document if it has --json."""
        out, self.said = StringIO(), StringIO()
        self.patch.setattr(sys, "argv", ["nxpipe", *words])
        with redirect_stdout(out), redirect_stderr(self.said):
            code = cli.main(list(words), prog_name="nxpipe", obj=Console(), standalone_mode=False)
        assert code in (0, None), (words, code, self.said.getvalue())
        return json.loads(out.getvalue()) if "--json" in words else out.getvalue()


BUCKET: Final = "demo-storage-artifacts"
_SPARE: Final = "demo-train-spare"


@contextmanager
def _account(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """An empty account, and the environment of a job whose calls are recorded."""
    with pytest.MonkeyPatch.context() as patch:
        home = folder / "home"
        for name in [name for name in os.environ if name.startswith(("NXPIPE_", "AWS_"))]:
            patch.delenv(name)
        for name, value in {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "HF_HUB_OFFLINE": "1",
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), str(home)),
        }.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        patch.setattr("nxpipe.pipeline.rollout.follow._INTERVAL", 0.05)
        with local_aws():
            yield patch


def recorded(folder: Path) -> Recorded:
    """Synthesise the project, and let its users and machines work."""
    for name, config in (("bert", BERT), ("llama", LLAMA)):
        write_model(folder / name, config | {"num_hidden_layers": 1})
    write_locks(folder)
    with _account(folder) as patch:
        keys = {duty: _signing_key() for duty in ("build", *CHANNELS)}
        (folder / "nxpipe.toml").write_text(configuration(BUCKET, keys))
        user = _User(patch)
        for duty, key in keys.items():
            user("store", "keygen", f"{duty}.pub", "--public-of", f"kms:{key}")
        templates = synthesised(folder)
        key = templates.arn("demo-storage", templates.find("AWS::KMS::Key", "demo-storage"))
        checkpoints = templates.name(_SPARE, templates.find("AWS::S3::Bucket", _SPARE))
        recorder = Recorder({BUCKET: key, checkpoints: key})
        where = {"LocationConstraint": REGION}
        boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
        with recording(recorder):
            _Users(user, recorder, templates, patch).run()
    return Recorded(templates, recorder.calls)


def _signing_key() -> str:
    key = boto3.client("kms").create_key(KeyUsage="SIGN_VERIFY", KeySpec="ECC_NIST_P256")["KeyMetadata"]
    return str(key["Arn"])


def _make_old() -> None:
    """Objects that were written days ago are renewed when an artifact names them again."""
    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]
    for key in bucket.keys.values():
        key.last_modified -= timedelta(days=3)


class _Unsupported(Exception):
    """A failure of a model, which another attempt would repeat."""

    deterministic = True


@dataclass
class _Users:
    """Each method is one session: the commands of one role, as in docs/guides."""

    user: _User
    recorder: Recorder
    templates: Templates
    patch: pytest.MonkeyPatch
    names: list[str] = field(default_factory=list)  # of artifacts of the fleet's model

    def run(self) -> None:
        sessions = (
            self.publish,
            self.submit,
            self.work_on_farm,
            self.submit_proof,
            self.prove,
            self.plan,
            self.promote_staging,
            self.promote_production,
            self.serve,
            self.fetch,
            self.checkpoint,
        )
        for session in sessions:
            with self.recorder.session(session.__name__):
                session()
                shutil.rmtree("home", ignore_errors=True)  # each role works on a machine of its own

    def publish(self) -> None:
        """The jobs `build`, and publications that find old objects or need several requests for one."""
        user = self.user
        user("build", "--only", "bert", "--jobs", "1", "--json")
        user("build", "--only", "bert", "--jobs", "1")
        (built,) = user("store", "ls", "--json")
        name = f"bert@{built['request_key'][:12]}"
        user("verify", name)
        user("bench", "bert", "--against", "production", "--allow-empty")
        store = open_store(f"s3://{BUCKET}/models")
        self.names = [name, *(self._sample(store, number) for number in range(2))]
        _make_old()
        self._sample(store, 0)
        for name in self.names:
            user("store", "sign", name)
        assert record_failure(store, "f" * 64, _Unsupported("an operator that the compiler lacks"))
        with patch("nxpipe.artifact_store.index.segments.MANY_READ", 0):
            user("store", "ls")
        with patch("nxpipe.artifact_store.backends.s3.IN_PARTS_ABOVE", 64):
            self._in_parts(store.backend)

    @staticmethod
    def _in_parts(backend: Backend, digit: str = "a") -> None:
        """One object in several requests: an interrupted upload, which is resumed, and one that comes too late."""
        path, payload = f"cas/sha256/{digit * 2}/{digit * 64}", backend.hashed(b"in parts" * 100)
        interrupted = patch.object(PartsUploader, "_complete", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            backend.create(path, payload)
        assert backend.create(path, payload)
        assert not backend.create(path, payload)

    @staticmethod
    def _sample(store: Store, number: int) -> str:
        made = publish_verified(store, put(store, request=number, model="bert"))
        return f"bert@{made.request_key[:12]}"

    def submit(self) -> None:
        """The job `build` with the build farm as its executor; the build is interrupted."""
        store = open_store(f"s3://{BUCKET}/models")
        with self.recorder.session(""):
            deploy_farm(store=f"s3://{BUCKET}/models/")
            JOB_HOST.open(capacity=0)
        runs = BatchExecutor(store, find_farm("demo", REGION), JobLimits(), PollIntervals(poll=0.01))
        for title in ("one", "other"):
            runs.start(job(title))
        runs.events(0.0)
        runs.events(0.1)
        runs.close()

    def work_on_farm(self) -> None:
        """A job of the build farm builds as the session `publish`, and leaves its outcome."""
        record_outcome(open_store(f"s3://{BUCKET}/models"), "0" * 64, 0, {})

    def submit_proof(self) -> None:
        """The job `build` with a proof on AWS Batch, which is interrupted; the job itself is stubbed."""
        store = open_store(f"s3://{BUCKET}/models")
        published = store.resolve(self.names[0])
        with self.recorder.session(""):
            log = boto3.client("logs")
            log.create_log_group(logGroupName=PROOFS)
            log.create_log_stream(logGroupName=PROOFS, logStreamName="job/1")
            deploy_prover("inf2.xlarge", "prove", f"s3://{BUCKET}/models/")
            JOB_HOST.open(capacity=0)
        queue = find_queue("demo", "inf2.xlarge", REGION)
        limits = Limits(min_cosine=0.999, max_relative_error=0.05, max_kl=None, min_top1=None)
        submitted = submit(queue, published, ProveOptions(), limits)
        with pytest.raises(NotReady, match=r"no inf2\.xlarge was available"):
            ProofJob(queue, submitted, lambda line: None, Pace(start=0.0, poll=0.0)).lines()
        queue.logs.get_log_events(logGroupName=queue.log_group, logStreamName="job/1")
        assert store.evidence(published.manifest_digest)

    def prove(self) -> None:
        """A job on a device, which fetches an artifact and adds evidence."""
        _make_old()
        store = open_store(f"s3://{BUCKET}/models")
        published = store.resolve(self.names[1])
        fetch(store.blobs, published.manifest, Path("proved"))
        store.attest(evidence(store, published.manifest, DEVICE))
        with patch("nxpipe.artifact_store.backends.s3.IN_PARTS_ABOVE", 64):
            self._in_parts(store.backend, "b")

    def plan(self) -> None:
        """The job `plan` of a pull request, which only reads."""
        self.user("build", "--only", "bert", "--dry-run")
        self.user("store", "ls")
        self.user("store", "show", self.names[0])

    def promote_staging(self) -> None:
        """A channel without a serving fleet."""
        _make_old()
        for name in self.names[1:]:
            self.user("promote", name, "--channel", "staging")
        self.user("rollback", "--channel", "staging")
        self.user("channel", "show", "staging", "--json")
        self.user("release", "--channel", "staging", "--only", "bert", "--skip", "verify")

    def promote_production(self) -> None:
        """A channel whose fleet takes new versions by rollouts. The machine is a stub: its own role is not recorded."""
        user, (first, second, third) = self.user, self.names
        _make_old()
        user("promote", second, "--channel", "production")
        user("promote", first, "--channel", "production")
        user("rollback", "--channel", "production")
        with self.recorder.session(""):
            fleet = self._fleet()
            fleet.says("promoted", "all steps went well")
        user("rollout", "start", "search", first, "--wait")
        user("rollout", "status", "search", "--wait")
        user("rollout", "log", "search")
        with self.recorder.session(""):
            fleet.ends()
        user("rollout", "start", "search", third)
        for word in ("status", "pause", "resume", "approve", "abort"):
            user("rollout", word, "search")
        with self.recorder.session(""):
            fleet.stop_all()
            fleet.write_record(stable="blue")
            fleet.says("promoted", "all steps went well")
        user("release", "--from", "staging", "--to", "production", "--skip", "verify")

    def fetch(self) -> None:
        """A training job or a pod."""
        self.user("store", "fetch", "--channel", "production", "--to", "fetched")

    def checkpoint(self) -> None:
        """A training program on spot instances, which keeps its checkpoints by the AWS SDK."""
        s3 = boto3.Session().client("s3")  # the default session is older than the recorder
        bucket = self.templates.name(_SPARE, self.templates.find("AWS::S3::Bucket", _SPARE))
        with self.recorder.session(""):
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        Path("step-1").write_bytes(b"weights" * 1_000_000)
        s3.upload_file("step-1", bucket, "step-1", Config=TransferConfig(multipart_threshold=5 * 2**20))
        s3.list_objects_v2(Bucket=bucket)
        s3.download_file(bucket, "step-1", "again")
        s3.delete_object(Bucket=bucket, Key="step-1")

    def _fleet(self) -> Fleet:
        table, role = "demo-search-rollout", self.templates.role("demo-rollout-search", "RolesRelease").principal.id
        boto3.client("dynamodb").create_table(
            TableName=table,
            KeySchema=[{"AttributeName": "fleet", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "fleet", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        fleet = Fleet("demo", cast(InProcess, None), [], make_front())  # its commands are not used
        boto3.client("stepfunctions").create_state_machine(name=table, definition=fleet.text(None), roleArn=role)
        fleet.weigh(green=0)
        return fleet

    def serve(self) -> None:
        """An instance of each environment: its agent, its metrics, and its log."""
        journal = Journal.installed(Path.cwd(), self.patch)
        hook, log = "demo-search-ready", "/nxpipe/demo/search"
        with self.recorder.session(""):
            boto3.client("logs").create_log_group(logGroupName=log)
            Path("dev").mkdir()
            Path("dev", "neuron0").touch()
        for group in ("demo-search-blue", "demo-search-green"):
            with self.recorder.session(""):
                instance = _launched(group, hook)
            with metadata_service() as metadata:
                metadata.values |= {
                    "instance-id": instance,
                    "instance-type": "inf2.xlarge",
                    "placement/region": REGION,
                    "tags/instance/aws:autoscaling:groupName": group,
                }
                self.patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
                # The second time, as after a reboot, no hook is pending.
                for _ in range(2):
                    self.user("agent", "run", "--fleet", "search", "--hook", hook, "--to", group, "--devices", "dev")
                for unit in (AGENT, "nxpipe-watch.service"):
                    journal.write("a line", unit)
                self.user("agent", "forward", "--log", log, "--unit", AGENT, "--once", "--position", f"{group}.json")
            FleetLog.open(log, instance, REGION).write(int(time.time() * 1000), "{}")


def _launched(group: str, hook: str) -> str:
    """An instance that waits for its lifecycle hook."""
    scaling, ec2 = boto3.client("autoscaling"), boto3.client("ec2")
    data = {"ImageId": "ami-0123456789abcdef0", "InstanceType": "inf2.xlarge"}
    ec2.create_launch_template(LaunchTemplateName=group, LaunchTemplateData=data)
    scaling.create_auto_scaling_group(
        AutoScalingGroupName=group,
        MinSize=1,
        MaxSize=1,
        AvailabilityZones=[f"{REGION}a"],
        LaunchTemplate={"LaunchTemplateName": group},
        LifecycleHookSpecificationList=[
            {
                "LifecycleHookName": hook,
                "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING",
                "DefaultResult": "ABANDON",
            }
        ],
    )
    (made,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
    return str(made["Instances"][0]["InstanceId"])
