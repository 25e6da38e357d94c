"""Connection to a Ray cluster, or to a Ray started on this machine, with a clear error if there is none."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.errors import ExecutorUnavailable, MissingSoftware, PipelineError

_PATIENCE: Final = 5.0  # seconds for a port to answer
_PROBE_TIMEOUT: Final = 20.0  # seconds for the probe process to connect
_PROBE: Final = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='CRITICAL')"
_OBJECTS: Final = 80 * 2**20  # bytes: jobs are small documents, results go through the store
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_ADDRESS: Final = re.compile(r"(ray://)?[^/]+:\d+")
_VERSIONS: Final = re.compile(r"Ray:\s*(\S+)\s+Python:\s*(\S+)")


@dataclass(frozen=True)
class RayNode:
    cpus: int
    memory: int  # bytes


class RayCluster:
    """The one connection of this process. Without an address Ray is started here, and stopped with it."""

    def __init__(self, address: str | None, jobs: int | None) -> None:
        self._ray = _ray()
        self._connection_errors = _connection_errors()
        self.address = address or "this machine's own"
        if address is not None:
            _require_cluster(address)
        with _own_signals():
            context = self._connect(address, jobs)
        # Ray prints news of dead workers to stdout, which is for results; they are failures of their jobs as well.
        self._ray._private.worker._worker_logs_enabled = False
        self._folder = None if address else Path(context.address_info["session_dir"])
        self._endpoint = address if address and address.startswith("ray://") else context.address_info["address"]

    def _connect(self, address: str | None, jobs: int | None) -> Any:
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL", "runtime_env": {"env_vars": _ONE_THREAD}}
        try:
            if address is not None:
                return self._ray.init(address, **quiet)
            # Else Ray writes a token for all its clusters to the home folder, which may not be writable.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            return self._ray.init(
                "local", num_cpus=jobs, object_store_memory=_OBJECTS, include_dashboard=False, **quiet
            )
        except Exception as error:  # of every kind
            if address is not None:
                raise unavailable(address, str(error)) from error
            raise ExecutorUnavailable(f"Ray cannot be started on this machine: {_last_line(str(error))}") from error

    def nodes(self) -> list[RayNode]:
        """Nodes that are alive and have a CPU.

        Asked of a head that is gone, Ray would wait a minute and then end this process: hence the probe.
        """
        with self.connection_errors():
            _require_open_port(self._endpoint)
            offers = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [RayNode(int(each["CPU"]), int(each.get("memory", 0))) for each in offers if each.get("CPU", 0) >= 1]

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Turn every error of a lost connection into ExecutorUnavailable."""
        try:
            yield
        except self._connection_errors as error:
            raise ExecutorUnavailable(
                f"The Ray cluster at {self.address} no longer answers ({_first_line(str(error))}); "
                "start it again, then run the same command: cached cells are not built again"
            ) from error

    def close(self) -> None:
        """Ray ends all tasks of this connection."""
        self._ray.shutdown()
        if self._folder is not None:  # logs and sockets that Ray leaves behind
            shutil.rmtree(self._folder, ignore_errors=True)


def _ray() -> Any:
    """The library, without its usage statistics unless the user has enabled them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingSoftware("ray", "--executor ray", "pip install 'nxpipe[ray]'") from error
    return ray


def _connection_errors() -> tuple[type[Exception], ...]:
    """Errors of a lost connection; each of Ray's layers raises its own."""
    from ray import exceptions

    losses: list[type[Exception]] = [OSError, exceptions.RaySystemError, exceptions.RpcError]
    with suppress(ImportError):  # without it there is no ray://
        import grpc

        losses.append(grpc.RpcError)
    return tuple(losses)


def _require_cluster(address: str) -> None:
    """Probe from another process: Ray itself gives up after minutes, prints pages and may end the process."""
    if address != "auto" and not _ADDRESS.fullmatch(address):
        raise unavailable(address, "it is neither HOST:PORT nor ray://HOST:PORT nor auto")
    try:
        if address != "auto":
            _require_open_port(address)
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, address], capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise unavailable(address, f"it did not answer within {_PROBE_TIMEOUT:g} seconds") from None
    except OSError as error:
        raise unavailable(address, str(error)) from error
    if probe.returncode != 0:
        raise unavailable(address, probe.stderr)


def _require_open_port(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


def unavailable(address: str, text: str) -> PipelineError:
    """The error for a message of Ray about an address."""
    if versions := _VERSIONS.search(text):
        import ray

        own = ".".join(map(str, sys.version_info[:3]))
        return ExecutorUnavailable(
            f"The Ray cluster at {address} runs Ray {versions[1]} on Python {versions[2]}, and this is Ray "
            f"{ray.__version__} on Python {own}; install the cluster's versions here"
        )
    if "ray[client]" in text:
        return MissingSoftware("grpcio", f"--address {address}", "pip install 'nxpipe[ray]'")
    advice = (
        "pass the address of the cluster's client server, by default port 10001"
        if address.startswith("ray://")
        else "start a node of the cluster on this machine with `ray start`, or pass ray://HOST:10001, which needs none"
    )
    return ExecutorUnavailable(f"no Ray cluster at {address}: {_last_line(text)}; {advice}")


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".") or "no message"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].rstrip(".")[:300] or "no message"
