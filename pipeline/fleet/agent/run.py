"""Agent on an instance: the artifact of its fleet's channel, and the server of the artifact."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.contract import contract_of_folder, installed_versions, interpreter_of, require_pins
from nxpipe.pipeline.fleet.agent.gate import (
    Completions,
    TokenProgress,
    require_collectives,
    require_cores,
    require_devices,
    require_golden_answers,
    require_programs_for,
    server_command,
)
from nxpipe.pipeline.fleet.agent.group import FleetInstance
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer, Readiness
from nxpipe.pipeline.fleet.agent.trees import LaidOut, ProofOfNoCompile, lay_out
from nxpipe.pipeline.fleet.monitor.source import Compilers
from nxpipe.pipeline.util.errors import NotReady

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Requirements
    from nxpipe.artifact_store.fetch.selection import Selection
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.pipeline.config.serving_fleet import ServingFleet


@dataclass(frozen=True)
class FleetArtifact:
    """The artifact of a fleet's instances, and the channel that serves it."""

    channel: str
    selection: "Selection"

    @classmethod
    def of(cls, store: "Store", model: ServedModel, trust: "ChannelVerifier") -> "FleetArtifact":
        """That of the first channel that is not empty. An unreadable or untrusted channel is an error."""
        from nxpipe.artifact_store.fetch.selection import by_channel

        *preferred, last = model.channels
        for channel in preferred:
            with suppress(ChannelEmpty):
                return cls(channel, by_channel(store, channel, model.model_id, model.target, trust))
        return cls(last, by_channel(store, last, model.model_id, model.target, trust))

    @property
    def manifest(self) -> "Manifest":
        return self.selection.manifest

    def require_evidence(self, store: "Store", requirements: "Requirements") -> None:
        """Raise NotReady if the evidence that the channel requires is not in the store, except for the kinds that the
        promotion did without."""
        from nxpipe.artifact_store.channel.change import evidence_faults

        for kind, reason in evidence_faults(store, self.manifest, requirements).items():
            if kind not in self.selection.without:
                raise NotReady(f"{self.manifest.name} of channel {self.channel} cannot be served: {reason}")

    def fetch(self, store: "Store", folder: Path, *, rehearsal: bool) -> None:
        """Fetches the artifact into the folder and verifies every byte against its digest. Nothing waits for the disk:
        the agent fetches at every boot, and what a power loss has changed is fetched again."""
        from nxpipe.artifact_store.fetch.folder import Programs, fetch

        fetch(store.blobs, self.manifest, folder, programs=Programs.EMULATOR if rehearsal else None, flush=False)


ARTIFACT: Final = "NXPIPE_ARTIFACT"  # environment variable of the server: the artifact's folder

_LOOK: Final = 10.0  # seconds between two looks at a server's progress
_LOG_DELAY: Final = 5.0  # seconds within which a ready server's lines are read
_STALL: Final = 120.0  # seconds without progress after which a server is restarted

Step: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class ServerStart:
    """The server to start, and what of its log and files shows that it compiles nothing."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    laid_out: LaidOut | None = None  # the trees of another runtime
    proof: ProofOfNoCompile | None = None

    def require_proven(self) -> None:
        """Raise NotReady if a server that is ready compiled, or may have."""
        until = time.monotonic() + _LOG_DELAY
        while (fault := self._fault()) is not None:
            if time.monotonic() > until:
                raise NotReady(fault)
            time.sleep(0.05)
        if self.laid_out is not None:
            self.laid_out.require_unchanged()

    def _fault(self) -> str | None:
        return self.proof.fault() or self.proof.unproven() if self.proof is not None else None


@dataclass(frozen=True)
class Agent:
    """The agent of an instance. `command` is the server; None: that of the artifact's contract, by default `nxpipe
    serve`; empty: a unit of the AMI."""

    store: "Store"
    model: ServedModel
    trust: "ChannelVerifier"
    requirements: "Callable[[str], Requirements]"  # of an artifact of a channel
    folder: Path
    devices: Path
    command: tuple[str, ...] | None
    fleet: "ServingFleet"
    words: tuple[str, ...] = ()  # the options of the store and the configuration
    processes: Path = Path("/proc")
    started: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        return self.started + self.fleet.ready_within.total_seconds()

    def select(self) -> FleetArtifact:
        return FleetArtifact.of(self.store, self.model, self.trust)

    def require_machine(self, instance: FleetInstance, step: Step) -> None:
        """Raise NotReady if the instance lacks the server's program or a device of its type."""
        if self.command:
            _require_program(self.command)
        with step(f"check the devices of a {instance.type}"):
            require_devices(instance.type, self.devices)

    def require_servable(self, artifact: FleetArtifact, instance: FleetInstance) -> None:
        """Raise NotReady for programs or evidence with which no instance of the fleet may serve."""
        require_programs_for(instance.type, artifact.manifest, self.model.host)
        artifact.require_evidence(self.store, self.requirements(artifact.channel))

    def prepare(self, instance: FleetInstance, step: Step) -> ServerStart | None:
        """Everything that must hold before the server starts; None without a server."""
        self.require_machine(instance, step)
        with step(f"fetch {self.model.model_id} from channel {' or '.join(self.model.channels)}"):
            artifact = self.select()
            self.require_servable(artifact, instance)
            artifact.fetch(self.store, self.folder, rehearsal=self.model.host.rehearsal)
        self.require_golden_answers(artifact.manifest, instance, step)
        return self.server_of(artifact.manifest, instance, step)

    def require_golden_answers(self, manifest: "Manifest", instance: FleetInstance, step: Step) -> None:
        """Run the golden inputs of the fetched artifact on every core, which no server may have. Raises NotReady."""
        if self.fleet.golden_inputs and manifest.executables:
            with step("run the golden inputs of the artifact on every core"):
                left = max(1.0, self.deadline - time.monotonic())
                sentence = require_golden_answers(self.folder, self.fleet, instance.type, left, self.words)
            with step(sentence):
                pass

    def server_of(self, manifest: "Manifest", instance: FleetInstance, step: Step) -> ServerStart | None:
        """The server of the fetched artifact, whose files are laid out; None without a server."""
        environ = {**os.environ, ARTIFACT: str(self.folder)}
        if not manifest.serving:
            argv = server_command(self.folder, self.fleet) if self.command is None else self.command
            return ServerStart(argv, environ) if argv else None
        contract = contract_of_folder(self.folder)
        assert contract is not None
        require_cores(instance.type, contract)
        with step(f"lay out the files of {contract.runtime}"):
            laid_out = lay_out(contract, self.folder, layout_of(self.folder), self.fleet.port)
            argv = laid_out.argv if self.command is None else self.command
            if not argv:
                raise NotReady(
                    f"contract {contract.name} of {manifest.name} names no server; set `command` of fleet "
                    f"{self.fleet.name}"
                )
            _require_program(argv)
            require_pins(contract, installed_versions(interpreter_of(argv[0])))
            environ = laid_out.environ(environ)
        if contract.tp > 1:
            with step(f"run collectives over {contract.tp} ranks"):
                sentence = require_collectives(contract, environ, max(1.0, self.deadline - time.monotonic()))
            with step(sentence):
                pass
        return ServerStart(argv, environ, laid_out, ProofOfNoCompile(contract, Compilers(self.processes)))

    @contextmanager
    def serve(self, start: ServerStart, instance: FleetInstance, step: Step) -> Iterator[ModelServer]:
        """Runs the server within the block, which begins when it has answered the health checks and the probe."""
        fleet, proof = self.fleet, start.proof
        readiness = Readiness(fleet, instance.address, self.deadline)
        readiness.require_free_port()
        server = ModelServer(start.argv, start.environ, fleet.draining.total_seconds(), proof.line if proof else None)
        faults = [] if proof is None else [proof.fault]
        with server:
            server.require(*faults)
            with step(f"start the server and wait for GET {fleet.health} on port {fleet.port}"):
                readiness.await_health(server)
            if fleet.probe:
                with step(f"send the probe {fleet.probe.method} {fleet.probe.path}"):
                    readiness.require_probe(server)
            completions = Completions(instance.address, fleet.port)
            if completions.generates():
                with step("complete five prompts"):
                    completions.require_varied()
                faults.append(TokenProgress(completions, _STALL).fault)
            start.require_proven()
            server.watched_by(faults, every=_LOOK)
            yield server


def layout_of(folder: Path) -> Path:
    """The folder of the trees of the artifact in `folder`."""
    return folder.with_name(f"{folder.name}-serving")


def _require_program(command: tuple[str, ...]) -> None:
    if shutil.which(command[0]) is None:
        raise NotReady(f"there is no program {command[0]!r} on this instance; install it in the AMI")
