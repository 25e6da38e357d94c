"""The first boot of an instance of a deployed fleet: user data of its launch template, systemd, journald, the agent.

The fleet, its alarms and its store are deployed on the local AWS. An instance is a folder in place of its root;
programs that would change the machine are stand-ins: `aws` and `curl` reach the local AWS, `systemctl` starts units as
systemd does. The agent, the forwarder of its journal and the model server are real processes.
"""

import base64
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Final

import pytest
from botocore.exceptions import ClientError
from moto.sns.models import sns_backends

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.s3 import connect
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.trust.keys import KeyFile, make_key_file
from nxpipe.artifact_store.trust.policy import sign_evidence, signing_with
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.pipeline.config import ServingFleet
from nxpipe.stacks.observability import ObserveStack
from tests.agent.journal import Journal
from tests.agent.metadata import metadata_service
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import S3, publish_proven, put
from tests.localaws.formation.provider import client_of
from tests.localaws.server import local_aws
from tests.pipeline.command import NXPIPE
from tests.pipeline.command_server import Running, command_server
from tests.stacks.fleet_world import configured, world
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy
from tests.stacks.rollout_world import bootstrapped
from tests.stacks.sandbox import Sandbox

GROUP: Final = "demo-search-blue"
LOG: Final = "/nxpipe/demo/search"
SERVER: Final = "model-server"  # on the PATH of the instance
_PROGRAM: Final = Path(__file__).with_name("model_server.py")
_SETTINGS: Final = """
command = ["{server}"]
golden_inputs = false
port = {port}
health_check = {{ interval = "5s", timeout = "2s" }}
ready_within = "1m"
draining = "1s"
probe = {{ path = "/predict", body = '{{"text": "a"}}', expect = '{{"labels": ["capital", "heart"]}}' }}
[signing]
require = ["production"]
[[signing.trusted]]
name = "release"
key = "file:release.key.pub"
"""
# Folders and files of an instance that user data names, which are below the sandbox's root in a test.
_PLACES: Final = (
    "/dev/console",
    "/etc/nxpipe",
    "/etc/systemd/system",
    "/opt/nxpipe",
    "/run/nxpipe",
    "/var/lib/nxpipe",
    "/var/log/nxpipe-boot.log",
)


@dataclass
class BootFleet:
    """The deployed fleet, whose channel serves a signed artifact of the Neuron compiler."""

    folder: Path
    store: S3
    port: int
    topic: str
    environment: dict[str, str]  # of clients of its AWS
    published: Published
    stocked: dict[str, bytes] = field(default_factory=dict)

    @property
    def user_data(self) -> str:
        group = self.group()
        template = group["LaunchTemplate"]["LaunchTemplateId"]
        versions = client_of("ec2", REGION).describe_launch_template_versions(LaunchTemplateId=template)
        newest = max(versions["LaunchTemplateVersions"], key=lambda version: version["VersionNumber"])
        return base64.b64decode(newest["LaunchTemplateData"]["UserData"]).decode()

    def group(self) -> dict[str, Any]:
        (found,) = client_of("autoscaling", REGION).describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])[
            "AutoScalingGroups"
        ]
        return dict(found)

    def scale(self, size: int) -> None:
        client_of("autoscaling", REGION).set_desired_capacity(AutoScalingGroupName=GROUP, DesiredCapacity=size)

    def activities(self, instance: str) -> list[str]:
        """How launches of an instance ended, other than well."""
        found = client_of("autoscaling", REGION).describe_scaling_activities(AutoScalingGroupName=GROUP)["Activities"]
        return [
            entry["StatusCode"]
            for entry in found
            if entry["StatusCode"] != "Successful" and instance in entry["Description"]
        ]

    def lines(self, instance: str) -> dict[str, list[str]]:
        """All events of an instance, by stream."""
        logs = client_of("logs", REGION)
        streams = logs.describe_log_streams(logGroupName=LOG, logStreamNamePrefix=f"{instance}/")["logStreams"]
        return {
            name.removeprefix(f"{instance}/"): [
                event["message"]
                for event in logs.get_log_events(logGroupName=LOG, logStreamName=name, startFromHead=True)["events"]
            ]
            for name in (stream["logStreamName"] for stream in streams)
        }

    @property
    def messages(self) -> list[str]:
        """All that was published to the topic of alarms."""
        sent = sns_backends[ACCOUNT][REGION].topics[self.topic].sent_notifications
        return [str(message) for _, message, *_ in sent]

    # The content of the store

    def key(self) -> KeyFile:
        return KeyFile.open(self.folder / "release.key")

    def publish(self, *, seed: str = "a", **changes: Any) -> Published:
        return _publish(self.store.store, self.key(), seed, **changes)

    def serve(self, published: Published, *, signed: bool = True, channel: str = "production") -> None:
        """The channel serves this artifact and nothing else, as its first generation."""
        self.clear(channel)
        plain = first_generation(channel, [Served.of(published)])
        signatures = (signing_with(self.key())(plain.signed_bytes()),) if signed else ()
        generation: Generation = plain.model_copy(update={"signatures": signatures})
        ChannelLog(self.store.backend, channel).append(lambda _: generation)

    def clear(self, channel: str = "production") -> None:
        for path in self.store.objects():
            if f"/{channel}/" in f"/{path}" or path.endswith(f"/{channel}"):
                self.store.remove(path)

    @property
    def bundle(self) -> str:
        """Its path in the store."""
        (path,) = (path for path in self.stocked if path.startswith("agents/"))
        return path

    def restock(self) -> None:
        """The content of the store as it was at the start."""
        present = self.store.objects()
        for path in present.keys() - self.stocked.keys():
            self.store.remove(path)
        for path, data in self.stocked.items():
            if present.get(path) != data:
                self.store.write(path, data)


def _publish(store: Store, key: KeyFile, seed: str = "a", **changes: Any) -> Published:
    """A verified and signed artifact of the Neuron compiler."""
    made = put(store, seed, request=seed, model="acme/bert").model_copy(update={"backend": "neuronx", **changes})
    published = publish_proven(store, made)
    Signatures(store).add(published, key, "ci")
    sign_evidence(store, published, key, "ci")
    return published


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def boot_fleet(folder: Path) -> Iterator[BootFleet]:
    """A fleet of one instance, deployed with its alarms."""
    bundle = Sandbox(folder / "bundle").bundle.read_bytes()
    make_key_file(folder / "release.key")
    port = _free_port()
    config = configured(
        folder, more=_SETTINGS.format(server=SERVER, port=port), size="{ min = 0, desired = 0, max = 4 }"
    )
    made = world(config, folder, agent=sha256_hex(bundle))
    observe = ObserveStack(
        made.serve.node.scope,
        "demo-observe",
        project="demo",
        observe=config.observe,
        budget=config.budget,
        guards=config.rollout.guards,
        fleets=[made.serve.handle],
        hourly={},
        env=HERE,
    )
    with local_aws() as environment:
        bootstrapped()
        deploy(*made.stacks, observe)
        buckets = client_of("s3", REGION).list_buckets()["Buckets"]
        name = next(entry["Name"] for entry in buckets if "artifacts" in entry["Name"])
        (topic,) = client_of("sns", REGION).list_topics()["Topics"]
        store = _store(name)
        published = _publish(store.store, KeyFile.open(folder / "release.key"))
        fleet = BootFleet(folder, store, port, topic["TopicArn"], environment, published)
        fleet.store.write(f"agents/{sha256_hex(bundle)}.tar", bundle)
        fleet.serve(published)
        fleet.stocked = fleet.store.objects()
        assert isinstance(config.fleets[0], ServingFleet)
        yield fleet


def _store(bucket: str) -> S3:
    backend = connect(bucket, "models")
    return S3(Store(backend), backend, client_of("s3", REGION), bucket, "models/")


# The stand-ins for programs of an instance.

_ASK: Final = """reply=$(printf '%s\\0' "$@" | curl -sS --data-binary @- "$MACHINE/{name}")
text=${{reply#* }}
[ -z "$text" ] || printf '%s\\n' "$text" >&2
exit "${{reply%% *}}"
"""
_CURL: Final = 'exec curl "${@//169.254.169.254/${METADATA#http://}}"'

Reply = tuple[int, str]  # the exit code and what is written to stderr


@dataclass
class Machine:
    """One instance of the fleet that boots."""

    fleet: BootFleet
    sandbox: Sandbox
    journal: Journal
    instance: str
    metadata: dict[str, str | bytes]
    environment: dict[str, str] = field(default_factory=dict)  # of the agent
    before_agent: list[Callable[["Machine"], None]] = field(default_factory=list)
    aws_says: Callable[[Sequence[str]], Reply | None] = lambda words: None
    wrapper: tuple[str, ...] = ()  # a program that starts the agent
    unit_fails: bool = False  # systemd cannot start the agent
    code: int | None = None
    err: str = ""
    _forwarder: "Running | subprocess.Popen[bytes] | None" = None
    _agents: list[Callable[[], object]] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)

    @property
    def root(self) -> Path:
        return self.sandbox.root

    def boot(self) -> None:
        """Run the user data to its end, and let the forwarder deliver the rest."""
        script = self.fleet.user_data
        for place in _PLACES:
            assert place in script, place
            script = script.replace(place, f"{self.root}{place}")
        with _listening(self) as address:
            ran = self.sandbox.run(script, MACHINE=address, METADATA=str(self.environment[_METADATA]))
        self.code, self.err = ran.code, ran.err
        self.stop()

    def stop(self) -> None:
        for end in self._agents:
            end()
        self._agents.clear()
        if self._forwarder is not None:
            self._forwarder.send_signal(signal.SIGTERM)
            self._forwarder.wait(30)
            self._forwarder = None
        self._held.close()

    def hold(self, resource: Any) -> None:
        """Keep it open until the test is over."""
        self._held.enter_context(resource)

    def answer_s3(self, status: int, code: str, message: str) -> None:
        """S3 refuses each request of the agent."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        address = self._held.enter_context(_answering(lambda path, words: (status, body)))
        self.environment["AWS_ENDPOINT_URL_S3"] = address

    @property
    def console(self) -> str:
        path = self.root / "dev/console"
        return path.read_text() if path.exists() else ""

    def configure_server(self, **behaviour: object) -> None:
        """The model server of the image."""
        words = [sys.executable, str(_PROGRAM), json.dumps({"port": self.fleet.port, **behaviour})]
        path = self.root / "usr/bin" / SERVER
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
        path.chmod(0o755)

    # The programs

    def aws(self, words: list[str]) -> Reply:
        if (reply := self.aws_says(words)) is not None:
            return reply
        try:
            if words[:2] == ["s3", "cp"]:
                bucket, _, key = words[-2].removeprefix("s3://").partition("/")
                s3 = client_of("s3", REGION)
                s3.head_object(Bucket=bucket, Key=key)
                Path(words[-1]).write_bytes(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
            else:
                _call(words)
        except ClientError as error:
            return (1, f"fatal error: {error}") if words[0] == "s3" else (254, f"\n{error}")
        return 0, ""

    def systemctl(self, words: list[str]) -> Reply:
        if words[0] != "enable":
            return 0, ""
        unit = words[-1]
        if unit == "nxpipe-logs.service":
            self._forwarder = self._start(unit, subprocess.DEVNULL)
        if unit != "nxpipe-agent.service":
            return 0, ""
        for change in self.before_agent:
            change(self)
        (self.root / "run/nxpipe").mkdir(parents=True, exist_ok=True)  # RuntimeDirectory=
        ready = not self.unit_fails and self._serve(unit)
        if not ready and not self.unit_fails and self._may_start(unit):  # systemd starts it again after RestartSec=
            ready = self._serve(unit)
        return (0, "") if ready else (1, f"Job for {unit} failed because the control process exited with error code.")

    def _may_start(self, unit: str) -> bool:
        conditions = [value for name, value in self._unit(unit) if name == "ConditionPathExists"]
        return not any(value.startswith("!") and Path(value[1:]).exists() for value in conditions)

    def _serve(self, unit: str) -> bool:
        """Start the agent; True once it notifies that it is ready."""
        address = f"@nxpipe-{os.getpid()}-{self.instance}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.bind(f"\0{address[1:]}")
            channel.settimeout(0.05)
            ended = threading.Event()
            with NamedTemporaryFile() as file:  # a command of the server writes to files only
                copy = os.fdopen(os.open(file.name, os.O_RDONLY), "rb")
                output = threading.Thread(target=self._record, args=(copy, ended))
                output.start()
                agent = self._start(unit, file.fileno(), NOTIFY_SOCKET=address)
            threading.Thread(target=_await, args=(agent, ended)).start()
            while not ended.is_set():
                try:
                    if channel.recv(4096).startswith(b"READY=1"):
                        self._agents.append(partial(_end, agent, output))
                        return True
                except TimeoutError:
                    continue
            output.join()
            return False

    def _record(self, output: IO[bytes], ended: threading.Event) -> None:
        """journald: the lines of the unit, until its process has ended."""
        rest = b""
        with output:
            while True:
                over = ended.wait(0.02)
                *lines, rest = (rest + output.read()).split(b"\n")
                for line in lines:
                    self.journal.write(line.decode(errors="replace"))
                if over:
                    return

    def _unit(self, unit: str) -> list[tuple[str, str]]:
        text = (self.root / "etc/systemd/system" / unit).read_text()
        return [(name, value) for name, found, value in (line.partition("=") for line in text.splitlines()) if found]

    def _start(self, unit: str, output: int, **more: str) -> "Running | subprocess.Popen[bytes]":
        """Start the command of a unit with its settings, in this version of nxpipe."""
        settings = {"PATH": f"{self.root}/usr/bin:{os.environ['PATH']}", "HOME": str(self.root), **self.environment}
        for name, value in self._unit(unit):
            if name == "Environment":
                key, _, text = value.replace("%S", f"{self.root}/var/lib").partition("=")
                settings[key] = text
            if name == "EnvironmentFile":
                settings |= dict(line.split("=", 1) for line in Path(value).read_text().splitlines())
        (command,) = (value for name, value in self._unit(unit) if name == "ExecStart")
        program, *words = (word.replace("%%", "%").replace("$$", "$") for word in shlex.split(command))
        assert program == f"{self.root}/opt/nxpipe/agent/bin/nxpipe"
        if "--to" in words:
            words[words.index("--to") : 0] = ["--devices", f"{self.root}/dev"]
        Path(settings["NXPIPE_FORWARDED"]).parent.mkdir(parents=True, exist_ok=True)  # StateDirectory=
        (self.root / "var/lib/nxpipe").mkdir(parents=True, exist_ok=True)
        if more and self.wrapper:
            arguments = [*self.wrapper, str(NXPIPE), *words]
            return subprocess.Popen(
                arguments, cwd=self.root, env=settings | more, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        arguments = [str(NXPIPE), *words]
        with Path(os.devnull).open("w") as nothing:
            descriptor = nothing.fileno() if output == subprocess.DEVNULL else output
            return command_server().start(arguments, self.root, settings | more, descriptor, descriptor)


def _await(agent: "Running | subprocess.Popen[bytes]", ended: threading.Event) -> None:
    try:
        agent.wait(150)
    finally:
        ended.set()


def _end(agent: "Running | subprocess.Popen[bytes]", output: threading.Thread) -> None:
    agent.send_signal(signal.SIGTERM)
    output.join()


_METADATA: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"


def _call(words: Sequence[str]) -> None:
    """A command of the AWS CLI: SERVICE OPERATION --name value."""
    service, operation, *rest = words
    client = client_of(service, REGION)
    method = operation.replace("-", "_")
    shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method]).input_shape
    members = {name.lower(): name for name in shape.members}
    given: dict[str, Any] = {}
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        if (member := members.get(name.replace("-", ""))) is not None:
            given[member] = json.loads(Path(value[7:]).read_text()) if value.startswith("file://") else value
    getattr(client, method)(**given)


@contextmanager
def _listening(machine: Machine) -> Iterator[str]:
    """The address at which the stand-ins reach this process."""
    programs: Mapping[str, Callable[[list[str]], Reply]] = {"/aws": machine.aws, "/systemctl": machine.systemctl}

    def run(path: str, body: bytes) -> tuple[int, bytes]:
        code, text = programs[path](body.decode().split("\0")[:-1])
        return 200, f"{code} {text}".encode()

    with _answering(run) as address:
        yield address


@contextmanager
def _answering(answer: Callable[[str, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """The address of an HTTP server that answers each path and body."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, body = answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815, the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def booting(fleet: BootFleet, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A new instance that waits for its hook and can serve; a test takes away what it is about."""
    fleet.scale(1)
    (state,) = fleet.group()["Instances"]
    instance = state["InstanceId"]
    sandbox = Sandbox(folder / "instance")
    for name, does in (("aws", _ASK.format(name="aws")), ("systemctl", _ASK.format(name="systemctl")), ("curl", _CURL)):
        sandbox.replace(name, does)
    for name in ("neuron0", "neuron_monitor", "null"):
        (sandbox.root / "dev" / name).touch()
    (folder / "journal").mkdir()
    with metadata_service() as metadata:
        metadata.values |= {
            "instance-id": instance,
            "instance-type": "inf2.xlarge",
            "placement/region": REGION,
            "tags/instance/aws:autoscaling:groupName": GROUP,
        }
        machine = Machine(fleet, sandbox, Journal.installed(folder / "journal", patch), instance, metadata.values)
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_") or name == "JOURNAL"}
        machine.environment |= {**aws, _METADATA: metadata.url}
        machine.configure_server()
        try:
            yield machine
        finally:
            machine.stop()
            fleet.scale(0)
            fleet.restock()
