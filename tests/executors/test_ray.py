import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxpipe.pipeline.build.executors.ray import RayExecutor, RayNode
from nxpipe.pipeline.build.jobs import FailureClass, JobFinished, JobLimits, JobLog, JobStarted
from tests.executors.following import ends, is_there, until, until_ended, wait_for
from tests.executors.ray_cluster import RayCluster
from tests.executors.ray_work import FAULT, job, work

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executor(ray_nodes: RayCluster) -> Iterator[RayExecutor]:
    executor = RayExecutor(ray_nodes.address, JobLimits(), None, work)
    yield executor
    executor.close()


def kill_worker(pids: Path) -> None:
    wait_for(lambda: pids.read_text().endswith("\n"))
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)


def test_every_item_ends_once_after_all_that_it_said_and_the_cluster_is_kept_busy(executor: RayExecutor) -> None:
    started = 0
    while executor.takes(job("k", "do")):
        executor.start(job(f"k{started}", "do"))
        started += 1
    assert started == 4  # two CPUs, and as many items that wait for one
    events = until_ended(executor, started)
    events += executor.events(0.5)
    for number in range(started):
        first, *said, end = [event for event in events if event.key == f"k{number}"]
        assert isinstance(first, JobStarted)
        assert "/" in first.worker
        assert said == [JobLog(f"k{number}", text) for text in ("1 thread", "line 0", "line 1", "line 2")]
        assert end == JobFinished(f"k{number}", 0.5, memory=7)
    assert executor.takes(job("k", "do"))


def test_nothing_happens_where_nothing_was_started(executor: RayExecutor) -> None:
    assert executor.events(0.1) == []


def test_a_failure_of_the_work_arrives_whole(executor: RayExecutor) -> None:
    executor.start(job("k", "fail"))
    assert ends(until_ended(executor)) == [JobFinished("k", 1.5, memory=7, failure=FAULT)]


def test_a_worker_that_is_killed_is_a_fault_that_may_pass(
    executor: RayExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    executor.start(job("k", "die"))
    begun, *_, end = until_ended(executor)
    assert isinstance(end, JobFinished)
    assert end.failure
    assert isinstance(begun, JobStarted)
    assert end.failure.failure_class == FailureClass.RETRYABLE
    assert begun.worker in end.failure.message
    executor.start(job("k", "do"))
    assert ends(until_ended(executor))[0].failure is None
    assert capfd.readouterr() == ("", "")  # Ray has told us already


def test_an_error_around_the_work_would_meet_every_item(executor: RayExecutor) -> None:
    executor.start(job("k", "break"))
    failure = ends(until_ended(executor))[0].failure
    assert failure
    assert (failure.failure_class, failure.kind) == ("here", "ZeroDivisionError")
    assert "around the work" in failure.message


def test_an_item_larger_than_any_node_is_begun_all_the_same(executor: RayExecutor) -> None:
    executor.start(job("k", "do", memory=2**60))
    assert ends(until_ended(executor))[0].failure is None


def test_a_mailbox_that_is_killed_costs_talk_and_no_item(executor: RayExecutor, tmp_path: Path) -> None:
    executor.start(job("k", f"hang {tmp_path / 'pids'}"))
    wait_for((tmp_path / "pids").exists)
    import ray

    ray.kill(executor._mailbox, no_restart=False)
    executor.start(job("l", "do"))
    assert ends(until_ended(executor)) == [JobFinished("l", 0.5, memory=7)]
    kill_worker(tmp_path / "pids")
    assert [end.key for end in ends(until_ended(executor))] == ["k"]


def test_an_item_over_its_limits_is_ended_with_all_that_it_started(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_limits", JobLimits(memory=2**29))
    executor.start(job("large", f"grow {2**30}"))
    (large,) = ends(until_ended(executor))
    monkeypatch.setattr(executor, "_limits", JobLimits(seconds=1))  # to connect takes longer
    executor.start(job("long", f"hang {tmp_path / 'pids'}"))
    wait_for((tmp_path / "pids").exists)
    (long,) = ends(until_ended(executor))
    assert large.failure
    assert long.failure
    assert (large.failure.failure_class, large.failure.kind) == ("limit", "OutOfMemory")
    assert (long.failure.failure_class, long.failure.kind) == ("limit", "OutOfTime")
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_for(lambda pid=pid: not is_there(pid))  # type: ignore[misc]


def test_a_node_that_is_killed_is_a_fault_that_may_pass(
    executor: RayExecutor, ray_nodes: RayCluster, tmp_path: Path
) -> None:
    for key in "ab":
        executor.start(job(key, f"hang {tmp_path / key}"))
    for key in "ab":
        wait_for((tmp_path / key).exists)
    ray_nodes.kill_node()
    (end,) = ends(until_ended(executor))
    assert end.failure
    assert end.failure.failure_class == FailureClass.RETRYABLE
    executor.start(job("c", "do"))  # waits, for the other node is taken
    ray_nodes.add_node()
    assert ends(until_ended(executor)) == [JobFinished("c", 0.5, memory=7)]
    (other,) = {"a", "b"} - {end.key}
    kill_worker(tmp_path / other)
    assert [end.key for end in ends(until_ended(executor))] == [other]


def test_where_there_is_no_node_the_items_wait_and_it_is_said_once(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = [tmp_path / key for key in "ab"]
    for path in pids:
        executor.start(job(path.name, f"hang {path}"))
    for path in pids:
        wait_for(path.exists)
    executor.start(job("c", "do"))
    monkeypatch.setattr(executor._cluster, "nodes", list)
    events = until(executor, lambda events: any(event.key == "c" for event in events))
    for _ in range(3):
        events += executor.events(0.2)
    (said,) = [event for event in events if event.key == "c"]
    assert isinstance(said, JobLog)
    assert "waits for a node" in said.text
    assert not executor.takes(job("d", "do"))
    monkeypatch.undo()
    for path in pids:
        kill_worker(path)
    assert sorted(end.key for end in ends(until_ended(executor, 3))) == ["a", "b", "c"]


def test_an_item_that_no_node_is_large_enough_for_any_more_is_asked_for_again(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_nodes", [RayNode(1, 2**50)])
    executor.start(job("k", "do", memory=2**50))  # as a node would have had, that is gone
    events = until_ended(executor)
    events += executor.events(0.5)
    assert ends(events) == [JobFinished("k", 0.5, memory=7)]
