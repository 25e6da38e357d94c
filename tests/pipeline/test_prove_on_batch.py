"""`nxpipe prove --on batch` on the local AWS: jobs are processes that run the real command on a stand-in device."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from moto.batch.models import Job as MotoJob
from moto.batch.models import batch_backends

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Evidence
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.cloud import Prove
from nxpipe.pipeline.fleet import batch_prove
from nxpipe.pipeline.fleet.batch_prove import smallest_instance
from nxpipe.pipeline.util.errors import BuildRefused
from nxpipe.pipeline.util.exit_codes import (
    AWS,
    COMPILE,
    CONFIGURATION,
    INTERRUPTED,
    NOT_READY,
    OK,
    REFUSED,
    VERIFICATION,
)
from tests.executors.farm_world import ACCOUNT, REGION, deploy_prover
from tests.localaws.moto_patches.batch_jobs import IMAGES, JOB_HOST, lose_machine
from tests.localaws.server import local_aws
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

STORE: Final = "s3://artifacts/models/"
IMAGE: Final = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/prove@sha256:{'0' * 64}"
CONFIG: Final = f"""
[project]
name = "demo"
region = "{REGION}"
[store]
url = "{STORE}"
[prove]
image = "{IMAGE}"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with local_aws() as environment:
        IMAGES[IMAGE] = [str(NXPIPE)]
        try:
            yield environment
        finally:
            del IMAGES[IMAGE]


class Account:
    """An account with a store in S3, and the queue of [prove] for an instance type."""

    def __init__(self, folder: Path, server: dict[str, str], artifact: Path) -> None:
        self.folder = folder
        place: Any = {"LocationConstraint": server["AWS_REGION"]}
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="artifacts", CreateBucketConfiguration=place)
        for path in filter(Path.is_file, (artifact / "store").rglob("*")):
            s3.put_object(
                Bucket="artifacts", Key=f"models/{path.relative_to(artifact / 'store')}", Body=path.read_bytes()
            )
        self.store: Store = open_store(STORE)
        self.published: Published = self.store.resolve((artifact / "name").read_text())

    def deploy(self, seconds: int = 3600) -> None:
        deploy_prover("inf2.xlarge", IMAGE, STORE, seconds)

    @property
    def jobs(self) -> dict[str, MotoJob]:
        found: dict[str, MotoJob] = batch_backends[ACCOUNT][REGION]._jobs
        return found

    @property
    def proofs(self) -> list[Evidence]:
        return [each for each in self.store.evidence(self.published.manifest_digest) if each.kind == DEVICE]

    def attests(self, change: Callable[[Evidence], Evidence]) -> list[str]:
        """The program of a job that stores a changed copy of the evidence, and names it as its own."""
        (proof,) = self.proofs
        changed, path = change(proof), self.folder / "changed.json"
        path.write_bytes(changed.to_bytes())
        return [sys.executable, "-c", _STORES, STORE, str(path)]


_STORES: Final = """
import sys
from pathlib import Path
from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.evidence import Evidence
evidence = Evidence.from_bytes(Path(sys.argv[2]).read_bytes())
open_store(sys.argv[1]).attest(evidence)
print("{", f'  "evidence": "{evidence.digest}"', "}", sep=chr(10))
"""


@pytest.fixture
def account(
    server: dict[str, str],
    artifacts: Callable[[str, int], Path],
    device: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Account:
    from moto.moto_api._internal.models import moto_api_backend

    moto_api_backend.reset()
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("nxpipe.toml").write_text(CONFIG)
    monkeypatch.setattr(batch_prove, "Pace", partial(batch_prove.Pace, poll=0.1, log=5.0))
    device()
    return Account(tmp_path, server, artifacts("encoder", 1))


def prove(nxpipe: InProcess, account: Account, *more: str) -> Answer:
    return nxpipe("prove", account.published.name, "--on", "batch", "--runs", "20", *more)


@pytest.mark.sample(16, "prove on batch")
def test_a_job_proves_an_artifact_and_the_submitter_signs_the_evidence(nxpipe: InProcess, account: Account) -> None:
    account.deploy()
    assert nxpipe("store", "keygen", "release.key").code == OK.number
    answer = prove(nxpipe, account, "--key", "file:release.key")
    assert answer.code == OK.number, answer.err
    assert "A job on inf2.xlarge costs at most 3 attempts x 1 h x $" in answer.err
    assert answer.err.index("costs at most") < answer.err.index(": succeeded")
    assert "forward-b1-s" in answer.out
    assert ", signed by key" in answer.out
    (proof,) = account.proofs
    assert proof.digest[:12] in answer.out
    assert {compared.timing.runs for compared in proof.programs if compared.timing} == {20}
    (job,) = account.jobs.values()
    assert (job.status, job.exit_code) == ("SUCCEEDED", 0)
    assert "release.key" not in str(job.container_overrides)


@pytest.mark.sample(16, "prove on batch")
@pytest.mark.parametrize(
    ("settings", "code", "sentence"),
    [
        ({"defect": "wrong"}, VERIFICATION, "of the device: cosine"),
        ({"defect": "hardware"}, NOT_READY, "HBM has an uncorrectable error"),
        ({"family": "trn1"}, NOT_READY, "is for inf2, and this machine has trn1"),
    ],
)
def test_a_failure_of_the_job_is_one_of_the_command(
    settings: dict[str, object],
    code: Any,
    sentence: str,
    nxpipe: InProcess,
    account: Account,
    device: Callable[..., None],
) -> None:
    account.deploy()
    device(**settings)
    answer = prove(nxpipe, account)
    assert answer.code == code.number, answer.err
    assert sentence in answer.err.splitlines()[-1]
    assert sum(sentence in line for line in answer.err.splitlines()) == 1  # not once more as a line of the log
    assert account.proofs == []


@pytest.mark.sample(16, "prove on batch")
def test_a_document_that_the_submitter_cannot_vouch_for_is_refused(
    nxpipe: InProcess, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.deploy()
    good = prove(nxpipe, account)
    assert good.code == OK.number, good.err
    (golden,) = [each for each in account.store.evidence(account.published.manifest_digest) if each.kind == EMULATED]

    def with_program(proof: Evidence, **fields: object) -> Evidence:
        return proof.model_copy(update={"programs": tuple(each.model_copy(update=fields) for each in proof.programs)})

    def far(proof: Evidence) -> Evidence:
        figures = tuple(each.model_copy(update={"cosine": 0.5}) for each in proof.programs[0].outputs)
        return with_program(proof, outputs=figures)

    def older(proof: Evidence) -> Evidence:
        return proof

    def lax(proof: Evidence) -> Evidence:
        return proof.model_copy(update={"limits": proof.limits.model_copy(update={"min_cosine": 0.1})})

    other_inputs = partial(with_program, inputs=golden.programs[0].answers)
    refusals: dict[str, Callable[[Evidence], Evidence]] = {
        "cosine 0.5": far,
        "it is older than the job": older,
        "its limits are not those of [verify]": lax,
        "are not those of emulated evidence": other_inputs,
    }
    (first,) = account.proofs
    for sentence, change in refusals.items():
        monkeypatch.setitem(IMAGES, IMAGE, account.attests(change))
        refused = prove(nxpipe, account)
        assert (refused.code, sentence in refused.err) == (REFUSED.number, True), refused.err
        for proof in account.proofs:
            if proof != first:
                boto3.client("s3").delete_object(Bucket="artifacts", Key=f"models/{proof.path}")
    silent = [sys.executable, "-c", "print('nothing to see')"]
    monkeypatch.setitem(IMAGES, IMAGE, silent)
    refused = prove(nxpipe, account)
    assert (refused.code, "the job's log names no evidence" in refused.err) == (REFUSED.number, True), refused.err


@pytest.mark.sample(16, "prove on batch")
def test_a_job_without_an_instance_or_beyond_its_time_ends_and_costs_nothing_more(
    nxpipe: InProcess, account: Account, device: Callable[..., None]
) -> None:
    account.deploy(seconds=2)
    JOB_HOST.open(0)
    JOB_HOST.status_reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
    answer = prove(nxpipe, account, "--start-limit", "1")
    assert answer.code == NOT_READY.number, answer.err
    assert "no inf2.xlarge was available within 1 s (MISCONFIGURATION" in answer.err
    assert {job.status for job in account.jobs.values()} == {"FAILED"}
    device(defect="hang")
    JOB_HOST.open(4)
    late = prove(nxpipe, account)
    assert late.code == NOT_READY.number, late.err
    assert "ran for 2 s, its limit; allow more in `time_limit` of [prove]" in late.err
    assert account.proofs == []


@pytest.mark.sample(16, "prove on batch")
def test_a_job_whose_spot_instance_is_lost_starts_anew(nxpipe: InProcess, account: Account) -> None:
    account.deploy()
    command = _started(account)
    (job,) = _until(lambda: [each for each in account.jobs.values() if each.status == "RUNNING"])
    lose_machine(job)
    _, err = command.communicate(timeout=120)
    assert command.returncode == OK.number, err
    assert vars(job)["own"]["attempts"] == 2
    assert len(account.proofs) == 1


@pytest.mark.sample(16, "prove on batch")
def test_ctrl_c_ends_the_job(account: Account, device: Callable[..., None]) -> None:
    account.deploy()
    device(defect="hang")
    command = _started(account)
    (job,) = _until(lambda: [each for each in account.jobs.values() if each.status == "RUNNING"])
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=60)
    assert command.returncode == INTERRUPTED.number
    _until(lambda: job.status == "FAILED")
    assert account.proofs == []


def _started(account: Account) -> "subprocess.Popen[str]":
    words = [str(NXPIPE), "prove", account.published.name, "--on", "batch", "--runs", "20"]
    return subprocess.Popen(words, env={**os.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


@pytest.mark.sample(16, "prove on batch")
def test_what_cannot_be_submitted_is_refused_before_a_job(nxpipe: InProcess, account: Account) -> None:
    absent = prove(nxpipe, account)
    assert absent.code == AWS.number, absent.err
    assert "has no enabled job queue demo-prove-inf2-xlarge" in absent.err
    assert "npx cdk deploy demo-prove" in absent.err
    account.deploy()
    path, text = Path("nxpipe.toml"), CONFIG
    path.write_text(text.replace('image = "', 'instance_types = ["trn1.2xlarge"]\nimage = "'))
    other = prove(nxpipe, account)
    assert (other.code, "no type in `instance_types` of [prove] has them (trn1.2xlarge)" in other.err) == (
        COMPILE.number,
        True,
    )
    path.write_text(text.partition("[prove]")[0])
    none = prove(nxpipe, account)
    assert (none.code, "nxpipe.toml has no [prove]" in none.err) == (COMPILE.number, True)
    path.write_text(f'{text}instance_types = ["m7i.large"]\n')
    assert prove(nxpipe, account).code == CONFIGURATION.number
    path.write_text(text)
    elsewhere = prove(nxpipe, account, "--store", "s3://artifacts/other")
    assert elsewhere.code != OK.number
    channel = prove(nxpipe, account, "--channel", "production")
    assert "--channel cannot be combined with --on batch" in channel.err
    assert account.jobs == {}


@pytest.mark.sample(16, "prove on batch")
def test_the_smallest_type_that_has_the_cores_and_the_memory_is_chosen(
    artifacts: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifacts("encoder", 2)
    store = open_store(str(folder / "store"))
    published = store.resolve((folder / "name").read_text())
    every = ("inf2.48xlarge", "inf2.8xlarge", "trn1.2xlarge", "inf2.24xlarge")
    assert smallest_instance(published, store, Prove(image=IMAGE, instance_types=every)).name == "inf2.8xlarge"
    need = INSTANCES["inf2.8xlarge"].device_memory_gib * 1024**3
    monkeypatch.setattr(batch_prove, "_bytes_of_a_rank", lambda *_: need)
    with pytest.raises(BuildRefused, match="no type in `instance_types`"):
        smallest_instance(published, store, Prove(image=IMAGE, instance_types=every))
