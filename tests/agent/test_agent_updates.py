"""Fleets that follow their channel in place: an instance takes the next artifact over while its server answers."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.autoscaling.models import autoscaling_backends
from moto.core import DEFAULT_ACCOUNT_ID

from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.config import ServingFleet, load_config
from nxpipe.pipeline.config.device_measures import UPDATES_REFUSED
from nxpipe.pipeline.fleet.agent.group import FleetInstance, GroupTurn
from nxpipe.pipeline.fleet.agent.updates import Record, Slot
from nxpipe.pipeline.util import exit_codes
from nxpipe.stacks.app import add_stacks, deployable
from tests.agent.conftest import server
from tests.agent.project import CONFIG
from tests.agent.test_agent_run import GROUP, HOOK, Place, place
from tests.agent.test_agent_supervisor import agent_of, free_port
from tests.artifact_store.afar import first_generation, patch
from tests.artifact_store.samples import publish_verified, put
from tests.pipeline.command import nxpipe as in_a_process
from tests.pipeline.in_process import InProcess, nxpipe
from tests.serving.server_process import build
from tests.stacks.local import new_app
from tests.stacks.whole import WHOLE, write_whole

__all__ = ["nxpipe", "place", "server"]

PROGRAM = Path(__file__).with_name("model_server.py")
LOG = "/nxpipe/demo/search"
REGION = "us-east-1"


@dataclass
class Callers:
    """A load balancer with clients that never pause: requests go to an instance in service only."""

    port: int
    instance: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    prompt: str = ""  # of a completion, in place of the request for the version

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            state = self._state()
            if not self.states or self.states[-1] != state:
                self.states.append(state)
            if state != "InService":
                time.sleep(0.01)
                continue
            try:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
                if self.prompt:
                    body = json.dumps({"prompt": self.prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True})
                    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                else:
                    connection.request("GET", "/version")
                response = connection.getresponse()
                body = response.read().decode()
                if self.prompt and response.status == 200:
                    body = json.loads(body)["choices"][0]["text"]
                (self.answers if response.status == 200 else self.failures).append(body)
                connection.close()
            except (OSError, HTTPException) as failed:
                self.failures.append(repr(failed))

    def _state(self) -> str:
        group = autoscaling_backends[DEFAULT_ACCOUNT_ID][REGION].autoscaling_groups[GROUP]
        return next((each.lifecycle_state for each in group.instance_states if each.instance.id == self.instance), "")


@dataclass
class Fleet:
    """An instance of a fleet of two, whose channel moves."""

    place: Place
    port: int
    versions: list[Served] = field(default_factory=list)

    @property
    def instance(self) -> str:
        return str(self.place.metadata.values["instance-id"])

    @property
    def entry(self) -> dict[str, Any]:
        (group,) = self.place.aws.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
        own: dict[str, Any] = next((each for each in group["Instances"] if each["InstanceId"] == self.instance), {})
        return {**own, "desired": group["DesiredCapacity"]}

    @property
    def first(self) -> str:
        """The artifact with which the instance starts, as all artifacts here by the SHA-256 of its manifest."""
        return sha256_hex(self.place.published.to_bytes())

    def publish(self, seed: str = "a") -> Served:
        store, number = self.place.store.store, len(self.versions) + 2
        self.versions.append(Served.of(publish_verified(store, put(store, seed, request=number))))
        return self.versions[-1]

    def promote(self, served: Served) -> None:
        """The next generation of the channel."""

        def make(tip: Any) -> Any:
            return first_generation("production", [served]).model_copy(
                update={"generation": tip.generation + 1, "previous": tip.digest}
            )

        ChannelLog(self.place.store.backend, "production").append(make)

    def command(self, **artifacts: Any) -> tuple[str, ...]:
        """The server, with its behaviour for single artifacts."""
        return (sys.executable, str(PROGRAM), json.dumps({"port": self.port, "artifacts": artifacts}))

    def version(self) -> str:
        """The SHA-256 of the manifest that the server has; empty without an answer."""
        with suppress(OSError, HTTPException):
            connection = HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/version")
            return connection.getresponse().read().decode()
        return ""

    @property
    def record(self) -> Record:
        return Record.read(self.place.root / "served-updates.json")

    @contextmanager
    def calling(self, prompt: str = "") -> Iterator[Callers]:
        callers, over = Callers(self.port, self.instance, prompt=prompt), threading.Event()
        threads = [threading.Thread(target=callers.run, args=(over,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield callers
        finally:
            over.set()
            for thread in threads:
                thread.join()


def configure(port: int, policy: str, more: str = "") -> None:
    sizes = CONFIG.replace("size = { min = 1, max = 1 }", "size = { min = 0, desired = 2, max = 3 }")
    Path("nxpipe.toml").write_text(
        f"""{sizes}port = {port}
health_check = {{ interval = "5s", timeout = "2s" }}
ready_within = "1m"
draining = "5s"
updates = {{ policy = "{policy}", interval = "1s" }}
{more}
"""
    )


@pytest.fixture
def fleet(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    held = Fleet(place, free_port())
    configure(held.port, "swap")
    place.aws.update_auto_scaling_group(AutoScalingGroupName=GROUP, MinSize=0, MaxSize=3, DesiredCapacity=2)
    (other,) = place.states().keys() - {held.instance}
    place.aws.complete_lifecycle_action(
        AutoScalingGroupName=GROUP, LifecycleHookName=HOOK, InstanceId=other, LifecycleActionResult="CONTINUE"
    )
    boto3.client("logs").create_log_group(logGroupName=LOG)
    monkeypatch.setenv("NXPIPE_LOG", LOG)
    yield held
    boto3.client("logs").delete_log_group(logGroupName=LOG)


def soon(condition: Callable[[], bool], within: float = 60) -> bool:
    until = time.monotonic() + within
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def refusals() -> int:
    """The metric of refused versions, as the fleet's log has it."""
    logs = boto3.client("logs")
    streams = [each["logStreamName"] for each in logs.describe_log_streams(logGroupName=LOG)["logStreams"]]
    events = [
        json.loads(event["message"])
        for name in streams
        for event in logs.get_log_events(logGroupName=LOG, logStreamName=name)["events"]
    ]
    return sum(int(event[UPDATES_REFUSED]) for event in events)


@pytest.mark.sample(6)
def test_an_instance_takes_the_next_artifact_over_and_no_request_fails(fleet: Fleet) -> None:
    second = fleet.publish()
    with agent_of(fleet.place, *fleet.command()) as agent:
        agent.await_ready()
        with fleet.calling() as callers:
            assert soon(lambda: len(callers.answers) > 10)
            fleet.promote(second)
            assert soon(lambda: callers.answers[-1] == second.manifest.sha256)
        assert callers.failures == []
        assert callers.states == ["InService", "Standby", "InService"]
        assert set(callers.answers) == {fleet.first, second.manifest.sha256}
        assert sorted(callers.answers, key=[fleet.first, second.manifest.sha256].index) == callers.answers
        assert soon(lambda: not fleet.entry["ProtectedFromScaleIn"])
        assert (fleet.entry["LifecycleState"], fleet.entry["desired"]) == ("InService", 2)
        agent.process.send_signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 0, err
    assert fleet.record.served == Slot("production", 2, second.manifest.sha256)
    folders = sorted(path.name for path in fleet.place.root.glob("served-*"))
    assert f"served-{second.manifest.sha256[:12]}" in folders


@pytest.mark.sample(6)
@pytest.mark.parametrize("fault", ["a damaged program", "the server exits", "a wrong answer"])
def test_a_version_that_fails_is_refused_once_and_the_old_one_answers_on(fleet: Fleet, fault: str) -> None:
    configure(fleet.port, "swap", PROBE)
    bad, good = fleet.publish(seed="b"), fleet.publish()
    behaviour = {"the server exits": {"ends": 3}, "a wrong answer": {"labels": ["liver"]}}.get(fault, {})
    if fault == "a damaged program":
        manifest = fleet.place.store.store.manifest(bad.manifest)
        patch(Path("store") / blob_path(manifest.executables[0].blob))
    with agent_of(fleet.place, *fleet.command(**{bad.manifest.sha256: behaviour})) as agent:
        agent.await_ready()
        with fleet.calling() as callers:
            fleet.promote(bad)
            assert soon(lambda: fleet.record.refused is not None)
            assert soon(lambda: fleet.entry["LifecycleState"] == "InService" and bool(fleet.version()))
            before = len(callers.answers)
            assert soon(lambda: len(callers.answers) > before + 10)
            time.sleep(3)  # further looks at the channel
            assert callers.states == ["InService"] if fault == "a damaged program" else callers.states[1:] == LEFT
            assert refusals() == 1
            fleet.promote(good)
            assert soon(lambda: callers.answers[-1] == good.manifest.sha256)
        assert callers.failures == []
        assert set(callers.answers) == {fleet.first, good.manifest.sha256}
        agent.process.send_signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 0, err
    assert fleet.record.refused == Slot("production", 2, bad.manifest.sha256)
    (sentence,) = (line for line in err.splitlines() if "is refused" in line)
    assert f"of generation 2 of channel production is refused, and {fleet.place.published.name} goes on: " in sentence
    assert SAID[fault] in sentence


@pytest.mark.sample(8)
def test_nxpipe_serve_is_swapped_between_two_completions_and_a_rollback_swaps_it_back(fleet: Fleet) -> None:
    """The default server, a tiny Llama with two sets of weights, on the emulator."""
    root, store = fleet.place.root, fleet.place.store.store
    words = ("--phases", "extend,decode", "--batches", "4", "--buckets", "16,64")
    names = [build(root / f"of-{seed}", "llama", *words, seed=seed, store=root / "store")[0] for seed in (0, 1)]
    old, new = (Served.of(store.resolve(name), without=["emulated"]) for name in names)
    text = Path("nxpipe.toml").read_text().replace('id = "acme/tiny-bert"', 'path = "of-0/llama"')
    Path("nxpipe.toml").write_text(text.replace("fill-mask", "text-generation") + 'health = "/readyz"\n')
    fleet.promote(old)
    with agent_of(fleet.place) as agent:
        agent.await_ready()
        with fleet.calling(prompt="the river") as callers:
            assert soon(lambda: len(callers.answers) > 10)
            fleet.promote(new)
            assert soon(lambda: len(set(callers.answers)) == 2)
            fleet.promote(old)
            assert soon(lambda: callers.answers[-1] == callers.answers[0])
        assert callers.failures == []
        assert callers.states == ["InService", *LEFT, *LEFT]
        first, second = dict.fromkeys(callers.answers)
        changes = [one for one, before in zip(callers.answers, [None, *callers.answers], strict=False) if one != before]
        assert changes == [first, second, first]
        agent.process.send_signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 0, err


LEFT = ["Standby", "InService"]
SAID = {
    "a damaged program": "is corrupt",
    "the server exits": "the server exited with code 3 before it was ready",
    "a wrong answer": "the response to the probe POST /predict has",
}
PROBE = """[fleets.probe]
path = "/predict"
body = '{"text": "a"}'
expect = '{"labels": ["capital", "heart"]}'
"""


@pytest.mark.sample(6)
@pytest.mark.parametrize("is_good", [True, False])
def test_an_agent_that_is_killed_while_it_takes_over_continues_when_it_starts_again(
    fleet: Fleet, is_good: bool
) -> None:
    second = fleet.publish()
    with agent_of(fleet.place, *fleet.command(**{second.manifest.sha256: {"late": 600}})) as agent:
        agent.await_ready()
        fleet.promote(second)
        assert soon(lambda: fleet.version() == second.manifest.sha256)  # the new server runs, and is not ready
        assert (fleet.entry["LifecycleState"], fleet.entry["desired"]) == ("Standby", 1)
        children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()
        agent.process.kill()
        for child in children:  # systemd ends what is left of the unit
            os.kill(int(child), signal.SIGKILL)
    (fleet.place.root / "notify").unlink()
    behaviour = {} if is_good else {"ends": 3}
    with agent_of(fleet.place, *fleet.command(**{second.manifest.sha256: behaviour})) as agent:
        agent.await_ready()
        assert soon(lambda: fleet.entry["LifecycleState"] == "InService")
        assert soon(lambda: not fleet.entry["ProtectedFromScaleIn"])
        assert fleet.entry["desired"] == 2
        assert fleet.version() == (second.manifest.sha256 if is_good else fleet.first)
        assert refusals() == (0 if is_good else 1)
        agent.process.send_signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert code == 0, err


@pytest.mark.sample(6)
def test_an_instance_that_is_replaced_is_terminated_in_its_turn_and_its_successor_fetches_the_next(
    fleet: Fleet,
) -> None:
    configure(fleet.port, "replace")
    second = fleet.publish()
    with agent_of(fleet.place, *fleet.command()) as agent:
        agent.await_ready()
        fleet.promote(second)
        assert soon(lambda: not fleet.place.state)
        agent.process.send_signal(signal.SIGTERM)  # EC2 shuts it down
        code, _, err = agent.end()
    assert code == 0, err
    assert sorted(fleet.place.states().values()) == ["InService", "Pending:Wait"]


def test_an_instance_without_a_group_cannot_be_replaced(fleet: Fleet) -> None:
    configure(fleet.port, "replace")
    del fleet.place.metadata.values["tags/instance/aws:autoscaling:groupName"]
    words = [word for word in fleet.place.words if word not in ("--hook", HOOK)]
    answer = in_a_process(*words, "--", *fleet.command(), cwd=fleet.place.root)
    assert answer.code == exit_codes.NOT_READY.number
    assert "is in no Auto Scaling group that could replace it" in answer.err


@pytest.mark.sample(2)
@pytest.mark.parametrize("most", [1, 2])
def test_of_many_instances_at_most_so_many_leave_service_as_the_fleet_allows(
    fleet: Fleet, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five instances that look at the same moment, again and again, until each was out once."""
    names = _five_in_service(fleet)
    configure(fleet.port, "swap")
    text = Path("nxpipe.toml").read_text().replace("desired = 2, max = 3", "desired = 5, max = 5")
    Path("nxpipe.toml").write_text(text.replace('interval = "1s"', f'interval = "1s", max_unavailable = {most}'))
    (configured,) = load_config(Path("nxpipe.toml"), {}).fleets
    assert isinstance(configured, ServingFleet)
    monkeypatch.setattr(GroupTurn, "_checks_take", 0.0)
    out: set[str] = set()
    largest, lock = [0], threading.Lock()

    def leave_once(name: str) -> None:
        turn = GroupTurn(FleetInstance(name, "inf2.xlarge", REGION, GROUP, "127.0.0.1"), configured, None, settle=0.5)
        while not turn.take():
            time.sleep(0.05)
        turn.leave()
        with lock:
            out.add(name)
            largest[0] = max(largest[0], len(out))
        time.sleep(0.1)
        with lock:
            out.remove(name)
        turn.give_back()

    threads = [threading.Thread(target=leave_once, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    assert largest[0] == most if most == 1 else largest[0] <= most
    assert set(fleet.place.states().values()) == {"InService"}
    assert fleet.entry["desired"] == 5


def test_no_instance_leaves_while_another_one_is_missing_or_was_not_yet_seen_for_as_long_as_health_checks_take(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _five_in_service(fleet)
    (configured,) = load_config(Path("nxpipe.toml"), {}).fleets
    assert isinstance(configured, ServingFleet)
    turn = GroupTurn(FleetInstance(names[0], "inf2.xlarge", REGION, GROUP, "127.0.0.1"), configured, None, settle=0)
    assert not turn.take(), "the others may have gone into service a moment ago"
    monkeypatch.setattr(GroupTurn, "_checks_take", 0.0)
    fleet.place.aws.set_instance_health(InstanceId=names[1], HealthStatus="Unhealthy")
    assert not turn.take(), "one is about to be replaced"
    fleet.place.aws.set_instance_health(InstanceId=names[1], HealthStatus="Healthy")
    assert turn.take()
    turn.give_back()
    assert turn.take()
    turn.give_back()


def _five_in_service(fleet: Fleet) -> list[str]:
    aws = fleet.place.aws
    aws.update_auto_scaling_group(AutoScalingGroupName=GROUP, MinSize=0, MaxSize=5, DesiredCapacity=5)
    for name, state in fleet.place.states().items():
        if state == "Pending:Wait":
            aws.complete_lifecycle_action(
                AutoScalingGroupName=GROUP, LifecycleHookName=HOOK, InstanceId=name, LifecycleActionResult="CONTINUE"
            )
    names = sorted(fleet.place.states())
    assert len(names) == 5
    return names


def test_a_fleet_that_follows_its_channel_has_no_rollouts_and_no_channels_of_environments(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configure(8000, "replace")
    for words in (("start", "search", "bert@1"), ("abort", "search"), ("status", "search")):
        refused = nxpipe("rollout", *words)
        assert refused.code == exit_codes.USAGE.number, refused.err
        assert (
            'fleet search has no rollouts: with updates.policy = "replace" its instances follow channel production; '
            "run: nxpipe promote ARTIFACT --channel production"
        ) in refused.err
    config = load_config(Path("nxpipe.toml"), {})
    (fleet,) = config.fleets
    assert isinstance(fleet, ServingFleet)
    assert ServedModel.of(config, fleet, "green").channels == ("production",)


def test_a_project_has_no_rollout_stack_of_a_fleet_that_follows_its_channel(tmp_path: Path) -> None:
    path = write_whole(tmp_path)
    stacks = []
    for settings in (_SCALING, 'updates = { policy = "swap" }'):
        path.write_text(WHOLE.replace(_SCALING, settings))
        app = new_app()
        add_stacks(app, deployable(path), tmp_path)
        stacks.append({node.node.id for node in app.node.children})
    assert stacks[0] - stacks[1] == {"demo-rollout-search"}
    assert stacks[1] <= stacks[0]


_SCALING = "scaling = { requests_per_target = 600 }"
