"""Permissions for submitting jobs to the build farm, and their limits."""

import boto3
from aws_cdk import Stack

from nxpipe.pipeline.build.executors.batch import JobSize, find_farm
from nxpipe.pipeline.config.cloud import Farm, Release
from nxpipe.stacks.names import PROJECT_TAG
from tests.localaws.census import census
from tests.stacks.local import ACCOUNT, REGION, deploy, destroy, outputs
from tests.stacks.permissions import allowed, statements_of
from tests.stacks.test_farm_stack import ASKED_FOR, Made, make

JOBS = f"arn:aws:batch:{REGION}:{ACCOUNT}:job"
OURS = {f"aws:ResourceTag/{PROJECT_TAG}": "demo"}


def of_a_release(farm: Farm = ASKED_FOR) -> tuple[Made, Stack]:
    made = make(farm, release=Release(repository="example/models"))
    assert made.release is not None
    return made, made.release


def role_of(release: Stack) -> str:
    return outputs(release)["RoleArn"].rpartition("/")[2]


def test_a_release_submits_this_job_to_this_queue_and_ends_what_the_project_has_submitted(aws: None) -> None:
    made, release = of_a_release()
    deploy(made.network, made.store, release, made.farm)
    assert census(REGION) == []
    may, told = statements_of(role_of(release)), outputs(made.farm)
    queue, job = told["QueueArn"], told["JobDefinitionArn"]
    tagged = {f"aws:RequestTag/{PROJECT_TAG}": "demo"}
    for resource in (queue, job):
        assert allowed(may, "batch:SubmitJob", resource)
        assert allowed(may, "batch:TagResource", resource, tagged)
        assert not allowed(may, "batch:TagResource", resource, {f"aws:RequestTag/{PROJECT_TAG}": "another"})
    for other in (f"{queue}-2", f"{job}0", f"{job.rpartition(':')[0]}:9", job.replace("demo", "other")):
        assert not allowed(may, "batch:SubmitJob", other), other
    assert allowed(may, "batch:TerminateJob", f"{JOBS}/1-2-3", OURS)
    assert not allowed(may, "batch:TerminateJob", f"{JOBS}/1-2-3")
    assert not allowed(may, "batch:TerminateJob", f"{JOBS}/1-2-3", {f"aws:ResourceTag/{PROJECT_TAG}": "another"})
    assert not allowed(may, "batch:TagResource", f"{JOBS}/1-2-3", tagged)  # or somebody else's could be made ours
    for action in ("RegisterJobDefinition", "UpdateJobQueue", "CancelJob", "UpdateComputeEnvironment"):
        assert not allowed(may, f"batch:{action}", queue, OURS), action


def test_another_image_is_allowed_by_the_deployment_that_brings_it(aws: None) -> None:
    made, release = of_a_release()
    deploy(made.network, made.store, release, made.farm)
    before = outputs(made.farm)["JobDefinitionArn"]
    other = ASKED_FOR.model_copy(update={"image": ASKED_FOR.image.replace("0" * 64, "1" * 64)})
    changed, _ = of_a_release(other)
    deploy(changed.farm)
    may, now = statements_of(role_of(release)), outputs(changed.farm)["JobDefinitionArn"]
    assert now != before
    assert allowed(may, "batch:SubmitJob", now)
    assert not allowed(may, "batch:SubmitJob", before)
    destroy(changed.farm)
    assert not any("batch:SubmitJob" in entry["Action"] for entry in statements_of(role_of(release)))


def test_the_executor_finds_the_farm_as_its_stack_makes_it(aws: None) -> None:
    made = make()
    deploy(made.network, made.store, made.farm)
    told, found = outputs(made.farm), find_farm("demo", REGION)
    assert (found.queue, found.definition) == (told["QueueArn"], told["JobDefinitionArn"])
    assert found.store == f"s3://{outputs(made.store)['BucketName']}/models/"
    assert found.size == JobSize(16, 60_000)
    (policy,) = [
        entry["Arn"]
        for entry in boto3.client("iam").list_policies(Scope="Local")["Policies"]
        if "Submitting" in entry["Arn"]
    ]
    assert told["SubmittingPolicyArn"] == policy


def test_a_worker_reads_its_list_and_leaves_its_outcome(aws: None) -> None:
    made = make()
    deploy(made.network, made.store, made.farm)
    (job,) = boto3.client("batch").describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    may = statements_of(job["containerProperties"]["jobRoleArn"].rpartition("/")[2])
    objects = f"arn:aws:s3:::{outputs(made.store)['BucketName']}/models"
    assert allowed(may, "s3:GetObject", f"{objects}/cas/sha256/0")
    assert allowed(may, "s3:PutObject", f"{objects}/runs/0/0000000000")  # a second time, if its machine went away
    assert not any("batch:SubmitJob" in entry["Action"] for entry in may)
