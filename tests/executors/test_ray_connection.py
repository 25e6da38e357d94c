"""Connections to Ray clusters, and cleanup after a lost connection."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nxpipe.pipeline.build.executors.ray import RayExecutor, unavailable
from nxpipe.pipeline.build.jobs import FailureClass, JobLimits
from nxpipe.pipeline.util.errors import ExecutorUnavailable, MissingSoftware
from tests.conftest import ROOT
from tests.executors.following import ends, is_there, until_ended, wait_for
from tests.executors.ray_cluster import RayCluster, free_port
from tests.executors.ray_work import job, work

# A process speaks to one Ray in its life, and that of the tests to the cluster of two nodes.
_DRIVER = """
import signal, sys
from nxpipe.pipeline.util.errors import ExecutorUnavailable
from nxpipe.pipeline.build.jobs import JobLimits
from nxpipe.pipeline.build.executors.ray import RayExecutor
from tests.executors.following import until_ended
from tests.executors.ray_work import job, work
from tests.executors.test_ray_connection import told_pids
address, pids, then = sys.argv[1:]
executor = RayExecutor(address or None, JobLimits(), 1, work)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
if not then:
    executor.start(job("a", "die"))
    until_ended(executor)
executor.start(job("b", "hang " + pids))
assert not executor.takes(job("c", "hang"))
told_pids(pids)
if then == "kill the head":
    from ray.thirdparty_files import psutil
    (head,) = [process for process in psutil.Process().children() if process.name() == "gcs_server"]
    head.kill()
if then != "close":
    try:
        until_ended(executor)
    except ExecutorUnavailable as error:
        print(error)
executor.close()
if not address:
    assert not executor._cluster._folder.exists()
"""


@contextmanager
def a_driver(address: str, pids: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with an executor; at the end, its workers have ended, too."""
    command = [sys.executable, "-c", _DRIVER, address, str(pids), then]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE" or address}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        yield driver
    for pid in told_pids(pids):
        wait_for(lambda pid=pid: not is_there(pid))  # type: ignore[misc]


def told_pids(path: str | Path) -> list[int]:
    """The pids of a worker and its child, once the hanging job has written them."""
    result = Path(path)
    wait_for(lambda: result.exists() and result.read_text().endswith("\n"))
    return list(map(int, result.read_text().split()))


@pytest.mark.slow
def test_a_driver_that_is_no_node_is_served_by_the_cluster_s_client_server(ray_nodes: RayCluster) -> None:
    executor = RayExecutor(ray_nodes.client, JobLimits(), None, work)
    executor.start(job("a", "do"))
    executor.start(job("b", "die"))
    failures = {end.key: end.failure for end in ends(until_ended(executor, 2))}
    executor.close()
    assert failures["a"] is None
    assert failures["b"]
    assert failures["b"].failure_class == FailureClass.RETRYABLE


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_the_tasks_of_a_driver_that_is_killed_end_and_ray_has_said_nothing(
    own: bool, ray_nodes: RayCluster, tmp_path: Path
) -> None:
    with a_driver("" if own else ray_nodes.address, tmp_path / "pids") as driver:
        told_pids(tmp_path / "pids")
        driver.kill()
        assert driver.communicate()[0] == ""


@pytest.mark.slow
def test_a_ray_of_its_own_ends_with_the_executor(tmp_path: Path) -> None:
    with a_driver("", tmp_path / "pids", "close") as driver:
        assert driver.communicate()[0] == ""
        assert driver.returncode == 0


@pytest.mark.slow
def test_a_head_that_is_killed_is_said_and_what_ran_is_ended(tmp_path: Path) -> None:
    with a_driver("", tmp_path / "pids", "kill the head") as driver:
        assert "no longer answers" in driver.communicate()[0]


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "nowhere.invalid:6379", "6379"])
def test_an_address_where_nobody_answers_is_said_in_one_line(address: str) -> None:
    address = address.format(port=free_port())
    with pytest.raises(ExecutorUnavailable, match=f"no Ray cluster at {address}") as error:
        RayExecutor(address, JobLimits(), None)
    assert "\n" not in str(error.value)


def test_another_version_is_said_with_both() -> None:
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as ray_says:
        check_version_info({"ray_version": "2.9.0", "python_version": "3.9.1"}, "here")
    message = str(unavailable("h:1", f"Traceback\nRuntimeError: {ray_says.value}"))
    assert "runs Ray 2.9.0 on Python 3.9.1, and this is Ray 2." in message


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingSoftware, match=r"pip install 'nxpipe\[ray\]'"):
        RayExecutor(None, JobLimits(), None)
