"""Changes of the channel on an instance in service: its next artifact takes over in place, or on a new instance.

A look at the channel costs two reads. The next artifact is fetched into a folder of its own and checked while the
server goes on; then the instance waits for its turn, leaves service by the standby state of EC2 Auto Scaling, which
takes it from the load balancer and stops the group's health checks, and comes back with the new server. Neuron cores
belong to one process: on devices the golden inputs run between the two servers, on the emulator beside the old one. If
anything about the new version fails, the old one serves again, and the generation is not tried twice.

The file of `Record` is the only memory. An agent that is killed in between starts like any other, with the channel's
artifact, or with the recorded one if the channel's has been refused, and ends a standby that it finds.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.errors import Changed, InvalidDocument, StoreError, StoreUnavailable
from nxpipe.artifact_store.fetch.folder import MANIFEST
from nxpipe.artifact_store.fetch.selection import Selection
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.pipeline.artifacts.contract import contract_of_folder
from nxpipe.pipeline.config.device_measures import UPDATES_REFUSED
from nxpipe.pipeline.fleet.agent.group import FleetInstance, GroupTurn
from nxpipe.pipeline.fleet.agent.run import Agent, FleetArtifact, ServerStart, Step, layout_of
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer
from nxpipe.pipeline.fleet.agent.trees import remove_tree, require_relative
from nxpipe.pipeline.fleet.agent.watch import FleetLog, Metric, log_event
from nxpipe.pipeline.util.errors import AwsError, NotReady, PipelineError, sentence_of
from nxpipe.pipeline.util.files import write_whole

if TYPE_CHECKING:
    pass

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
# What says nothing about a version: the next look tries again.
_PASSING: Final = (StoreUnavailable, Changed, AwsError, OSError)
_SHORT: Final = 12  # characters of a digest in the name of a folder


@dataclass(frozen=True)
class Slot:
    """What a channel serves, by a generation that people can find in its log."""

    channel: str
    generation: int
    digest: str  # of the manifest
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What the instance serves, and the last version that it has refused; a file beside the artifact."""

    path: Path
    served: Slot | None = None
    refused: Slot | None = None

    @classmethod
    def read(cls, path: Path) -> "Record":
        """An unreadable record is none: the channel decides."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            held = json.loads(path.read_bytes())
            return cls(path, *(_slot(held.get(name)) for name in ("served", "refused")))
        return cls(path)

    def write(self) -> None:
        held = {name: asdict(slot) for name in ("served", "refused") if (slot := getattr(self, name)) is not None}
        write_whole(self.path, json.dumps(held).encode())

    def has_refused(self, slot: Slot) -> bool:
        return self.refused is not None and replace(self.refused, without=()) == replace(slot, without=())


def _slot(held: Any) -> Slot | None:
    return Slot(**{**held, "without": tuple(held["without"])}) if held else None


@dataclass(frozen=True)
class Version:
    """An artifact on this instance: the agent with its folder, and its server."""

    slot: Slot
    artifact: FleetArtifact
    agent: Agent
    start: ServerStart
    is_warm: bool  # its golden inputs have run


@dataclass
class ServerUpdates:
    """The server of an instance through the changes of its channel. `log` takes the metric of refused versions."""

    agent: Agent
    instance: FleetInstance
    hook: str | None
    step: Step
    say: Callable[[str], None]
    complain: Callable[[str], None]
    log: FleetLog | None
    dimensions: dict[str, str]
    in_service: Callable[[str], None] = lambda name: None  # called for each server in service, by its artifact
    _version: Version | None = None
    _next: Version | None = None
    _printed: str = ""

    def __post_init__(self) -> None:
        if self.agent.fleet.updates.policy == "replace" and self.instance.group is None:
            raise NotReady(
                f"instance {self.instance.id} is in no Auto Scaling group that could replace it; set updates.policy = "
                f'"swap" or "none" for fleet {self.agent.fleet.name}'
            )
        folder = self.agent.folder
        self.turn = GroupTurn(self.instance, self.agent.fleet, self.hook)
        self.record = Record.read(folder.with_name(f"{folder.name}-updates.json"))
        self._running = ExitStack()

    @contextmanager
    def first(self) -> Iterator[ModelServer | None]:
        """The server of the channel's artifact; if that fails, or has failed, of the recorded one. None: the artifact
        is in place, and a unit of the AMI serves it.

        Without `updates` of the fleet there is one version and no record.
        """
        if not self.agent.fleet.updates.are_followed:
            start = self.agent.prepare(self.instance, self.step)
            with self.agent.serve(start, self.instance, self.step) if start else nullcontext() as server:
                yield server
            return
        try:
            server = self._first()
        except BaseException:
            # Health checks decide about an instance in service. One that is on standby would stay so for ever.
            self._give_back()
            raise
        try:
            yield server
        finally:
            self._running.close()

    def run(self, server: ModelServer) -> tuple[int, str | None]:
        """From the first server to the end of the last: its exit code, and the sentence about an unexpected end."""
        if not self.agent.fleet.updates.are_followed:
            server.begin_service()
            self.in_service(self.agent.model.model_id)
            return server.wait()
        self._give_back()
        while True:
            assert self._version is not None
            server.begin_service()
            self.in_service(self._version.artifact.manifest.name)
            over = threading.Event()
            threading.Thread(target=self._follow, args=(server, over), name="updates", daemon=True).start()
            code, fault = server.wait()
            over.set()
            if (following := self._next) is None or server.is_stopped:
                return code, fault
            self._next = None
            try:
                server = self._swap(self._version, following)
            except BaseException:
                self._give_back()
                raise
            self._give_back()

    # The versions

    def _first(self) -> ModelServer:
        self.agent.require_machine(self.instance, self.step)
        slot, artifact = self._read_channel()
        recorded = self._recorded()
        if recorded is not None and (self.record.has_refused(slot) or recorded[0].digest == slot.digest):
            return self._enter(self._prepare(*recorded, step=self.step))
        if recorded is None:
            server = self._enter(self._prepare(slot, artifact, step=self.step))
        else:
            try:
                server = self._enter(self._prepare(slot, artifact, step=self.step))
            except _PASSING as problem:
                self.complain(f"{sentence_of(problem)}; {recorded[1].manifest.name} goes on")
                return self._enter(self._prepare(*recorded, step=self.step))
            except (PipelineError, StoreError) as fault:
                self._refuse(slot, artifact.manifest.name, recorded[1].manifest.name, fault)
                return self._enter(self._prepare(*recorded, step=self.step))
        self._keep(slot)
        return server

    def _swap(self, old: Version, new: Version) -> ModelServer:
        """Start the new server in place of the old one, which has ended; if that fails, the old one again."""
        self._running.close()
        try:
            server = self._enter(replace(new, agent=replace(new.agent, started=time.monotonic())))
        except (PipelineError, StoreError, OSError) as fault:
            self._refuse(new.slot, new.artifact.manifest.name, old.artifact.manifest.name, fault)
            agent = replace(old.agent, started=time.monotonic())
            start = agent.server_of(old.artifact.manifest, self.instance, self.step)
            assert start is not None
            return self._enter(replace(old, agent=agent, start=start, is_warm=True))
        self._keep(new.slot)
        return server

    def _enter(self, version: Version) -> ModelServer:
        """The running server of a version, which has become ready."""
        self._running = ExitStack()
        if not version.is_warm:
            version.agent.require_golden_answers(version.artifact.manifest, self.instance, self.step)
        server = self._running.enter_context(version.agent.serve(version.start, self.instance, self.step))
        self._version = version
        return server

    def _prepare(self, slot: Slot, artifact: FleetArtifact, *, step: Step, beside: bool = False) -> Version:
        """Fetch, check and lay out an artifact in the folder of its digest. `beside` a server, devices are taken."""
        agent = replace(self.agent, started=time.monotonic(), folder=self._folder(slot))
        with step(f"fetch {artifact.manifest.name} of channel {slot.channel}"):
            if slot != self.record.served:
                agent.require_servable(artifact, self.instance)
            self._remove_others(agent.folder)
            artifact.fetch(agent.store, agent.folder, rehearsal=agent.model.host.rehearsal)
        if beside:
            assert self._version is not None
            require_relative(*(contract_of_folder(each.folder) for each in (agent, self._version.agent)))
        is_warm = not beside or agent.fleet.rehearsal
        if is_warm:
            agent.require_golden_answers(artifact.manifest, self.instance, step)
        start = agent.server_of(artifact.manifest, self.instance, step)
        assert start is not None
        return Version(slot, artifact, agent, start, is_warm)

    def _folder(self, slot: Slot) -> Path:
        folder = self.agent.folder
        return folder.with_name(f"{folder.name}-{slot.digest[:_SHORT]}")

    def _remove_others(self, folder: Path) -> None:
        """Remove the artifacts beside `folder`, except for what is served or recorded."""
        kept = {folder, *(self._folder(slot) for slot in (self.record.served,) if slot)}
        if self._version is not None:
            kept.add(self._version.agent.folder)
        kept |= {layout_of(each) for each in kept}
        name = "[0-9a-f]" * _SHORT
        for old in (*folder.parent.glob(f"{self.agent.folder.name}-{name}"), *self._layouts(name)):
            if old not in kept:
                remove_tree(old)

    def _layouts(self, name: str) -> list[Path]:
        return list(self.agent.folder.parent.glob(layout_of(Path(f"{self.agent.folder.name}-{name}")).name))

    def _read_channel(self) -> tuple[Slot, FleetArtifact]:
        artifact = self.agent.select()
        tip = self.agent.trust.tip(self.agent.store, artifact.channel)
        chosen = artifact.selection
        return Slot(artifact.channel, tip.generation if tip else 0, chosen.digest, chosen.without), artifact

    def _recorded(self) -> tuple[Slot, FleetArtifact] | None:
        """What this instance served last, if its folder is still there."""
        slot = self.record.served
        with suppress(OSError, InvalidDocument):
            if slot is not None and sha256_hex(data := (self._folder(slot) / MANIFEST).read_bytes()) == slot.digest:
                selection = Selection(Manifest.from_bytes(data), slot.digest, None, slot.without)
                return slot, FleetArtifact(slot.channel, selection)
        return None

    def _keep(self, slot: Slot) -> None:
        self.record = replace(self.record, served=slot)
        self.record.write()

    def _refuse(self, slot: Slot, name: str, other: str, fault: Exception) -> None:
        """Write why a version is not served, count it, and do not try this generation again."""
        self.record = replace(self.record, refused=slot)
        self.record.write()
        self.complain(
            f"{name} of generation {slot.generation} of channel {slot.channel} is refused, and {other} goes on: "
            f"{sentence_of(fault)}"
        )
        if self.log is not None:
            at = int(time.time() * 1000)
            try:
                self.log.write(
                    at, log_event(at, self.dimensions, self.instance.id, [Metric(UPDATES_REFUSED, "Count", 1)])
                )
            except AwsError as lost:
                self.complain(f"{lost}; the refusal is not counted")

    def _give_back(self) -> None:
        try:
            self.turn.give_back()
        except (AwsError, NotReady) as failed:
            self.complain(f"{failed}; put the instance into service by hand, or terminate it")

    # The channel, on a thread of its own

    def _follow(self, server: ModelServer, over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # so that they interrupt the main thread
        prepared: Version | None = None
        mean = self.agent.fleet.updates.interval.total_seconds()
        while not over.wait(random.uniform(mean / 2, mean * 3 / 2)):  # noqa: S311, instances must not look together
            try:
                wanted = self._wanted()
                if wanted is None:
                    prepared, self._printed = None, ""
                elif self.agent.fleet.updates.policy == "replace":
                    if self._replace(*wanted):
                        return
                else:
                    if prepared is None or prepared.slot != wanted[0]:
                        prepared = self._checked(*wanted)
                    if prepared is not None and not over.is_set() and self.turn.take():
                        self._leave(prepared, server)
                        return
                if wanted is not None and not self.record.has_refused(wanted[0]):
                    name = wanted[1].manifest.name
                    self._say_once(f"{name} waits for the turn of this instance in its group", self.say)
            except (PipelineError, StoreError, OSError) as problem:
                self._say_once(f"{sentence_of(problem)}; the next look at the channel tries again", self.complain)

    def _wanted(self) -> tuple[Slot, FleetArtifact] | None:
        """What the channel serves, if it is to take over."""
        assert self._version is not None
        slot, artifact = self._read_channel()
        if slot.digest == self._version.slot.digest or self.record.has_refused(slot):
            return None
        return slot, artifact

    def _checked(self, slot: Slot, artifact: FleetArtifact) -> Version | None:
        """The prepared version; None if it is refused."""
        assert self._version is not None
        self.say(f"channel {slot.channel} has {artifact.manifest.name} in generation {slot.generation}")
        try:
            return self._prepare(slot, artifact, step=self.step, beside=True)
        except _PASSING:
            raise
        except (PipelineError, StoreError) as fault:
            self._refuse(slot, artifact.manifest.name, self._version.artifact.manifest.name, fault)
            return None

    def _leave(self, prepared: Version, server: ModelServer) -> None:
        try:
            self.turn.leave()
        except BaseException:
            self._give_back()
            raise
        self._next = prepared
        server.end()

    def _replace(self, slot: Slot, artifact: FleetArtifact) -> bool:
        """True once the instance is being terminated."""
        assert self._version is not None
        try:
            self.agent.require_servable(artifact, self.instance)
        except NotReady as fault:
            self._refuse(slot, artifact.manifest.name, self._version.artifact.manifest.name, fault)
            return False
        if not self.turn.take():
            return False
        self.say(f"{artifact.manifest.name} needs a new instance: this one is terminated")
        try:
            self.turn.end()
        except AwsError:
            self._give_back()
            raise
        return True

    def _say_once(self, sentence: str, say: Callable[[str], None]) -> None:
        if sentence != self._printed:
            say(sentence)
        self._printed = sentence
