"""Instances of a fleet on the local AWS, as processes: the artifact is fetched, the hook completed, the server started.

A proxy is the network of the fleet: it knows the load balancers by their names, follows the weights of their rules and
the registered targets, and calls the processes.
"""

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any, Final
from urllib.parse import urlsplit

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config.load import load, read_source
from nxpipe.pipeline.config.root import serving_fleets
from nxpipe.pipeline.fleet.agent.run import FleetArtifact
from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches.lambdas import Subnets
from tests.localaws.visitors import Fleet

_STORED: Final = "/var/lib/nxpipe/artifact"  # in the command of the server


@dataclass
class Host:
    """One instance: the folder of its artifact, and its server."""

    port: int
    server: "subprocess.Popen[bytes]"


@dataclass
class Hosts:
    """The instances of one fleet. They come into service one after another, as Auto Scaling launches them."""

    region: str
    project: str
    fleet: str
    config: Path  # nxpipe.toml
    folder: Path
    running: dict[str, Host] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def step(self) -> None:
        groups = client_of("autoscaling", self.region).describe_auto_scaling_groups()["AutoScalingGroups"]
        name = f"{self.project}-{self.fleet}"
        instances = [
            instance["InstanceId"]
            for group in groups
            if group["AutoScalingGroupName"] == f"{name}-blue"
            for instance in group["Instances"]
            if instance["LifecycleState"] in ("Pending:Wait", "InService")
        ]
        for id_ in instances:
            if id_ not in self.running:
                self.running[id_] = self._start(id_)
                self._log(id_)
                Fleet.find(self.region, name).answer_hooks()
        for id_ in [*self.running]:
            if id_ not in instances:
                self.running.pop(id_).server.terminate()

    def _start(self, id_: str) -> Host:
        """What the agent does: fetch the artifact of the channel, and start the command of nxpipe.toml."""
        config = load(read_source(self.config, {}))
        (fleet,) = serving_fleets(config).values()
        store = open_store(config.store.url)
        folder = self.folder / id_
        served = ServedModel.of(config, fleet, "blue")
        artifact = FleetArtifact.of(store, served, trust_in(config, self.config.parent, store))
        artifact.fetch(store, folder, rehearsal=fleet.rehearsal)
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here = {_STORED: str(folder), str(fleet.port): str(port)}
        command = [here.get(word, word) for word in fleet.command or ()]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(port)
        return Host(port, server)

    def _log(self, id_: str) -> None:
        """Lines of the agent, in the log groups of the fleet's stack."""
        logs = client_of("logs", self.region)
        for group in logs.describe_log_groups(logGroupNamePrefix=f"/nxpipe/{self.project}/{self.fleet}")["logGroups"]:
            name, stream = group["logGroupName"], f"{id_}/agent"
            logs.create_log_stream(logGroupName=name, logStreamName=stream)
            line = {"timestamp": int(time.time() * 1000), "message": "fetch smoke from channel smoke"}
            logs.put_log_events(logGroupName=name, logStreamName=stream, logEvents=[line])

    def port_of(self, balancer: str) -> int | None:
        """The port of a target of the load balancer with this DNS name; None without a registered target."""
        elb = client_of("elbv2", self.region)
        for entry in elb.describe_load_balancers()["LoadBalancers"]:
            if entry["DNSName"].lower() != balancer.lower():
                continue
            (listener,) = elb.describe_listeners(LoadBalancerArn=entry["LoadBalancerArn"])["Listeners"]
            rules = elb.describe_rules(ListenerArn=listener["ListenerArn"])["Rules"]
            forwards = [rule["Actions"][0].get("ForwardConfig", {}).get("TargetGroups", []) for rule in rules]
            (weighted,) = (groups for groups in forwards if len(groups) > 1)
            for group in weighted:
                if not group["Weight"]:
                    continue
                health = elb.describe_target_health(TargetGroupArn=group["TargetGroupArn"])
                for target in health["TargetHealthDescriptions"]:
                    if host := self.running.get(target["Target"]["Id"]):
                        return host.port
        return None


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise RuntimeError(f"no server listens on port {port}")


@contextmanager
def hosts(region: str, project: str, fleet: str, config: Path, folder: Path) -> Iterator[Hosts]:
    """Instances of a fleet that may not be deployed yet, until the end of the block."""
    over, found = threading.Event(), Hosts(region, project, fleet, config, folder)

    def run() -> None:
        while not over.wait(0.3):
            try:
                found.step()
            except Exception as error:
                found.faults.append(f"{type(error).__name__}: {error}")

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(found))
    threads = [threading.Thread(target=work, daemon=True) for work in (run, proxy.serve_forever)]
    for thread in threads:
        thread.start()
    Subnets.proxy = f"http://127.0.0.1:{proxy.server_port}"
    try:
        yield found
    finally:
        Subnets.proxy = None
        over.set()
        proxy.shutdown()
        for thread in threads:
            thread.join()
        for host in found.running.values():
            host.server.terminate()


def _handler(instances: Hosts) -> type[BaseHTTPRequestHandler]:
    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            port = instances.port_of(url.hostname or "")
            if port is None:
                self._answer(503, json.dumps({"message": "no target"}).encode())
                return
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{url.path}") as answer:
                self._answer(answer.status, answer.read())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name of http.server
            return

    return Router
