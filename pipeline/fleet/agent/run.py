"""Agent on an instance: instance metadata, lifecycle hook, artifact, server.

Auto Scaling keeps a new instance out of service until the agent completes the lifecycle hook.
"""

import http.client
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

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
from nxpipe.pipeline.fleet.agent.logs import deliver_last_words
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer, Readiness
from nxpipe.pipeline.fleet.agent.trees import LaidOut, ProofOfNoCompile, lay_out
from nxpipe.pipeline.fleet.monitor.source import Compilers
from nxpipe.pipeline.util.errors import NotReady
from nxpipe.pipeline.util.exit_codes import INTERNAL, exit_code_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Requirements
    from nxpipe.artifact_store.fetch.selection import Selection
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.pipeline.config.serving_fleet import ServingFleet


_ENDPOINT: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as in the AWS SDKs
_DEFAULT: Final = "http://169.254.169.254"
_TOKEN: Final = "X-aws-ec2-metadata-token"  # noqa: S105, the name of a header
_LIFETIME: Final = f"{_TOKEN}-ttl-seconds"
_SECONDS: Final = 5
_MAX_BYTES: Final = 1024  # of a response: a group's name has 255 characters
_NAME: Final = re.compile("[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class FleetInstance:
    id: str
    type: str
    region: str
    group: str | None  # the Auto Scaling group that launched it
    address: str  # of its primary network interface, to which a load balancer sends requests


def this_instance(environ: Mapping[str, str]) -> FleetInstance:
    endpoint = environ.get(_ENDPOINT) or _DEFAULT
    try:
        with closing(_Metadata(endpoint)) as metadata:
            return FleetInstance(
                id=metadata.require("instance-id"),
                type=metadata.require("instance-type"),
                region=metadata.require("placement/region"),
                group=metadata.get("tags/instance/aws:autoscaling:groupName"),
                address=metadata.require("local-ipv4"),
            )
    except (OSError, ValueError, http.client.HTTPException) as problem:
        raise NotReady(
            f"the instance metadata service at {endpoint} does not answer ({problem}); run the agent "
            "on an EC2 instance, outside of containers, or set its hop limit to 2"
        ) from problem


class _Metadata:
    """One session with the service."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._endpoint = endpoint
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_SECONDS)
        self._token = self._request("PUT", "/latest/api/token", {_LIFETIME: "60"}) or ""

    def get(self, path: str) -> str | None:
        return self._request("GET", f"/latest/meta-data/{path}", {_TOKEN: self._token})

    def require(self, path: str) -> str:
        value = self.get(path)
        if value is None:
            raise NotReady(f"the instance metadata service at {self._endpoint} has no {path}; is this an EC2 instance?")
        if not _NAME.fullmatch(value):
            raise self._invalid(path)
        return value

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        self._connection.request(method, path, headers=dict(headers))
        answer = self._connection.getresponse()
        body = answer.read(_MAX_BYTES + 1)
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise NotReady(f"the instance metadata service at {self._endpoint} answers {path} with {answer.status}")
        text = body.decode(errors="replace")
        if len(body) > _MAX_BYTES or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
            raise self._invalid(path)
        return text

    def _invalid(self, path: str) -> NotReady:
        return NotReady(
            f"the instance metadata service at {self._endpoint} returns no valid {path}; check which service listens "
            f"there, and {_ENDPOINT}"
        )


class HookNotCompleted(NotReady):
    """Auto Scaling did not take the answer, so that it would not take another one."""


@dataclass
class LifecycleGate:
    """The lifecycle hook of an instance that is getting ready. `require` raises if it must not go into service."""

    instance: FleetInstance
    require: Callable[[], object] = lambda: None


class GivenUp(SystemExit):
    """The end of an agent that has written why it gives its instance up."""


@contextmanager
def lifecycle_gate(name: str | None, environ: Mapping[str, str]) -> Iterator[LifecycleGate]:
    """Completes the hook with CONTINUE at the end of the block, and with ABANDON on any exception, after its log.

    An abandoned instance is replaced at once. SIGTERM abandons it too: systemd stops the agent with it when the
    instance is shut down before it could serve. An instance that is past its hook, as after a restart of the agent in
    service, is not given up. Without a name there is no hook.
    """
    gate = LifecycleGate(this_instance(environ))
    hook = LifecycleHook(name, gate.instance) if name else None
    try:
        yield gate
        gate.require()
        if hook:
            hook.answer("CONTINUE", gate.require)
    except HookNotCompleted:
        raise
    except BaseException as cause:
        if hook is None or (isinstance(cause, Exception) and not hook.is_ahead()):
            raise
        written = deliver_last_words(gate.instance.id, cause, environ)
        abandoned = hook.give_up()
        if written:
            if abandoned and (mark := environ.get(_GIVEN_UP)):
                _leave(Path(mark))
            raise GivenUp((exit_code_of(cause) or INTERNAL).number) from cause
        raise


_GIVEN_UP: Final = "NXPIPE_GIVEN_UP"  # environment variable: the file that an agent leaves on an abandoned instance


def _leave(mark: Path) -> None:
    """Leave the file with which systemd does not start the agent again, and user data reports nothing."""
    try:
        mark.touch()
    except OSError as failed:
        sys.stderr.write(f"nxpipe: {mark} cannot be written ({failed.strerror}); the agent may start again\n")


# States in which the hook's action is still to come: the launch, the entry to a warm pool, and the start of an instance
# that leaves it.
_BEFORE_THE_ACTION: Final = frozenset(
    ["Pending", "Pending:Wait", "Warmed:Pending", "Warmed:Pending:Wait", "Warmed:Stopped", "Warmed:Hibernated"]
)
_ACTION_WITHIN: Final = 300  # seconds
_PAUSES: Final = (0.5, 1, 2, 5)  # seconds between two attempts; the last one repeats


@dataclass(frozen=True)
class LifecycleHook:
    name: str
    instance: FleetInstance

    def answer(self, result: Literal["CONTINUE", "ABANDON"], require: Callable[[], object] = lambda: None) -> bool:
        """Completes the hook. False if none is pending, as after a restart on an instance that already serves.

        An agent may be faster than Auto Scaling, above all on an instance that leaves a warm pool: then it waits until
        the action is pending.
        """
        deadline, attempt = time.monotonic() + _ACTION_WITHIN, 0
        while not self._complete(result):
            state = self._state(result)
            if state not in _BEFORE_THE_ACTION:
                return False
            if time.monotonic() > deadline:
                raise HookNotCompleted(
                    f"hook {self.name} of group {self._group} has no pending action for instance {self.instance.id}, "
                    f"which is in state {state} for {_ACTION_WITHIN} s; check the name of the hook"
                )
            time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1
            require()
        return True

    def is_ahead(self) -> bool:
        """False if the instance is past the hook or terminated. Without an answer of AWS it counts as ahead."""
        try:
            return self._state("ABANDON") in _BEFORE_THE_ACTION
        except NotReady:
            return True

    def _complete(self, result: str) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client().complete_lifecycle_action(
                AutoScalingGroupName=self._group,
                LifecycleHookName=self.name,
                InstanceId=self.instance.id,
                LifecycleActionResult=result,
            )
        except ClientError as refused:
            if "No active Lifecycle Action" in refused.response["Error"]["Message"]:
                return False
            raise self._failure(result, refused) from refused
        except BotoCoreError as failed:
            raise self._failure(result, failed) from failed
        return True

    def _state(self, result: str) -> str | None:
        """The instance's lifecycle state; None if it is in no group."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            response = self._client().describe_auto_scaling_instances(InstanceIds=[self.instance.id])
        except (BotoCoreError, ClientError) as failed:
            raise self._failure(result, failed) from failed
        return next((str(entry["LifecycleState"]) for entry in response["AutoScalingInstances"]), None)

    def give_up(self) -> bool:
        """Abandons the instance; a failure to do so is printed, because the caller reports the cause."""
        try:
            return self.answer("ABANDON")
        except NotReady as failure:
            sys.stderr.write(f"{failure}\n")
            return False

    @property
    def _group(self) -> str:
        if self.instance.group is None:
            raise NotReady(
                f"instance {self.instance.id} has no Auto Scaling group in its metadata, so hook {self.name} cannot be "
                "completed; its launch template must allow instance tags in the metadata, or run without --hook"
            )
        return self.instance.group

    def _client(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        retries = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 5})
        return Session().create_client("autoscaling", region_name=self.instance.region, config=retries)

    def _failure(self, result: str, problem: Exception) -> HookNotCompleted:
        return HookNotCompleted(
            f"hook {self.name} of group {self._group} was not completed with {result} for instance {self.instance.id}: "
            f"{problem}; allow autoscaling:CompleteLifecycleAction and DescribeAutoScalingInstances in the instance's "
            "role, and a route to its endpoint"
        )


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

    def prepare(self, instance: FleetInstance, step: Step) -> ServerStart | None:
        """Everything that must hold before the server starts; None without a server."""
        if self.command:
            _require_program(self.command)
        with step(f"check the devices of a {instance.type}"):
            require_devices(instance.type, self.devices)
        with step(f"fetch {self.model.model_id} from channel {' or '.join(self.model.channels)}"):
            artifact = FleetArtifact.of(self.store, self.model, self.trust)
            require_programs_for(instance.type, artifact.manifest, self.model.host)
            artifact.require_evidence(self.store, self.requirements(artifact.channel))
            artifact.fetch(self.store, self.folder, rehearsal=self.model.host.rehearsal)
        if self.fleet.golden_inputs and artifact.manifest.executables:
            with step("run the golden inputs of the artifact on every core"):
                left = max(1.0, self.deadline - time.monotonic())
                sentence = require_golden_answers(self.folder, self.fleet, instance.type, left, self.words)
            with step(sentence):
                pass
        return self._server(artifact.manifest, instance, step)

    def _server(self, manifest: "Manifest", instance: FleetInstance, step: Step) -> ServerStart | None:
        environ = {**os.environ, ARTIFACT: str(self.folder)}
        if not manifest.serving:
            argv = server_command(self.folder, self.fleet) if self.command is None else self.command
            return ServerStart(argv, environ) if argv else None
        contract = contract_of_folder(self.folder)
        assert contract is not None
        require_cores(instance.type, contract)
        with step(f"lay out the files of {contract.runtime}"):
            laid_out = lay_out(
                contract, self.folder, self.folder.with_name(f"{self.folder.name}-serving"), self.fleet.port
            )
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


def _require_program(command: tuple[str, ...]) -> None:
    if shutil.which(command[0]) is None:
        raise NotReady(f"there is no program {command[0]!r} on this instance; install it in the AMI")
