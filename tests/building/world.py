"""Small projects built by real processes, observed from outside: processes, step results, reports."""

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxpipe.artifact_store.builds import StepResult
from nxpipe.artifact_store.layout import PARTS
from tests.faults.invariants import visible
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.saved_programs import write_onnx

CELLS = 12  # cells of each of the two projects
PATIENCE = 120  # seconds until a test fails
_MARK = "BUILD_UNDER_TEST"  # a variable in the environment of all processes of one run
_WORKER = b"nxpipe.pipeline.build.executors.local"
_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_MODEL = """
[[models]]
name = "{name}"
path = "{name}"
task = "{task}"
target = "{target}"
weights = "random:0"
buckets = {buckets}
phases = {phases}
"""


@dataclass
class Running:
    """A running build, the leader of a session of its own."""

    process: "subprocess.Popen[str]"
    mark: str

    def processes(self) -> set[int]:
        """All live processes of the build, the driver included."""
        return set(_marked(self.mark))

    def workers(self) -> set[int]:
        """Started workers of the local executor; the driver waits for each process that it starts."""
        return {pid for pid in self.processes() if _WORKER in _command(pid)}

    def stop_workers(self) -> None:
        """Stop the workers so that they seem to hang."""
        for pid in self.workers():
            os.kill(pid, signal.SIGSTOP)

    def answer(self) -> Answer:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Answer(self.process.returncode, out, err)

    def nothing_is_left(self, workers: "Callable[[Running], set[int]] | None" = None) -> None:
        """Wait until no process is left; a worker that loads its libraries takes longer to notice."""
        wait_for(lambda: not self.processes() and not (workers and workers(self)))


@dataclass
class World:
    """A project in `folder`; `words` are the arguments of its `nxpipe build`."""

    folder: Path
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @contextmanager
    def running(self, *more: str, **settings: Any) -> Iterator[Running]:
        """Run a build; kill its remains at the end."""
        mark = secrets.token_hex(8)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, _MARK: mark}
        with subprocess.Popen(
            [str(NXPIPE), "build", *self.words, *more],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings},
            cwd=self.folder,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                yield Running(process, mark)
            finally:
                for pid in _marked(mark):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def build(self, *more: str) -> Answer:
        with self.running(*more) as run:
            return run.answer()

    def build_all(self, *more: str) -> dict[str, str]:
        """Build successfully to the end; the status of each cell, by its key."""
        answer = self.build(*more)
        assert answer.code == 0, answer.err
        return self.fates()

    def fates(self) -> dict[str, str]:
        """The statuses in the newest report."""
        return {cell["key"]: cell["became"] for cell in self.reported()}

    def reported(self) -> list[dict[str, Any]]:
        """The cells of the newest report."""
        newest = max((self.folder / ".nxpipe/builds").iterdir())
        report = json.loads((newest / "report.json").read_bytes())
        return [cell for artifact in report["artifacts"] for cell in artifact["cells"]]

    def objects(self) -> dict[str, bytes]:
        """All objects visible to readers; incomplete ones are in `tmp/`."""
        files = (path for path in self.store.rglob("*") if path.is_file())
        found = {path.relative_to(self.store).as_posix(): path for path in files}
        return {name: path.read_bytes() for name, path in found.items() if not name.startswith(("tmp/", "neuron-"))}

    def parts(self) -> dict[str, str]:
        """The writer of each step result, by its key."""
        return parts_of(self.objects())

    def artifacts(self) -> Mapping[str, str]:
        """The digest of each published manifest, by its request key."""
        return visible(self.objects()).answers


def parts_of(objects: Mapping[str, bytes]) -> dict[str, str]:
    parts = [StepResult.from_bytes(data) for path, data in objects.items() if path.startswith(PARTS)]
    return {part.key: part.write_id for part in parts}


def saved_world(folder: Path, *, targets: str = "inf2.48xlarge,trn1.32xlarge,trn1n.32xlarge,trn2.48xlarge") -> World:
    """One saved program for four targets at three degrees: twelve artifacts of one cell each, without torch."""
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(folder / "m.onnx")
    words = ("--model-id", "./m.onnx", "--axis", "batch=2", "--target", targets, "--tp", "1,2,8", "--no-verify")
    return World(folder, (*words, "--store", "store"))


def models_world(folder: Path) -> World:
    """An encoder for two targets and a decoder: three artifacts of four cells each."""
    write_model(folder / "bert", BERT | _SMALL)
    write_model(folder / "llama", LLAMA | _SMALL | {"num_key_value_heads": 2, "vocab_size": 32})
    encoder = model_text("bert", "feature-extraction", [8, 16, 24, 32])
    decoder = model_text("llama", "text-generation", [8, 16, 32], phases=["prefill", "decode"])
    also = '[[models.also]]\ntargets = ["trn1.2xlarge"]\ntp = [2]\n'
    return described(folder, encoder + also + decoder)


def described(folder: Path, models: str) -> World:
    """A project with these models in its nxpipe.toml."""
    head = '[project]\nname = "tests"\n[store]\nurl = "file://store"\n'
    (folder / "nxpipe.toml").write_text(head + models)
    return World(folder, ("--no-verify",))


def model_text(
    name: str, task: str, buckets: list[int], *, phases: list[str] | None = None, target: str = "inf2.xlarge"
) -> str:
    words = {"name": name, "task": task, "buckets": buckets, "target": target}
    return _MODEL.format(**words, phases=json.dumps(phases or ["forward"]))


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def _marked(mark: str) -> Iterator[int]:
    """Processes with this mark in their environment; zombies have no environment."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
