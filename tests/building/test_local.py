"""The process pool of this machine, with a program that takes no time to build."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nxpipe.pipeline.build.executors.local import LocalExecutor
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLimits, JobStarted
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from tests.building.plans import THRESHOLDS
from tests.executors.following import is_there, until_ended, wait_for
from tests.pipeline.saved_programs import write_onnx


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = str(write_onnx(tmp_path / "m.onnx"))
    model_spec = ModelSpec(path, None, None, "inf2.xlarge", 1, None, (1,), None, "none", "bf16", axes=(("batch", 2),))
    model_spec = replace(model_spec, verified=False)
    (shape,) = BuildSpec.of(model_spec).shapes
    key, store = BuildSpec.of(model_spec).program_key(shape), f"file://{tmp_path}/store"
    return Job(key, "m.onnx", model_spec, shape, store, THRESHOLDS, False, 1.0, 2**20)


@pytest.fixture
def pool() -> Iterator[LocalExecutor]:
    executor = LocalExecutor(2, JobLimits())
    yield executor
    executor.close()


def pid(events: list[Event]) -> int:
    """The pid of the worker of the first event."""
    begun = events[0]
    assert isinstance(begun, JobStarted)
    return int(begun.worker.removeprefix("process "))


def end(events: list[Event]) -> JobFinished:
    last = events[-1]
    assert isinstance(last, JobFinished)
    return last


def test_a_worker_serves_one_item_after_the_other_and_one_that_died_idle_costs_no_item(
    pool: LocalExecutor, job: Job
) -> None:
    pool.start(job)
    first = until_ended(pool)
    assert end(first).failure is None
    pool.start(job)
    again = until_ended(pool)
    assert pid(again) == pid(first)
    assert end(again).cached
    os.kill(pid(first), signal.SIGKILL)
    wait_for(lambda: os.waitid(os.P_PID, pid(first), os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    pool.start(job)
    last = until_ended(pool)
    assert end(last).failure is None
    assert pid(last) != pid(first)
    pool.close()
    assert not is_there(pid(last))


def test_an_item_larger_than_the_memory_waits_until_it_is_alone(pool: LocalExecutor, job: Job) -> None:
    huge = replace(job, memory=2**60)
    assert pool.takes(huge)
    pool.start(job)
    assert pool.takes(job)
    assert not pool.takes(huge)


def test_an_item_that_cannot_be_carried_out_is_a_fault_of_its_own_and_its_worker_lives_on(
    pool: LocalExecutor, job: Job
) -> None:
    lost = replace(job.spec, model_id="/nowhere/m.onnx")
    pool.start(replace(job, spec=lost, shape=Shape("program", 1, 1)))
    failed = until_ended(pool)
    failure = end(failed).failure
    assert failure is not None
    assert failure.kind == "ModelSourceError"
    pool.start(job)
    assert pid(until_ended(pool)) == pid(failed)
