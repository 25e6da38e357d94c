"""The instances of a fleet on the local AWS, as processes of `nxpipe serve` on addresses of their own.

An instance that Auto Scaling launches fetches the artifact of its environment's channel, completes its hook once its
server is ready, mirrors requests while the fleet's rollout asks for it, and is restarted if it crashes, as the agent
and systemd do.
"""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from nxpipe.artifact_store import Store, open_store
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.canary.metrics import PAIR_METRICS, PAIR_NAMESPACE, ROLLOUT, PairCounts
from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.load import load, read_source
from nxpipe.pipeline.config.root import serving_fleets
from nxpipe.pipeline.fleet.agent.run import FleetArtifact
from nxpipe.pipeline.fleet.agent.shadow import control_of, mirror_path
from nxpipe.pipeline.util.files import write_whole
from tests.localaws.formation.provider import client_of
from tests.pipeline.command import NXPIPE

_COLOURS: Final = ("blue", "green")
_STEP: Final = 0.3  # seconds between two looks at the groups


@dataclass
class Instance:
    """One instance, and its server."""

    colour: str
    address: str
    folder: Path
    command: list[str]
    process: "subprocess.Popen[bytes]"
    log: Path
    is_ready: bool = False
    restarts: int = 0
    control: Mapping[str, Any] = field(default_factory=dict)
    pairs_read: dict[Path, int] = field(default_factory=dict)

    def answers(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@dataclass
class Servers:
    """All instances of the fleet. `faults` are those of single artifacts, by their request keys."""

    region: str
    config_path: Path
    folder: Path
    port: int
    faults: Mapping[str, str]
    running: dict[str, Instance] = field(default_factory=dict)
    crashes: int = 0
    problems: list[str] = field(default_factory=list)
    _launched: int = 0

    def __post_init__(self) -> None:
        self.config: Config = load(read_source(self.config_path, {}))
        (self.fleet,) = serving_fleets(self.config).values()
        self.store: Store = open_store(self.config.store.url)
        self.name = f"{self.config.project.name}-{self.fleet.name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_targets()

    @property
    def targets(self) -> Path:
        return self.folder / "targets.json"

    def step(self) -> None:
        present = self._instances()
        for id_ in [*self.running]:
            if id_ not in present:
                self.running.pop(id_).process.terminate()
        for id_, (colour, state) in present.items():
            if id_ not in self.running:
                self.running[id_] = self._launch(id_, colour)
            instance = self.running[id_]
            if instance.process.poll() is not None:
                self.crashes += 1
                instance.restarts += 1
                instance.process = _started(instance.command, instance.log)
            if not instance.is_ready and instance.answers(self.port):
                instance.is_ready = True
                if state == "Pending:Wait":
                    self._complete_hook(id_, colour)
        self._write_targets()
        self._mirror()

    def end(self) -> None:
        for instance in self.running.values():
            instance.process.terminate()
        for instance in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                instance.process.wait(5)
            instance.process.kill()
            instance.process.wait()

    def _instances(self) -> dict[str, tuple[str, str]]:
        """Colour and lifecycle state of each instance."""
        names = [f"{self.name}-{colour}" for colour in _COLOURS]
        found = client_of("autoscaling", self.region).describe_auto_scaling_groups(AutoScalingGroupNames=names)
        return {
            entry["InstanceId"]: (group["AutoScalingGroupName"].rpartition("-")[2], entry["LifecycleState"])
            for group in found["AutoScalingGroups"]
            for entry in group["Instances"]
            if entry["LifecycleState"] in ("Pending:Wait", "InService")
        }

    def _launch(self, id_: str, colour: str) -> Instance:
        assert isinstance(self.fleet, ServingFleet)
        folder = self.folder / id_
        served = ServedModel.of(self.config, self.fleet, colour)
        artifact = FleetArtifact.of(self.store, served, trust_in(self.config, self.config_path.parent, self.store))
        artifact.fetch(self.store, folder / "artifact", rehearsal=True)
        self._launched += 1
        address = f"127.0.1.{self._launched}"
        control = folder / "control.json"
        control.write_text("{}")
        words = ["serve", "--folder", str(folder / "artifact"), "--host", address, "--port", str(self.port)]
        words += ["--drain-delay", "0", "--shadow-control", str(control)]
        fault = self.faults.get(artifact.manifest.request_key)
        program = [sys.executable, "-m", "tests.localaws.faulty_server", fault] if fault else [str(NXPIPE)]
        log = folder / "server.log"
        return Instance(colour, address, folder, [*program, *words], _started([*program, *words], log), log)

    def _complete_hook(self, id_: str, colour: str) -> None:
        client_of("autoscaling", self.region).complete_lifecycle_action(
            LifecycleHookName=f"{self.name}-ready",
            AutoScalingGroupName=f"{self.name}-{colour}",
            InstanceId=id_,
            LifecycleActionResult="CONTINUE",
        )

    def _write_targets(self) -> None:
        ready = [each for each in self.running.values() if each.is_ready]
        targets = {
            colour: [f"{each.address}:{self.port}" for each in ready if each.colour == colour] for colour in _COLOURS
        }
        write_whole(self.targets, json.dumps(targets).encode())

    # The shadow phase

    def _mirror(self) -> None:
        """What the agent of a stable instance does: the control file of its server, and the pairs as metrics."""
        content = b"".join(self.store.backend.read(mirror_path(self.fleet.name)) or ())
        document = json.loads(content or b"{}")
        known = self._addresses()
        document["hosts"] = [known[host] for host in document.get("hosts", ()) if host in known]
        for instance in self.running.values():
            wanted = control_of(document, instance.colour, self.port, instance.folder / "pairs")
            if wanted != instance.control:
                write_whole(instance.folder / "control.json", json.dumps(wanted).encode())
                instance.control = wanted
            for path in (instance.folder / "pairs").glob("*/pairs.jsonl"):
                if counts := _fresh(path, instance.pairs_read):
                    self._publish(counts, path.parent.name)  # the rollout, also after it has switched mirroring off

    def _addresses(self) -> dict[str, str]:
        """The address of each server, by that of its instance in the network of the fleet."""
        pages = client_of("ec2", self.region).describe_instances(InstanceIds=[*self.running])["Reservations"]
        return {
            entry["PrivateIpAddress"]: self.running[entry["InstanceId"]].address
            for page in pages
            for entry in page["Instances"]
        }

    def _publish(self, counts: PairCounts, rollout: str) -> None:
        dimensions = {"Project": self.config.project.name, "Fleet": self.fleet.name, ROLLOUT: rollout}
        data = [
            {
                "MetricName": name,
                "Value": value,
                "Dimensions": [{"Name": key, "Value": text} for key, text in sorted(dimensions.items())],
                "Timestamp": datetime.now(UTC),
            }
            for name, value in zip(PAIR_METRICS, astuple(counts), strict=True)
        ]
        client_of("cloudwatch", self.region).put_metric_data(Namespace=PAIR_NAMESPACE, MetricData=data)


def _fresh(path: Path, read: dict[Path, int]) -> PairCounts | None:
    """The pairs since the last look. The server sums minutes up some minutes later; here a minute is a second."""
    with path.open("rb") as file:
        file.seek(read.get(path, 0))
        lines = [line for line in file if line.endswith(b"\n")]
    read[path] = read.get(path, 0) + sum(map(len, lines))
    pairs = [(pair["bad"], pair["stable"]["tokens"] is None) for pair in map(json.loads, lines)]
    if not pairs:
        return None
    alone = sum(bad and not stable for bad, stable in pairs), sum(stable and not bad for bad, stable in pairs)
    return PairCounts(len(pairs), sum(bad for bad, _ in pairs), *alone)


def _started(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


@contextmanager
def servers(region: str, config: Path, folder: Path, port: int, faults: Mapping[str, str]) -> Iterator[Servers]:
    """The instances of the fleet until the end of the block."""
    over, found = threading.Event(), Servers(region, config, folder, port, faults)

    def run() -> None:
        while not over.wait(_STEP):
            try:
                found.step()
            except Exception as error:
                found.problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.end()
