"""A Ray cluster of two nodes with one CPU each, which are processes of this machine; nodes start and are killed."""

import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.conftest import ROOT

_OBJECTS = 80 * 2**20


class RayCluster:
    """A cluster; `address` is for a driver on one of the nodes, `client` for one elsewhere."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        port = free_port()
        self._cluster = Cluster()
        self._head = self._add(include_dashboard=False, ray_client_server_port=port)
        self.address: str = self._cluster.address
        self.client = f"ray://127.0.0.1:{port}"
        self._workers = [self._add()]

    def add_node(self) -> None:
        self._workers.append(self._add())

    def kill_node(self) -> None:
        """Kill every process of the newest node. The head stays: the cluster ends with it."""
        self._cluster.remove_node(self._workers.pop(), allow_graceful=False)

    def close(self) -> None:
        folder = self._head.get_session_dir_path()
        self._cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)  # Ray leaves its logs behind

    def _add(self, **more: Any) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECTS, **more)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a process reads it once
        patch.setenv("PYTHONPATH", str(ROOT))  # workers import the tests' modules
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            cluster.close()


def free_port() -> int:
    """A free port below the system's ephemeral range, which Ray's own servers use."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
