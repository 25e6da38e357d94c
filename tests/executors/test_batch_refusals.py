"""Refusals of the build farm before a submission, resources of a job, and the input of a worker."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws

from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.build.executors.batch import (
    PROJECT_TAG,
    BatchExecutor,
    BuildFarm,
    JobSize,
    failure_from_job,
    find_farm,
)
from nxpipe.pipeline.build.executors.batch_worker import put_jobs, read_job
from nxpipe.pipeline.build.jobs import JobLimits
from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.cli.worker import worker
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import AwsError, BuildRefused
from nxpipe.stacks import names
from tests.executors.farm_world import MIB, REGION, STORE, asked, define_job, deploy_farm, job, jobs
from tests.localaws.install import install


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    install()
    with mock_aws():
        yield


@pytest.fixture
def farm(aws: None) -> BuildFarm:
    deploy_farm()
    return find_farm("demo", REGION)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "way_out"),
    [
        (asked("./my-model"), "a folder of this machine"),
        (asked("~/my-model"), "a folder of this machine"),
        (asked("program.onnx"), "a program in a file of this machine"),
        (asked("dir/program.pt2", None), "a program in a file of this machine"),
        (asked(weights="/data/bert"), "its weights are in /data/bert of this machine"),
    ],
)
def test_what_lies_on_this_machine_alone_is_refused_before_anything_is_submitted(
    farm: BuildFarm, what: ModelSpec, way_out: str
) -> None:
    runs = BatchExecutor(open_store(STORE), farm, JobLimits())
    with pytest.raises(BuildRefused, match=way_out):
        runs.start(job("far away", what=what))
    assert runs.events(0.0) == ()
    assert not jobs()


@pytest.mark.parametrize("weights", ["hub", None, "random:7"])
def test_what_the_hub_has_and_what_a_seed_makes_is_taken(farm: BuildFarm, weights: str | None) -> None:
    BatchExecutor(open_store(STORE), farm, JobLimits()).start(job("near", what=asked("owner/model", weights)))


def test_a_store_that_the_workers_do_not_publish_to_is_refused(farm: BuildFarm, local: Store) -> None:
    with pytest.raises(BuildRefused, match=f"a folder of this machine; pass --store {STORE}/"):
        BatchExecutor(local, farm, JobLimits())
    with pytest.raises(BuildRefused, match="publishes to s3://artifacts/models/, this build to s3://artifacts/other"):
        BatchExecutor(open_store("s3://artifacts/other"), farm, JobLimits())


def test_a_farm_that_is_not_deployed_is_told_with_the_command_that_does(aws: None) -> None:
    with pytest.raises(AwsError, match=r"no job queue demo-builds in us-east-2.*npx cdk deploy demo-build-farm"):
        find_farm("demo", REGION)
    deploy_farm()
    with pytest.raises(AwsError, match="in us-west-2"):
        find_farm("demo", "us-west-2")
    definition = boto3.client("batch").describe_job_definitions()["jobDefinitions"][0]["jobDefinitionArn"]
    boto3.client("batch").deregister_job_definition(jobDefinition=definition)
    with pytest.raises(AwsError, match="no job definition demo-build "):
        find_farm("demo", REGION)


def test_neither_region_nor_credentials_is_one_sentence(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(AwsError, match="no AWS region is set"):
        find_farm("demo", None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AwsError, match=r"no AWS credentials found, which it takes to find the build farm"):
        find_farm("demo", REGION)


def test_jobs_are_of_the_newest_revision(farm: BuildFarm) -> None:
    newest = define_job(store="s3://artifacts/new/", memory=1024)
    found = find_farm("demo", REGION)
    assert (found.definition, found.store, found.size) == (newest, "s3://artifacts/new/", JobSize(2, 1024))
    assert found.definition != farm.definition


@given(needed=st.integers(0, 2**42), room=st.builds(JobSize, st.integers(1, 64), st.integers(256, 200_000)))
def test_a_job_gets_what_its_item_needs_but_never_less_than_the_definition_says(needed: int, room: JobSize) -> None:
    found = BuildFarm(None, "demo", "", "", "", room).size_for(job("a", memory=needed), JobLimits())
    assert found.memory * MIB >= needed
    assert found.memory < max(room.memory * MIB + 1, 2 * needed) / MIB + 1
    assert found.vcpus >= room.vcpus
    assert found.memory <= found.vcpus * 8 * 1024 or found.memory == room.memory


@given(limit=st.integers(1, 2**42))
def test_a_limit_of_memory_is_the_containers_to_the_mebibyte(limit: int) -> None:
    farm = BuildFarm(None, "demo", "", "", "", JobSize(16, 60_000))
    assert 0 <= farm.size_for(job("a", memory=1), JobLimits(memory=limit)).memory * MIB - limit < MIB


def test_a_list_gives_each_place_its_item_and_no_two_lists_are_alike(local: Store) -> None:
    items = [job("make a"), replace(job("publish b"), shape=None)]
    first, second = put_jobs(local, items), put_jobs(local, items)
    assert first != second
    assert [read_job(local, first.sha256, place) for place in range(2)] == items


def test_a_fault_of_batch_says_what_is_known_and_nothing_else() -> None:
    lost: dict[str, Any] = {"jobId": "j:3", "status": "FAILED", "statusReason": "Host EC2 (instance i-1) terminated."}
    assert failure_from_job(lost).message == (
        "job j:3 of the build farm ended without an outcome: Host EC2 (instance i-1) terminated."
    )
    assert failure_from_job({"jobId": "j", "status": "SUCCEEDED"}).message.endswith(
        "outcome: AWS Batch gives no reason."
    )


def test_who_may_end_jobs_knows_them_by_the_tag_that_they_are_submitted_with() -> None:
    assert PROJECT_TAG == names.PROJECT_TAG


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--items", "0" * 64], {}, "NXPIPE_STORE_URL is not set"),
        (["--items", "latest"], {"NXPIPE_STORE_URL": "s3://artifacts"}, "64 hex digits"),
        (["--items", "0" * 64], {"NXPIPE_STORE_URL": "s3://a", "AWS_BATCH_JOB_ARRAY_INDEX": "-1"}, "a number"),
    ],
)
def test_a_worker_without_its_words_says_which(arguments: list[str], environment: dict[str, str], said: str) -> None:
    answer = CliRunner().invoke(worker, arguments, env=environment, obj=Console())
    assert answer.exit_code == 2
    assert said in answer.output


def test_a_worker_whose_list_is_gone_or_has_no_such_place_ends_in_the_stores_own_error(local: Store) -> None:
    blob = put_jobs(local, [job("make a")])
    for digest, place, error in (("0" * 64, "0", "NotFound"), (blob.sha256, "1", "InvalidDocument")):
        environment = {"NXPIPE_STORE_URL": local.url, "AWS_BATCH_JOB_ARRAY_INDEX": place}
        answer = CliRunner().invoke(cli, ["worker", "--items", digest], env=environment, obj=Console())
        assert type(answer.exception).__name__ == error
