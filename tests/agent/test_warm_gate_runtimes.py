"""The warm gate over the serving runtimes: no injected fault reaches a request, and no healthy start is stopped."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts import recipes
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.payload import publish_draft
from nxpipe.pipeline.artifacts.recipes import ImportRequest, draft
from nxpipe.pipeline.artifacts.requirements import artifact_requirements
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config import ServingFleet, load_config
from nxpipe.pipeline.fleet.agent import gate
from nxpipe.pipeline.fleet.agent import run as agent_run
from nxpipe.pipeline.fleet.agent.group import FleetInstance
from nxpipe.pipeline.fleet.agent.run import Agent
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer
from nxpipe.pipeline.util.errors import NotReady
from tests.agent.test_agent_supervisor import free_port
from tests.artifact_store.afar import first_generation, patch
from tests.artifact_store.samples import Folder
from tests.artifact_store.samples import folder as store_in
from tests.serving import standins
from tests.serving.standins import PINS, RUNTIMES, TARGETS, compiled

pytestmark = pytest.mark.sample(12, "faults of runtimes")

TYPES: Final = {"inf2": "inf2.xlarge", "trn2": "trn2.48xlarge"}
CONFIG: Final = """
[project]
name = "demo"
[store]
url = "file://store"
[[models]]
name = "tiny"
id = "acme/tiny"
task = "text-generation"
target = "{type}"
[[fleets]]
kind = "serving"
name = "chat"
model = "tiny"
channel = "production"
instance_types = ["{type}"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, max = 1 }}
port = {port}
health_check = {{ interval = "5s", timeout = "2s" }}
ready_within = "1m"
draining = "1s"
{more}
"""


def silent_step(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Instance:
    """An instance of a fleet whose channel serves what a runtime compiled."""

    runtime: str
    root: Path
    store: Folder
    manifest: Manifest
    patch: pytest.MonkeyPatch
    type: str
    more: str = ""
    without: tuple[str, ...] = ("device", "emulated")
    left: float = 60.0  # seconds of the fleet's ready_within
    held: ExitStack = field(default_factory=ExitStack)
    port: int = field(default_factory=free_port)

    @property
    def programs(self) -> Path:
        return self.root / "venv/bin"

    @property
    def program(self) -> Path:
        return self.programs / ("serve-traced" if self.runtime == "torchscript" else "vllm")

    def prepend(self, line: str) -> None:
        """Run a line of shell before the server."""
        first, *rest = self.program.read_text().splitlines()
        self.program.write_text("\n".join([first, line, *rest]))

    def promote(self) -> None:
        (published,) = self.store.store.list()
        served = Served.of(published, without=self.without)
        ChannelLog(self.store.backend, "production").append(lambda _: first_generation("production", [served]))

    def agent(self) -> Agent:
        path = self.root / "nxpipe.toml"
        path.write_text(CONFIG.format(type=self.type, port=self.port, more=self.more))
        config = load_config(path, {})
        (fleet,) = config.fleets
        assert isinstance(fleet, ServingFleet)
        store = self.store.store
        return Agent(
            store=store,
            model=ServedModel.of(config, fleet, None),
            trust=trust_in(config, self.root, store),
            requirements=lambda channel: artifact_requirements(store, config, self.root, channel),
            folder=self.root / "served",
            devices=self.root / "dev",
            command=fleet.command,
            fleet=fleet,
            processes=self.root / "proc",
            started=time.monotonic() - fleet.ready_within.total_seconds() + self.left,
        )

    def start(self) -> ModelServer:
        """Pass the gate; the server that may get requests."""
        agent, here = self.agent(), FleetInstance("i-1", self.type, "us-east-1", None, "127.0.0.1")
        start = agent.prepare(here, silent_step)
        assert start is not None
        return self.held.enter_context(agent.serve(start, here, silent_step))


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Instance]]:
    nki = str(tmp_path / "var/tmp/nki-intermediate-cache")
    monkeypatch.setattr(recipes, "NKI_BINARIES", nki)
    monkeypatch.chdir(tmp_path)
    made: list[Instance] = []

    def of(runtime: str) -> Instance:
        source = compiled(runtime, tmp_path / "built", nki_root=nki if runtime == "vllm-neuron" else "")
        store = store_in(tmp_path / "store")
        manifest = publish_draft(store.store, draft(ImportRequest(**source.stated()))).published.manifest
        programs = standins.install(runtime, tmp_path / "venv/bin", PINS[runtime])
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        for name in ("proc", "dev"):
            (tmp_path / name).mkdir()
        type_ = TYPES[TARGETS[runtime]]
        for chip in range(INSTANCES[type_].chips):
            (tmp_path / f"dev/neuron{chip}").touch()
        made.append(Instance(runtime, tmp_path, store, manifest, monkeypatch, type_))
        return made[-1]

    yield of
    for each in made:
        each.held.close()
    for folder in (tmp_path / "served-serving", Path(nki)):
        standins.writable(folder)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_a_runtime_compiled_passes_the_gate(runtime: str, instance: Callable[[str], Instance]) -> None:
    made = instance(runtime)
    made.promote()
    server = made.start()
    assert not server.has_ended()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_healthy_start_of_many_is_stopped(runtime: str, instance: Callable[[str], Instance]) -> None:
    made = instance(runtime)
    made.promote()
    for _ in range(50):
        with made.held:
            made.port = free_port()
            assert not made.start().has_ended()
        made.held = ExitStack()


Inject = Callable[[Instance], object]


@dataclass(frozen=True)
class Fault:
    inject: Inject
    said: str
    runtimes: tuple[str, ...] = RUNTIMES


def _collective(line: str) -> Inject:
    """Another nccom-test in the runtime's environment."""

    def inject(made: Instance) -> None:
        made.patch.setattr(gate, "_COLLECTIVE_SECONDS", 1.0)
        (made.programs / "nccom-test").write_text(f"#!/bin/sh\n{line}\n")

    return inject


RANKS: Final = ("vllm-nxdi", "vllm-neuron", "optimum")  # whose stand-ins have several
SPEAKING: Final = tuple(runtime for runtime in RUNTIMES if runtime != "torchscript")


def _behaves(how: str) -> Inject:
    return lambda made: made.patch.setenv("STANDIN_BEHAVIOUR", how)


def _other_version(made: Instance) -> None:
    (info, *_) = sorted(made.programs.with_name("bin-packages").glob("torch-*"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")


def _changed(suffix: str) -> Inject:
    """Change a file of the artifact in the store."""

    def inject(made: Instance) -> None:
        (payload,) = made.manifest.serving
        file = next(file for file in payload.files if file.path.endswith(suffix))
        patch(made.root / "store" / blob_path(file.blob))

    return inject


def _listens(made: Instance) -> None:
    made.held.enter_context(socket.create_server(("127.0.0.1", made.port)))


def _compiles(made: Instance) -> None:
    (made.root / "proc/77").mkdir()
    (made.root / "proc/77/cmdline").write_bytes(b"python3\0/opt/bin/neuronx-cc\0compile\0")


def _sets(made: Instance, before: str = "", **changes: Any) -> None:
    if before:
        made.prepend(before)
    for name, value in changes.items():
        setattr(made, name, value)


FAULTS: Final = {
    "a chip is missing": Fault(lambda made: (made.root / "dev/neuron0").unlink(), "Neuron devices, but a"),
    "a chip too many": Fault(lambda made: (made.root / "dev/neuron99").touch(), "Neuron devices, but a"),
    "another instance type": Fault(lambda made: _sets(made, type="trn1.2xlarge"), "trn1"),
    "no evidence of devices": Fault(lambda made: _sets(made, without=()), "it has no evidence"),
    "another version of torch": Fault(_other_version, "needs torch"),
    "no runtime": Fault(lambda made: made.program.unlink(), "there is no program"),
    "a runtime without Python": Fault(lambda made: (made.programs / "python3").unlink(), "there is no Python beside"),
    "a Python that does not start": Fault(
        lambda made: (made.programs / "python3").write_text("#!/bin/sh\nexit 3\n"), "does not list its packages"
    ),
    "a server that exits": Fault(lambda made: made.prepend("echo no device >&2; exit 7"), "exited with code 7"),
    "a server that is killed": Fault(lambda made: made.prepend("kill -9 $$"), "was ended by SIGKILL"),
    "a server that is never healthy": Fault(
        lambda made: _sets(made, left=2.0, before="sleep 30"), "did not answer GET /health"
    ),
    "a port in use": Fault(_listens, "another process listens on port"),
    "a recompilation in the log": Fault(_behaves("recompiles"), "Recompiling"),
    "a running compiler": Fault(_compiles, "runs on this instance"),
    "a compiler that is called": Fault(lambda made: made.prepend("neuronx-cc compile"), "a compiler was called"),
    "a file that the server adds": Fault(
        lambda made: made.prepend("for tree in served-serving/[a-m]*/; do touch $tree/added; done"), "was written by"
    ),
    "a file that the server changes": Fault(
        lambda made: made.prepend(
            'file=$(find served-serving -name "model*" -type f | sort | head -n 1)\n'
            'cp "$file" x; rm "$file"; tail -c +2 x > "$file"; rm x'
        ),
        "",
    ),
    "no line that proves the load": Fault(_behaves("silent"), "its log has no line", ("vllm-nxdi", "vllm-neuron")),
    "an all-reduce that hangs": Fault(_collective("sleep 60 & wait"), "allr over 2 ranks has not ended", RANKS),
    "an all-gather that fails": Fault(
        _collective('case "$*" in *allg) echo NRT_NETWORK_PROXY_FAILURE; exit 1;; esac'),
        "allg over 2 ranks ended with code 1: NRT_NETWORK_PROXY_FAILURE",
        RANKS,
    ),
    "a constant answer": Fault(_behaves("constant"), "with the same token and log-probability", SPEAKING),
    "an answer that is no number": Fault(_behaves("nan"), "log-probability nan", SPEAKING),
    "a server that hangs at its second request": Fault(
        _behaves("hangs later"), "does not answer a request for one token", SPEAKING
    ),
    "a file that the store changed": Fault(_changed("model.pt"), "", ("vllm-nxdi", "optimum")),
    "a program that the store changed": Fault(_changed(".neff"), "", ("vllm-neuron",)),
}


@pytest.mark.parametrize(
    ("name", "runtime"), [(name, each) for name, fault in FAULTS.items() for each in fault.runtimes]
)
def test_a_fault_is_stopped_before_the_first_request_in_one_sentence(
    name: str, runtime: str, instance: Callable[[str], Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate.Completions.__init__, "__defaults__", (0.5,))
    monkeypatch.setattr(agent_run, "_LOG_DELAY", 0.5)
    made, fault = instance(runtime), FAULTS[name]
    fault.inject(made)
    made.promote()
    with pytest.raises((NotReady, StoreError)) as stopped:
        made.start()
    sentence = str(stopped.value)
    assert fault.said in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("runtime", RANKS)
def test_collectives_run_over_the_ranks_of_the_contract_before_the_server(
    runtime: str, instance: Callable[[str], Instance]
) -> None:
    made = instance(runtime)
    asked = made.root / "asked"
    (made.programs / "nccom-test").write_text(f'#!/bin/sh\necho "$NEURON_RT_NUM_CORES" "$@" >> {asked}\n')
    made.prepend(f"test -e {asked} || exit 9")
    made.promote()
    assert not made.start().has_ended()
    sizes = "--minbytes 1kb --maxbytes 1kb --datatype fp32"
    assert asked.read_text().splitlines() == [f"2 -r 2 {sizes} {each}" for each in ("allr", "allg")]


def test_without_the_tool_the_server_is_the_first_to_run_a_collective(instance: Callable[[str], Instance]) -> None:
    made = instance("vllm-nxdi")
    (made.programs / "nccom-test").unlink()
    made.promote()
    assert not made.start().has_ended()


def test_a_forbidden_variable_is_named(instance: Callable[[str], Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    for runtime, name in (("vllm-neuron", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"),):
        made = instance(runtime)
        made.promote()
        monkeypatch.setenv(name, "1")
        with pytest.raises(NotReady, match=name):
            made.start()
