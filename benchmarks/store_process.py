"""Processes of `benchmarks/store.py`, and their measurement.

python benchmarks/store_process.py publish FOLDER URL | boto3-up FOLDER URL | boto3-down URL FOLDER | make-bucket NAME
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_SAMPLED_EVERY = 0.01  # seconds


class Failed(Exception):
    """A program ended with an error, which it has printed."""


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_mb: float


def measured(command: Sequence[str], environment: Mapping[str, str], at_most: float = 600) -> Cost:
    """Run a command to its end: time, CPU time, and the largest sum of memory over its process tree.

    The process tree is killed after `at_most` seconds, or when this process is to end.
    """
    began = time.perf_counter()
    # As in an installation: compiled modules exist from the second start on.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, env={**inherited, **environment}, stdout=subprocess.DEVNULL, process_group=0)
    peak, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLED_EVERY):
            peak[0] = max(peak[0], _memory(process.pid))
            if time.perf_counter() - began > at_most:
                os.killpg(process.pid, signal.SIGKILL)
                return

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        # Not its ru_maxrss, which includes the memory of this process at the fork.
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        over.set()
        sampler.join()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        why = f"was ended after {seconds:.0f} s" if seconds > at_most else f"ended with {process.returncode}"
        raise Failed(f"{Path(command[0]).name} {why}")
    return Cost(seconds, used.ru_utime + used.ru_stime, peak[0] / 1e6)


def _memory(pid: int) -> int:
    """The peak memory of a process and its children."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0  # the process has ended meanwhile
    most = re.search(r"VmHWM:\s*(\d+) kB", status)
    return (int(most[1]) * 1024 if most else 0) + sum(_memory(int(child)) for child in children)


def publish(folder: str, url: str) -> None:
    """Each file as one tensor of an artifact, by the same functions as a build."""
    from nxpipe.artifact_store import open_store
    from nxpipe.artifact_store.backends.protocol import CHUNK
    from nxpipe.artifact_store.canonical import canonical_json
    from nxpipe.artifact_store.manifest import Manifest, ModelRef, Tensor

    store = open_store(url)

    def keep(path: Path) -> Tensor:
        # As in a build: small tensors in memory, large ones in their files.
        small = path.stat().st_size <= CHUNK
        blob = store.put_blob(path.read_bytes()) if small else store.blobs.put_file(path)
        return Tensor(name=path.name, dtype="uint8", shape=(blob.size,), blob=blob, pack=None)

    weights = tuple(store.backend.each(keep, sorted(Path(folder).iterdir())))
    store.publish(
        Manifest(
            model=ModelRef(id="example/benchmark", revision=None, task="feature-extraction"),
            target="inf2",
            backend="emulator",
            key_inputs=store.put_blob(canonical_json({"files": len(weights), "first": weights[0].blob.sha256})),
            executables=(),
            weights=weights,
            files=(),
        )
    )


def boto3_up(folder: str, url: str) -> None:
    import boto3

    client, (bucket, prefix) = boto3.client("s3"), _parsed(url)
    for path in sorted(Path(folder).iterdir()):
        client.upload_file(str(path), bucket, f"{prefix}/files/{path.name}")


def boto3_down(url: str, folder: str) -> None:
    import boto3

    client, (bucket, prefix) = boto3.client("s3"), _parsed(url)
    Path(folder).mkdir()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/files/"):
        for found in page["Contents"]:
            client.download_file(bucket, found["Key"], f"{folder}/{found['Key'].rpartition('/')[2]}")


def make_bucket(name: str) -> None:
    """Create a bucket as soon as the new server responds."""
    import boto3
    from botocore.config import Config

    config = Config(retries={"mode": "standard", "total_max_attempts": 10})
    boto3.client("s3", config=config).create_bucket(Bucket=name)


def _parsed(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix


_ACTIONS: dict[str, Callable[..., None]] = {
    "publish": publish,
    "boto3-up": boto3_up,
    "boto3-down": boto3_down,
    "make-bucket": make_bucket,
}

if __name__ == "__main__":
    _ACTIONS[sys.argv[1]](*sys.argv[2:])
