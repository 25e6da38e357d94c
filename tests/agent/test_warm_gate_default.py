"""The warm gate over the default server, `nxpipe serve` on the emulator: as for the runtimes of others, no injected
fault reaches a request, and no healthy start is stopped."""

import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.requirements import artifact_requirements
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config import ServingFleet, load_config
from nxpipe.pipeline.fleet.agent import gate
from nxpipe.pipeline.fleet.agent.run import Agent, FleetInstance
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer
from nxpipe.pipeline.util.errors import NotReady
from tests.agent.test_agent_supervisor import free_port
from tests.agent.test_warm_gate import llama
from tests.agent.test_warm_gate_runtimes import CONFIG, silent_step
from tests.artifact_store.afar import first_generation, patch

__all__ = ["llama"]

pytestmark = pytest.mark.sample(12, "faults of the default server")

STARTS: Final = 50  # of each part of the series


@dataclass
class Instance:
    """An instance of a rehearsal's fleet, whose channel serves a tiny Llama."""

    root: Path
    store: Store
    published: Published
    patch: pytest.MonkeyPatch
    type: str = "inf2.xlarge"
    more: str = "rehearsal = true"
    left: float = 60.0  # seconds of the fleet's ready_within
    held: ExitStack = field(default_factory=ExitStack)
    port: int = field(default_factory=free_port)

    def promote(self) -> None:
        first = first_generation("production", [Served.of(self.published)])
        ChannelLog(self.store.backend, "production").append(lambda _: first)

    def runs(self, command: str, code: str) -> None:
        """Run a line of Python in the process of a command, before the command."""
        line = f"import os, sys, time; import numpy as np; {code}"
        wrapped = f"import sys\nif {command!r} in sys.argv: exec({line!r})\n"
        main = "from nxpipe.pipeline.cli.entry import main; main()"
        self.patch.setattr(gate, "_NXPIPE", (sys.executable, "-P", "-c", wrapped + main))

    def start(self) -> ModelServer:
        """Pass the gate; the server that may get requests."""
        path = self.root / "nxpipe.toml"
        text = CONFIG.format(type=self.type, port=self.port, more=self.more)
        path.write_text(text.replace("acme/tiny", self.published.manifest.model.id))
        config = load_config(path, {})
        (fleet,) = config.fleets
        assert isinstance(fleet, ServingFleet)
        agent = Agent(
            store=self.store,
            model=ServedModel.of(config, fleet, None),
            trust=trust_in(config, self.root, self.store),
            requirements=lambda channel: artifact_requirements(self.store, config, self.root, channel),
            folder=self.root / "served",
            devices=self.root / "dev",
            command=fleet.command,
            fleet=fleet,
            words=("--config", str(path)),
            processes=self.root / "proc",
            started=time.monotonic() - fleet.ready_within.total_seconds() + self.left,
        )
        here = FleetInstance("i-1", self.type, "us-east-1", None, "127.0.0.1")
        start = agent.prepare(here, silent_step)
        assert start is not None
        return self.held.enter_context(agent.serve(start, here, silent_step))


@pytest.fixture
def instance(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    shutil.copytree(llama, tmp_path / "store", ignore=shutil.ignore_patterns("channels"))
    store = open_store(str(tmp_path / "store"))
    (published,) = store.list()
    monkeypatch.chdir(tmp_path)
    for name in ("proc", "dev"):
        (tmp_path / name).mkdir()
    (tmp_path / "dev/neuron0").touch()
    made = Instance(tmp_path, store, published, monkeypatch)
    yield made
    made.held.close()


def test_a_healthy_start_of_the_default_server_passes(instance: Instance) -> None:
    instance.promote()
    assert not instance.start().has_ended()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_healthy_start_of_many_is_stopped(part: int, instance: Instance) -> None:
    instance.promote()
    for _ in range(STARTS):
        with instance.held:
            instance.port = free_port()
            assert not instance.start().has_ended()
        instance.held = ExitStack()


Inject = Callable[[Instance], object]


def _sets(**changes: Any) -> Inject:
    def inject(made: Instance) -> None:
        for name, value in changes.items():
            setattr(made, name, value)

    return inject


def _in(command: str, code: str, **changes: Any) -> Inject:
    """Run code in the process of a command, on an instance with changes."""

    def inject(made: Instance) -> None:
        made.runs(command, code)
        _sets(**changes)(made)

    return inject


_in_server, _in_warm = partial(_in, "serve"), partial(_in, "warm")


# What the decoder's programs answer, in the server's process.
_DECODER: Final = "from nxpipe.pipeline.serving.programs import Decoder as D; "
_ANSWERS: Final = "D.extend = lambda self, *_: np.full(320, {value}, np.float32)"
# What a program answers on its golden inputs, in the process of `agent warm`.
_PROGRAM: Final = "from nxpipe.pipeline.verify.execution import RunnableProgram as P; run = P.run; "


def _golden(change: str) -> str:
    return f"{_PROGRAM}P.run = lambda *given: {{name: {change} for name, value in run(*given).items()}}"


def _changed(kind: str) -> Inject:
    """Change a blob of the artifact in the store."""

    def inject(made: Instance) -> None:
        manifest = made.published.manifest
        blobs = {
            "program": manifest.executables[0].blob,
            "weights": manifest.weights[0].stored,
            "tokenizer": next(file.blob for file in manifest.files if file.path == "tokenizer.json"),
        }
        patch(made.root / "store" / blob_path(blobs[kind]))

    return inject


def _lost(pattern: str) -> Inject:
    def inject(made: Instance) -> None:
        for path in list((made.root / "store").rglob(pattern)):
            if path.is_file():
                path.unlink()

    return inject


def _listens(made: Instance) -> None:
    made.held.enter_context(socket.create_server(("127.0.0.1", made.port)))


@dataclass(frozen=True)
class Fault:
    inject: Inject
    said: str


FAULTS: Final = {
    "a chip is missing": Fault(lambda made: (made.root / "dev/neuron0").unlink(), "Neuron devices, but a"),
    "a chip too many": Fault(lambda made: (made.root / "dev/neuron99").touch(), "Neuron devices, but a"),
    "another instance type": Fault(_sets(type="trn1.2xlarge"), "trn1"),
    "programs of the emulator on devices": Fault(_sets(more=""), "emulator"),
    "no evidence": Fault(_lost("evidence/**/*"), "it has no evidence"),
    "a changed program": Fault(_changed("program"), ""),
    "changed weights": Fault(_changed("weights"), ""),
    "a changed tokenizer": Fault(_changed("tokenizer"), ""),
    "golden answers of zeros": Fault(_in_warm(_golden("0 * value")), "everywhere"),
    "golden answers that are wrong": Fault(_in_warm(_golden("value[..., ::-1]")), "verification failed"),
    "golden answers that are no numbers": Fault(_in_warm(_golden("value * float('nan')")), "verification failed"),
    "golden inputs that hang": Fault(_in_warm("time.sleep(60)", left=3.0), "golden inputs have not ended within"),
    "golden inputs that end the process": Fault(_in_warm("os.kill(os.getpid(), 9)"), "golden inputs stop the artifact"),
    "a server that exits": Fault(_in_server("sys.exit('no device')"), "exited with code 1"),
    "a server that is killed": Fault(_in_server("os.kill(os.getpid(), 9)"), "was ended by SIGKILL"),
    "a server that is never healthy": Fault(_in_server("time.sleep(60)", left=25.0), "did not answer GET /health"),
    "a port in use": Fault(_listens, "another process listens on port"),
    "a server without its programs": Fault(
        _in_server("import shutil; shutil.rmtree('served/executables')"), "exited with code"
    ),
    "a constant answer": Fault(
        _in_server(_DECODER + _ANSWERS.format(value="0.5")), "with the same token and log-probability"
    ),
    "an answer that is no number": Fault(
        _in_server(_DECODER + _ANSWERS.format(value="float('nan')")), "does not answer a request for one token"
    ),
    "a program that fails": Fault(
        _in_server(_DECODER + "D.extend = lambda *_: 1 / 0"), "a program has failed: division by zero"
    ),
    "a program that hangs at its third run": Fault(
        _in_server(
            _DECODER + "e, n = D.extend, []; "
            "D.extend = lambda *given: (n.append(1), len(n) > 2 and time.sleep(60), e(*given))[2]"
        ),
        "does not answer a request for one token",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_stopped_before_the_first_request_in_one_sentence(
    name: str, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hangs at" in name:
        monkeypatch.setattr(gate.Completions.__init__, "__defaults__", (3.0,))
    fault = FAULTS[name]
    fault.inject(instance)
    instance.promote()
    with pytest.raises((NotReady, StoreError)) as stopped:
        instance.start()
    sentence = str(stopped.value)
    assert fault.said in sentence
    assert "\n" not in sentence
