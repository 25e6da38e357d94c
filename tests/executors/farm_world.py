"""A build farm on the local AWS: a queue and a job definition like those of the stack, and jobs for it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import boto3
from moto.batch.models import Job as MotoJob
from moto.batch.models import batch_backends

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.layout import PARTS
from nxpipe.pipeline.build.executors.batch import BatchExecutor
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import WeightsSource
from nxpipe.stacks.names import proving_queue
from tests.conftest import ROOT
from tests.localaws.moto_patches.batch_jobs import IMAGES

REGION: Final = "us-east-2"
ACCOUNT: Final = "123456789012"
STORE: Final = "s3://artifacts/models"
MIB: Final = 1024**2
_LONGEST: Final = 60.0  # seconds until a test fails
_RETRIES: Final[Any] = {
    "attempts": 3,
    "evaluateOnExit": [{"action": "RETRY", "onStatusReason": "Host EC2*"}, {"action": "EXIT", "onReason": "*"}],
}


def deploy_farm(project: str = "demo", store: str = f"{STORE}/", memory: int = 512) -> None:
    """Deploy the farm as in `stacks/build_farm.py`, by CloudFormation."""
    _make_queue(f"{project}-builds", "SPOT", "m7i.large", 64)
    define_job(project, store, memory)


def deploy_prover(instance_type: str, image: str, store: str, seconds: int = 3600) -> None:
    """Deploy the queue and the job definition of an instance type, as in `stacks/prove.py`."""
    name = proving_queue("demo", instance_type)
    _make_queue(name, "EC2", instance_type, 4)
    variables = {"NXPIPE_STORE_URL": store, "PYTHONPATH": ":".join(sys.path)}
    boto3.client("batch").register_job_definition(
        jobDefinitionName=name,
        type="container",
        containerProperties={
            "image": image,
            "command": ["nxpipe", "prove", "--help"],
            "environment": [{"name": key, "value": value} for key, value in variables.items()],
            "resourceRequirements": [{"type": "VCPU", "value": "4"}, {"type": "MEMORY", "value": "15000"}],
            "logConfiguration": {"logDriver": "awslogs", "options": {"awslogs-group": "/nxpipe/demo/proofs"}},
        },
        retryStrategy=_RETRIES,
        timeout={"attemptDurationSeconds": seconds},
    )


def _make_queue(name: str, kind: Any, instance_type: str, vcpus: int) -> None:
    """A job queue with an environment of instances."""
    ec2, batch, iam = boto3.client("ec2"), boto3.client("batch"), boto3.client("iam")
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.create_security_group(GroupName=name, Description="jobs", VpcId=subnet["VpcId"])
    iam.create_instance_profile(InstanceProfileName=name)
    profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"]
    machines = batch.create_compute_environment(
        computeEnvironmentName=name,
        type="MANAGED",
        computeResources={
            "type": kind,
            "minvCpus": 0,
            "maxvCpus": vcpus,
            "instanceTypes": [instance_type],
            "instanceRole": profile,
            "subnets": [subnet["SubnetId"]],
            "securityGroupIds": [group["GroupId"]],
        },
    )["computeEnvironmentArn"]
    order: Any = [{"order": 1, "computeEnvironment": machines}]
    batch.create_job_queue(jobQueueName=name, priority=1, state="ENABLED", computeEnvironmentOrder=order)


def define_job(project: str = "demo", store: str = f"{STORE}/", memory: int = 512) -> str:
    """Register a revision of the job definition."""
    response = boto3.client("batch").register_job_definition(
        jobDefinitionName=f"{project}-build",
        type="container",
        containerProperties={
            "image": "nxpipe",
            "command": ["nxpipe", "build"],
            "environment": [{"name": "NXPIPE_STORE_URL", "value": store}, {"name": "PYTHONPATH", "value": str(ROOT)}],
            "resourceRequirements": [{"type": "VCPU", "value": "2"}, {"type": "MEMORY", "value": str(memory)}],
        },
        retryStrategy=_RETRIES,
    )
    arn: str = response["jobDefinitionArn"]
    return arn


@contextmanager
def the_image() -> Iterator[None]:
    IMAGES["nxpipe"] = [sys.executable, "-m", "tests.executors.farm_image"]
    try:
        yield
    finally:
        del IMAGES["nxpipe"]


def asked(model: str = "bert-base-uncased", weights: str | None = "random:0") -> ModelSpec:
    source = WeightsSource.parse(weights)
    return ModelSpec(model, None, None, "inf2.xlarge", 1, None, (1,), (128,), "matmult", "bf16", source)


def job(title: str, memory: int = 0, what: ModelSpec | None = None) -> Job:
    """A job; each title has a cache key of its own."""
    own, shape = asked(weights=f"random:{int(sha256_hex(title.encode())[:12], 16)}"), Shape("forward", 1, 128)
    return Job(
        key=BuildSpec.of(own).evidence_key(shape),
        title=title,
        spec=what or own,
        shape=shape,
        store="file:///elsewhere",
        kms_key=None,
        thresholds=Thresholds(0.999, 0.05),
        force=False,
        work=1.0,
        memory=memory,
    )


def followed(
    executor: BatchExecutor, count: int, react: Callable[[Event], None] = lambda event: None
) -> tuple[list[Event], dict[str, JobFinished]]:
    """All events until so many jobs have ended, and the results by key, exactly one each."""
    seen: list[Event] = []
    ends: dict[str, JobFinished] = {}
    deadline = time.monotonic() + _LONGEST
    while len(ends) < count:
        assert time.monotonic() < deadline, seen
        for event in executor.events(5.0):
            seen.append(event)
            react(event)
            if isinstance(event, JobFinished):
                assert event.key not in ends, event
                ends[event.key] = event
    return seen, ends


def kept(store: Store) -> set[str]:
    """The keys of the jobs whose step results exist."""
    return {path.removeprefix(PARTS) for path in store.backend.paths(PARTS)}


def until(so: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LONGEST
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def jobs() -> dict[str, MotoJob]:
    found: dict[str, MotoJob] = batch_backends[ACCOUNT][REGION]._jobs
    return found


def parents() -> list[dict[str, Any]]:
    """The submitted jobs, as described by Batch."""
    ids = [id_ for id_ in jobs() if ":" not in id_]
    return [dict(entry) for entry in boto3.client("batch").describe_jobs(jobs=ids)["jobs"]] if ids else []
