"""Time from the start of the agent to a ready server, beside s5cmd's time for the bytes of the artifact alone.

    nice -n -15 python benchmarks/agent_start.py FOLDER [--gib 16] [--runs 3] [--rate MB] [--held] [--s5cmd PATH]

FOLDER is new, on the file system to be measured, with space for twice the bytes. The artifact is a checkpoint in the
shape of an 8B Llama, of random bytes, as the payload of a foreign runtime: four safetensors files, stored by tensor. An
S3 server of this machine holds it (benchmarks/s3_server.py). `nxpipe agent run` fetches it, lays it out and starts a
server that is ready at once; it ends with READY=1 to systemd's socket, where the lifecycle hook is completed. s5cmd
copies the same objects into a folder of the same file system. Both alternate, and so does which of them is first, after
a copy that is not counted. Before each run, what was written is flushed and removed, and the objects are dropped from
the page cache.

With --held the free memory of a virtual machine is held before each run and released as the run takes it
(benchmarks/held_memory.py), so that the host does not take it back and give it again during the run.

A real agent flushes what it fetched before it says so; s5cmd does not, so `s5cmd + sync` has the flush added.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from store import on_our_server  # noqa: E402

from nxpipe.artifact_store import Store, open_store  # noqa: E402
from nxpipe.artifact_store.canonical import canonical_json  # noqa: E402
from nxpipe.artifact_store.channel.generation import Served  # noqa: E402
from nxpipe.artifact_store.channel.log import ChannelLog  # noqa: E402
from nxpipe.artifact_store.manifest import Manifest, ModelRef, ServingPayload, SharedFile, Tensor  # noqa: E402
from nxpipe.artifact_store.weights import Elements, put_weights  # noqa: E402
from nxpipe.pipeline.artifacts.contract import FileTree, ServingContract, TreeFile  # noqa: E402
from tests.agent.metadata import metadata_service  # noqa: E402
from tests.artifact_store.afar import first_generation  # noqa: E402

MODEL: Final = "example/llama-8b"
SHARDS: Final = 4
_TREE: Final = "model"
_HIDDEN, _VOCABULARY, _LAYERS = 4096, 128_256, 32
_OF_A_LAYER: Final = (  # rows and columns, of two bytes
    *(("norm", 1, _HIDDEN), ("q", _HIDDEN, _HIDDEN), ("k", 1024, _HIDDEN), ("v", 1024, _HIDDEN)),
    *(("o", _HIDDEN, _HIDDEN), ("gate", 14336, _HIDDEN), ("up", 14336, _HIDDEN), ("down", _HIDDEN, 14336)),
)
_CONFIG: Final = """
[project]
name = "benchmark"
[store]
url = "{url}"
[[models]]
name = "llama"
id = "{model}"
task = "text-generation"
target = "inf2.xlarge"
[[fleets]]
kind = "serving"
name = "chat"
model = "llama"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, max = 1 }}
port = {port}
ready_within = "30m"
draining = "1s"
"""
_SERVER: Final = (
    "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
)
_SAMPLED_EVERY: Final = 0.05  # seconds


# The artifact


def _shapes(gib: float) -> list[tuple[str, int, int]]:
    """The tensors of an 8B Llama, of which the layers are as many as the size asks for."""
    layers = max(1, round(_LAYERS * gib / 16))
    shapes = [("embed", _VOCABULARY * layers // _LAYERS, _HIDDEN)]
    shapes += [
        (f"layers.{layer}.{name}", rows, columns) for layer in range(layers) for name, rows, columns in _OF_A_LAYER
    ]
    return [*shapes, ("head", _VOCABULARY * layers // _LAYERS, _HIDDEN)]


class _Shard:
    """A safetensors file that is stored while it is made, and exists nowhere as a file."""

    def __init__(self, tensors: list[tuple[str, int, int]], seed: int) -> None:
        self._tensors, self._seed = tensors, seed
        header: dict[str, Any] = {}
        self.size = 0
        for name, rows, columns in tensors:
            header[name] = {
                "dtype": "BF16",
                "shape": [rows, columns],
                "data_offsets": [self.size, self.size + 2 * rows * columns],
            }
            self.size += 2 * rows * columns
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.size += len(self.head)
        self._hasher = hashlib.sha256(self.head)

    def stored(self, store: Store) -> tuple[Tensor, ...]:
        return put_weights(store.blobs, self._elements())

    def _elements(self) -> Iterator[Elements]:
        for number, (name, rows, columns) in enumerate(self._tensors):
            random = np.random.Generator(np.random.SFC64((self._seed, number)))
            data = memoryview(random.bytes(2 * rows * columns))
            self._hasher.update(data)
            yield Elements(name, "bfloat16", (rows, columns), data)

    def file(self, path: str) -> TreeFile:
        return TreeFile(path=path, sha256=self._hasher.hexdigest(), size=self.size)


def publish(store: Store, gib: float) -> int:
    """Publish and promote the artifact; its bytes."""
    shapes, shards = _shapes(gib), []
    each = -(-len(shapes) // SHARDS)
    shared, files = [], []
    for number in range(SHARDS):
        shard, path = (
            _Shard(shapes[number * each : (number + 1) * each], number),
            f"model-{number + 1}-of-{SHARDS}.safetensors",
        )
        tensors = shard.stored(store)
        shared.append(SharedFile(path=f"{_TREE}/{path}", head=store.put_blob(shard.head), tensors=tensors))
        files.append(shard.file(path))
        shards.append(shard)
        print(f"stored {path}: {shard.size / 2**30:.2f} GiB", file=sys.stderr)
    tree = FileTree(name=_TREE, destination=_TREE, runtime_writes=(), files=tuple(files))
    contract = ServingContract(
        name="server", runtime="torchscript", target="inf2", lnc=1, tp=1, cores=1, pins={}, trees=(tree,),
        environment={}, argv=(sys.executable, "-c", _SERVER, "${port}"), forbidden=(), proves=(), disproves=(),
        progress=(),
    )  # fmt: skip
    payload = ServingPayload(
        name="server", contract=store.put_blob(contract.to_bytes()), files=(), shared=tuple(shared)
    )
    published = store.publish(
        Manifest(
            model=ModelRef(id=MODEL, revision=None, task="text-generation"),
            target="inf2",
            backend="neuronx",
            key_inputs=store.put_blob(canonical_json({"gib": gib})),
            executables=(),
            weights=(),
            files=(),
            serving=(payload,),
        )
    )
    served = Served.of(published, without=("device", "emulated"))
    ChannelLog(store.backend, "production").append(lambda _: first_generation("production", [served]))
    return sum(shard.size for shard in shards)


# The runs


@dataclass
class AgentRun:
    """Seconds to READY=1, and at each step before it; the agent's memory before the server's start, in MB."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    folder: Path
    environment: Mapping[str, str]
    url: str
    s5cmd: str
    size: int
    is_held: bool = False

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Hold the free memory for a run, with --held."""
        if not self.is_held:
            yield
            return
        command = [sys.executable, str(ROOT / "benchmarks/held_memory.py")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            try:
                yield
            finally:
                holder.kill()

    def prepared(self) -> Path:
        """A new folder to write into, with nothing of an earlier run in memory or waiting to be written."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        os.sync()
        for path in (self.folder / "s3" / "served").iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return work

    def agent(self) -> AgentRun:
        work = self.prepared()
        (work / "nxpipe.toml").write_text(_CONFIG.format(url=self.url, model=MODEL, port=_free_port()))
        (work / "dev").mkdir()
        (work / "dev/neuron0").touch()
        (work / "health").touch()  # what the server answers
        with (
            self.memory(),
            metadata_service() as metadata,
            closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd,
        ):
            metadata.values |= {
                "instance-id": "i-0123456789abcdef0",
                "instance-type": "inf2.xlarge",
                "placement/region": "us-east-1",
                "local-ipv4": "127.0.0.1",
            }
            systemd.bind(str(work / "notify"))
            own = {
                "HOME": str(work),
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
                "NOTIFY_SOCKET": str(work / "notify"),
            }
            command = [str(Path(sys.executable).parent / "nxpipe"), "agent", "run", "--fleet", "chat", "--to", "served"]
            environ = {**os.environ, **self.environment, **own}
            environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the modules of an instance are compiled
            started = time.perf_counter()
            process = subprocess.Popen(
                [*command, "--devices", "dev"], cwd=work, env=environ,
                stdout=subprocess.DEVNULL, stderr=(self.folder / "agent.log").open("w"),
            )  # fmt: skip
            try:
                return self._until_ready(process, systemd, started)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()

    def _until_ready(self, process: "subprocess.Popen[bytes]", systemd: socket.socket, started: float) -> AgentRun:
        run, has_begun = AgentRun(), threading.Event()
        sampler = threading.Thread(target=_sample, args=(process.pid, run, has_begun))
        sampler.start()
        systemd.settimeout(1)
        try:
            while not run.seconds:
                try:
                    message = systemd.recv(4096).decode()
                except TimeoutError:
                    if process.poll() is not None:
                        raise RuntimeError((self.folder / "agent.log").read_text()) from None
                    continue
                now = time.perf_counter() - started
                if "READY=1" in message:
                    run.seconds = now
                else:
                    run.steps[message.removeprefix("STATUS=").strip()] = now
                    if "start the server" in message:
                        has_begun.set()
        finally:
            has_begun.set()
            sampler.join()
        return run

    def copy(self) -> tuple[float, float]:
        """Seconds of s5cmd, and of s5cmd with a flush of what it wrote."""
        work = self.prepared()
        command = [self.s5cmd, "--log", "error", "cp", f"{self.url}/cas/*", f"{work}/copy/"]
        with self.memory():
            started = time.perf_counter()
            subprocess.run(command, env={**os.environ, **self.environment}, check=True)
            seconds = time.perf_counter() - started
            subprocess.run(["sync", "-f", str(work)], check=True)
            flushed = time.perf_counter() - started
        found = sum(path.stat().st_size for path in (work / "copy").rglob("*") if path.is_file())
        if found < self.size:
            raise RuntimeError(f"s5cmd copied {found:,} bytes of {self.size:,}")
        return seconds, flushed


def _sample(process: int, run: AgentRun, has_begun: threading.Event) -> None:
    """Note the largest memory of the agent's processes, and its processor time, until the server begins."""
    while not has_begun.wait(_SAMPLED_EVERY):
        with suppress(OSError, ValueError):
            run.peak_mb = max(run.peak_mb, sum(map(_resident, _tree(process))) / 1e6)
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            run.cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tree(process: int) -> Iterator[int]:
    yield process
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        yield from _tree(int(child))


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def measure(folder: Path, gib: float, runs: int, rate: float | None, is_held: bool, s5cmd: str) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "s3").mkdir()
    try:
        limit = ("--rate", str(rate)) if rate else ()
        with on_our_server(folder / "s3", *limit) as (url, environment):
            os.environ.update(environment)
            bench = Bench(folder, environment, url, s5cmd, publish(open_store(url), gib), is_held)
            agents, copies, loads = [], [], []
            bench.copy()  # not counted: a virtual machine gets its memory from the host on first use
            for number in range(runs):
                loads.append(os.getloadavg()[0])
                if number % 2:
                    agents.append(bench.agent())
                copies.append(bench.copy())
                if not number % 2:
                    agents.append(bench.agent())
                print(f"run {number + 1}: load {loads[-1]:.1f}, {agents[-1]}, s5cmd {copies[-1]}", file=sys.stderr)
    finally:
        shutil.rmtree(folder)
    ready = statistics.median(run.seconds for run in agents)
    alone, flushed = (statistics.median(column) for column in zip(*copies, strict=True))
    return {
        "gib": bench.size / 2**30,
        "agent_s": [run.seconds for run in agents],
        "agent_cpu_s": [run.cpu_seconds for run in agents],
        "agent_peak_mb": max(run.peak_mb for run in agents),
        "s5cmd_s": [seconds for seconds, _ in copies],
        "s5cmd_and_sync_s": [seconds for _, seconds in copies],
        "speed beside s5cmd": alone / ready,
        "speed beside s5cmd + sync": flushed / ready,
        "load": loads,
        "steps": agents[-1].steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, help="MB a second of the server; default: no limit")
    parser.add_argument("--held", action="store_true", help="keep the host from taking memory back between runs")
    parser.add_argument("--s5cmd", default="s5cmd")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs every `finally`
    result = measure(options.folder, options.gib, options.runs, options.rate, options.held, options.s5cmd)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
