"""Jobs on a build farm: processes on the local AWS, run by the real `nxpipe worker`."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto.batch.models import batch_backends

from nxpipe.artifact_store.builds import record_outcome
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.build.executors.batch import LARGEST_ARRAY, PROJECT_TAG, BatchExecutor, PollIntervals, find_farm
from nxpipe.pipeline.build.jobs import Event, FailureClass, JobFinished, JobLimits, JobLog, JobStarted, to_document
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.exit_codes import COMPILE
from tests.executors.farm_world import MIB, STORE, deploy_farm, followed, job, jobs, kept, parents, the_image, until
from tests.localaws.moto_patches.batch_jobs import JOB_HOST, lose_machine
from tests.localaws.server import local_aws

pytestmark = pytest.mark.sample(12)

QUICK = PollIntervals(poll=0.05, waiting=0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with local_aws() as environment, the_image():
        yield environment


@pytest.fixture
def store(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in an account with a farm only."""
    from moto.moto_api._internal.models import moto_api_backend

    moto_api_backend.reset()
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    place: Any = {"LocationConstraint": server["AWS_REGION"]}
    boto3.client("s3").create_bucket(Bucket="artifacts", CreateBucketConfiguration=place)
    deploy_farm()
    return open_store(STORE)


def executor(store: Store, limits: JobLimits = JobLimits(), pace: PollIntervals = QUICK) -> BatchExecutor:  # noqa: B008
    return BatchExecutor(store, find_farm("demo", None), limits, pace)


def process_of(job: str) -> Any:
    return vars(jobs()[job])["own"]["process"]


def when_begun(key: str, act: Callable[[str], None], store: Store) -> Callable[[Event], None]:
    """Act after the worker of a job has committed its step result."""

    def react(event: Event) -> None:
        if isinstance(event, JobStarted) and event.key == key:
            until(lambda: key in kept(store))
            act(event.worker)

    return react


def test_every_item_of_an_array_ends_once_by_the_outcome_that_its_worker_left(store: Store) -> None:
    items = [job("make a"), job("refuse b"), job("make c")]
    runs = executor(store)
    for item in items:
        assert runs.takes(item)
        runs.start(item)
    assert not jobs()  # nothing is submitted before events are asked for
    seen, ends = followed(runs, 3)
    a, b, c = (ends[item.key] for item in items)
    assert (a, c.failure) == (JobFinished(items[0].key, 0.5, memory=1), None)
    assert b.failure is not None
    assert (b.failure.failure_class, b.failure.kind, b.failure.code) == ("deterministic", "Unlowered", COMPILE.number)
    assert b.failure.log.endswith("x" * 1000)
    assert kept(store) == {items[0].key, items[2].key}
    (parent,) = parents()
    assert parent["arrayProperties"]["size"] == 3
    until(lambda: parents()[0]["status"] == "FAILED")
    failed = jobs()[f"{parent['jobId']}:1"]
    assert failed.exit_code == COMPILE.number
    assert vars(failed)["own"]["attempts"] == 1  # a failure of its own is not for Batch to repeat
    begun = [event.worker for event in seen if isinstance(event, JobStarted)]
    assert sorted(begun) == [f"{parent['jobId']}:{place}" for place in range(3)]
    logs = boto3.client("logs")
    stream = jobs()[f"{parent['jobId']}:0"].log_stream_name
    events = logs.get_log_events(logGroupName="/aws/batch/job", logStreamName=str(stream))["events"]
    assert any(line["message"] == "step of make a" for line in events)
    assert not runs.events(0.0)


def test_an_image_of_another_version_ends_the_build_before_it_answers_another_question(store: Store) -> None:
    runs, one = executor(store), job("make a")
    runs.start(replace(one, key=job("make b").key))
    _, ends = followed(runs, 1)
    ((_, end),) = ends.items()
    assert end.failure is not None
    assert (end.failure.failure_class, end.failure.kind) == ("here", "MissingSoftware")
    assert not kept(store)


def test_one_item_is_a_plain_job_and_tagged_for_whoever_may_end_it(store: Store) -> None:
    runs = executor(store, JobLimits(seconds=10))
    runs.start(job("make alone"))
    _, ends = followed(runs, 1)
    assert [end.failure for end in ends.values()] == [None]
    (parent,) = parents()
    assert "arrayProperties" not in parent
    assert parent["tags"] == {PROJECT_TAG: "demo"}
    assert parent["timeout"] == {"attemptDurationSeconds": 60}  # Batch knows no less


def test_batch_repeats_a_child_whose_machine_was_taken_away(store: Store) -> None:
    one = job("hang on")
    runs = executor(store)
    runs.start(one)
    seen, ends = followed(runs, 1, when_begun(one.key, lambda job: lose_machine(jobs()[job]), store))
    assert ends[one.key] == JobFinished(one.key, 0.5, cached=True, memory=1)
    assert [event.key for event in seen if isinstance(event, JobStarted)] == [one.key]
    assert vars(jobs()[parents()[0]["jobId"]])["own"]["attempts"] == 2


def test_a_worker_that_was_killed_is_a_fault_of_its_surroundings_and_the_next_attempt_another_run(store: Store) -> None:
    one = job("hang on")
    runs = executor(store)
    runs.start(one)
    _, ends = followed(runs, 1, when_begun(one.key, lambda job: os.kill(process_of(job).pid, signal.SIGKILL), store))
    failure = ends[one.key].failure
    assert failure is not None
    assert failure.failure_class == FailureClass.RETRYABLE
    (parent,) = parents()
    assert failure.message == (
        f"job {parent['jobId']} of the build farm ended without an outcome and with exit code 137: Essential container "
        f"in task exited; read its log stream {parent['container']['logStreamName']}."
    )
    runs.start(one)
    _, ends = followed(runs, 1)
    assert ends[one.key] == JobFinished(one.key, 0.5, cached=True, memory=1)
    commands = [jobs()[entry["jobId"]].container_overrides["command"] for entry in parents()]
    assert len({tuple(command) for command in commands}) == 2  # or the first outcome would answer for the second


def test_what_takes_more_memory_or_time_than_it_may_has_hit_a_limit(store: Store) -> None:
    grows, hangs = job("grow"), job("hang on")
    JOB_HOST.open(capacity=0)
    runs = executor(store, JobLimits(seconds=60, memory=256 * MIB))
    for entry in (grows, hangs):
        runs.start(entry)
    runs.events(0.0)
    jobs()[f"{parents()[0]['jobId']}:1"].timeout = {"attemptDurationSeconds": 2}
    JOB_HOST.open(capacity=4)
    _, ends = followed(runs, 2)
    failures = {key: end.failure for key, end in ends.items()}
    assert [(failure.failure_class, failure.kind) for entry in (grows, hangs) if (failure := failures[entry.key])] == [
        ("limit", "OutOfMemory"),
        ("limit", "OutOfTime"),
    ]
    assert all(
        {"type": "MEMORY", "value": "256"} in job.container_overrides["resourceRequirements"] for job in jobs().values()
    )


def test_closing_ends_what_runs_and_what_waits_and_keeps_what_is_committed(store: Store) -> None:
    items = [job(f"hang {name}") for name in "abc"]
    JOB_HOST.open(capacity=1)
    runs = executor(store)
    for item in items:
        runs.start(item)
    begun: list[str] = []
    while not begun:
        begun = [event.worker for event in runs.events(5.0) if isinstance(event, JobStarted)]
    until(lambda: kept(store))
    runs.close()
    assert process_of(begun[0]).wait(30) != 0
    until(lambda: parents()[0]["status"] == "FAILED")
    assert sum("own" in vars(job) and "process" in vars(job)["own"] for job in jobs().values()) == 1
    assert kept(store) == {items[0].key}
    assert runs.events(0.0) == ()


def test_a_driver_that_dies_leaves_its_array_at_work_for_the_next_one(store: Store) -> None:
    items = [job("make a"), job("make b")]
    first = executor(store)
    for item in items:
        first.start(item)
    first.events(0.0)
    del first
    until(lambda: kept(store) == {item.key for item in items})
    next_one = executor(store)
    next_one.start(items[0])
    _, ends = followed(next_one, 1)
    assert ends[items[0].key].cached


def test_no_machine_is_no_failure_and_is_said_once_with_the_reason(store: Store) -> None:
    JOB_HOST.open(capacity=0)
    JOB_HOST.status_reason = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - no spot instances"
    runs = executor(store)
    for name in "ab":
        runs.start(job(f"make {name}"))
    events = list(runs.events(30.0))
    assert [event.text for event in events if isinstance(event, JobLog)] == [
        f"job {parents()[0]['jobId']} waits for a machine: {JOB_HOST.status_reason}"
    ]
    assert runs.events(0.5) == ()
    JOB_HOST.open(capacity=2)
    _, ends = followed(runs, 2)
    assert all(end.failure is None for end in ends.values())


def test_ten_thousand_children_cost_a_handful_of_requests_a_look(store: Store) -> None:
    JOB_HOST.open(capacity=0)
    farm = find_farm("demo", None)
    result: list[str] = []
    farm.batch.meta.events.register("before-call.batch", lambda model, **_: result.append(model.name))
    runs = BatchExecutor(store, farm, JobLimits(), replace(QUICK, waiting=600))
    items = [job(f"make {number}") for number in range(LARGEST_ARRAY)]
    for item in items:
        assert runs.takes(item)
        runs.start(item)
    assert not runs.takes(job("one more"))
    assert runs.events(0.0) == ()
    assert result == ["SubmitJob", "DescribeJobs"]
    (array,) = (job for job in jobs().values() if job._child_jobs)
    children, digest = array._child_jobs or [], array.container_overrides["command"][-1]
    for place in (3, 9_998):
        record_outcome(store, digest, place, to_document(JobFinished(items[place].key, 1.0)))
        children[place]._mark_stopped(success=True)
    for child in children[5000:5020]:
        child.status = "RUNNING"
    children[7]._mark_stopped(success=False)
    result.clear()
    found = runs.events(0.5)
    assert {event.key for event in found if isinstance(event, JobStarted)} >= {item.key for item in items[5000:5020]}
    ends = {
        event.key: event.failure and event.failure.failure_class for event in found if isinstance(event, JobFinished)
    }
    assert ends == {items[3].key: None, items[9_998].key: None, items[7].key: "environmental"}
    assert result == ["DescribeJobs", "ListJobs", "ListJobs", "DescribeJobs"]  # all; that run; that failed; why
    result.clear()
    assert runs.events(0.0) == ()
    assert set(result) <= {"DescribeJobs"}
    runs.close()


def test_a_network_that_is_gone_for_a_while_is_waited_for_and_a_refusal_is_not(store: Store) -> None:
    farm = find_farm("demo", None)
    failures: list[Exception] = [
        EndpointConnectionError(endpoint_url="batch"),
        EndpointConnectionError(endpoint_url="b"),
    ]

    def break_off(**_: object) -> None:
        if failures:
            raise failures.pop()

    farm.batch.meta.events.register("before-call.batch.DescribeJobs", break_off)
    runs = BatchExecutor(store, farm, JobLimits(), QUICK)
    runs.start(job("make a"))
    seen, ends = followed(runs, 1)
    assert [end.failure for end in ends.values()] == [None]
    assert len([event for event in seen if isinstance(event, JobLog) and "polling again" in event.text]) == 1
    assert len(parents()) == 1  # what was submitted is not submitted again
    runs.start(job("make b"))
    answer: Any = {"Error": {"Code": "ExpiredTokenException"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    failures.append(ClientError(answer, "DescribeJobs"))
    with pytest.raises(AwsError, match="ExpiredToken"):
        runs.events(5.0)
    runs.close()
    impatient = BatchExecutor(store, farm, JobLimits(), replace(QUICK, silence=-1.0))
    impatient.start(job("make c"))
    failures.append(EndpointConnectionError(endpoint_url="batch"))
    with pytest.raises(AwsError, match="Could not connect"):
        impatient.events(5.0)


def test_an_array_that_fails_before_it_has_children_ends_all_of_its_items(store: Store) -> None:
    JOB_HOST.open(capacity=0)
    runs = executor(store)
    for name in "ab":
        runs.start(job(f"make {name}"))
    runs.events(0.0)
    (array,) = (job for job in jobs().values() if job._child_jobs)
    array._child_jobs, array.job_stopped_reason = None, "Access to the queue was lost"
    array._mark_stopped(success=False)
    _, ends = followed(runs, 2)
    assert all(end.failure and "Access to the queue was lost" in end.failure.message for end in ends.values())


def test_what_cannot_be_started_is_told_by_what_batch_says_of_it(store: Store) -> None:
    for definition in batch_backends["123456789012"]["us-east-2"]._job_definitions.values():
        definition.container_properties["image"] = "absent"
    runs = executor(store)
    runs.start(job("make a"))
    _, ends = followed(runs, 1)
    ((_, end),) = ends.items()
    assert end.failure is not None
    assert end.failure.failure_class == FailureClass.RETRYABLE
    assert "CannotPullContainerError" in end.failure.message
