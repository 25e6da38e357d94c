"""The way into a Ray cluster, or a Ray of this machine's own: quiet, and with a clear answer where there is none."""

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
_TRIAL: Final = 20.0  # seconds for a process of its own to connect
_TRY: Final = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='CRITICAL')"
_OBJECTS: Final = 80 * 2**20  # bytes: items travel as words, their results through the store
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_ADDRESS: Final = re.compile(r"(ray://)?[^/]+:\d+")
_VERSIONS: Final = re.compile(r"Ray:\s*(\S+)\s+Python:\s*(\S+)")


@dataclass(frozen=True)
class RayNode:
    cpus: int
    memory: int  # bytes


class RayCluster:
    """A connection, which is the process's only one. `own`: started here, and ended with it."""

    def __init__(self, address: str | None, jobs: int | None) -> None:
        self._ray = _ray()
        self._losses = _losses()
        self.address = address or "this machine's own"
        if address is not None:
            _reach(address)
        with _our_own_signals():
            context = self._connect(address, jobs)
        # What Ray hears of workers that died it prints to stdout, which is for results; it comes as a fault as well.
        self._ray._private.worker._worker_logs_enabled = False
        self._folder = None if address else Path(context.address_info["session_dir"])
        self._door = address if address and address.startswith("ray://") else context.address_info["address"]

    def _connect(self, address: str | None, jobs: int | None) -> Any:
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL", "runtime_env": {"env_vars": _ONE_THREAD}}
        try:
            if address is not None:
                return self._ray.init(address, **quiet)
            # Else Ray writes a token for all its clusters to the home folder, where there may be none to write to.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            return self._ray.init(
                "local", num_cpus=jobs, object_store_memory=_OBJECTS, include_dashboard=False, **quiet
            )
        except Exception as error:  # of every kind
            if address is not None:
                raise refused(address, str(error)) from error
            raise ExecutorUnavailable(f"Ray cannot be started on this machine: {_last_line(str(error))}") from error

    def nodes(self) -> list[RayNode]:
        """Those that are alive and may carry out something.

        Ray waits for a head that is gone, and after a minute ends this process without a word.
        """
        with self.lost_is_said():
            _knock(self._door)
            offers = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [RayNode(int(each["CPU"]), int(each.get("memory", 0))) for each in offers if each.get("CPU", 0) >= 1]

    @contextmanager
    def lost_is_said(self) -> Iterator[None]:
        """What Ray says when the connection is gone, as one error of ours."""
        try:
            yield
        except self._losses as error:
            raise ExecutorUnavailable(
                f"The Ray cluster at {self.address} does not answer any more ({_first_line(str(error))}); "
                "start it again, and run the same command: what is in the store is not built again"
            ) from error

    def close(self) -> None:
        """Ray ends the tasks of a job with the job."""
        self._ray.shutdown()
        if self._folder is not None:  # logs and sockets, which Ray leaves behind
            shutil.rmtree(self._folder, ignore_errors=True)


def _ray() -> Any:
    """The library. What is run on whose machines is nobody else's affair, unless its owner has said that it is."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingSoftware("ray", "--executor ray", "pip install 'nxpipe[ray]'") from error
    return ray


def _losses() -> tuple[type[Exception], ...]:
    """How the loss of a connection shows: each of Ray's layers has a way of its own."""
    from ray import exceptions

    losses: list[type[Exception]] = [OSError, exceptions.RaySystemError, exceptions.RpcError]
    with suppress(ImportError):  # without it there is no ray://
        import grpc

        losses.append(grpc.RpcError)
    return tuple(losses)


def _reach(address: str) -> None:
    """Ray itself gives up after minutes, prints pages meanwhile and may end the process: another one tries first."""
    if address != "auto" and not _ADDRESS.fullmatch(address):
        raise refused(address, "it is neither HOST:PORT nor ray://HOST:PORT nor auto")
    try:
        if address != "auto":
            _knock(address)
        trial = subprocess.run(
            [sys.executable, "-c", _TRY, address], capture_output=True, text=True, timeout=_TRIAL, check=False
        )
    except subprocess.TimeoutExpired:
        raise refused(address, f"it did not let us in within {_TRIAL:g} seconds") from None
    except OSError as error:
        raise refused(address, str(error)) from error
    if trial.returncode != 0:
        raise refused(address, trial.stderr)


def _knock(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


def refused(address: str, words: str) -> PipelineError:
    """The error for what Ray said of an address."""
    if versions := _VERSIONS.search(words):
        import ray

        own = ".".join(map(str, sys.version_info[:3]))
        return ExecutorUnavailable(
            f"The Ray cluster at {address} runs Ray {versions[1]} on Python {versions[2]}, and this is Ray "
            f"{ray.__version__} on Python {own}; install the cluster's versions here"
        )
    if "ray[client]" in words:
        return MissingSoftware("grpcio", f"--address {address}", "pip install 'nxpipe[ray]'")
    advice = (
        "it is the address of the cluster's client server, port 10001 unless it was told otherwise"
        if address.startswith("ray://")
        else "it needs a node of the cluster on this machine, as `ray start` makes one; ray://HOST:10001 does not"
    )
    return ExecutorUnavailable(f"No Ray cluster can be had at {address}: {_last_line(words)}; {advice}")


@contextmanager
def _our_own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(words: str) -> str:
    return words.strip().partition("\n")[0].rstrip(".") or "it said nothing"


def _last_line(words: str) -> str:
    return words.strip().rpartition("\n")[2].rstrip(".")[:300] or "it said nothing"
