"""The agent supervises the model server: an instance in service has a server that answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moto.autoscaling.models import autoscaling_backends

from nxpipe.pipeline.config import ServingFleet, load_config
from nxpipe.pipeline.fleet.agent import group as agent_group
from nxpipe.pipeline.fleet.agent.group import FleetInstance, HookNotCompleted, LifecycleHook
from nxpipe.pipeline.fleet.agent.supervisor import ModelServer, Readiness, ServiceManager, difference
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.errors import NotReady
from tests.agent.conftest import server
from tests.agent.project import CONFIG
from tests.agent.test_agent_run import GROUP, HOOK, Place, place
from tests.pipeline.command import NXPIPE

__all__ = ["place", "server"]

pytestmark = pytest.mark.sample(6)

PROGRAM = Path(__file__).with_name("model_server.py")
NOT_READY = exit_codes.NOT_READY.number
PROBE = """
[fleets.probe]
path = "/predict"
body = '{"text": "Paris is the [MASK] of France."}'
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def command(port: int, **behaviour: object) -> tuple[str, ...]:
    return (sys.executable, str(PROGRAM), json.dumps({"port": port, **behaviour}))


def configure(port: int, more: str = "", tables: str = "") -> None:
    settings = 'health_check = { interval = "5s", timeout = "2s" }\nready_within = "1m"\ndraining = "1s"\n'
    Path("nxpipe.toml").write_text(f'{CONFIG}port = {port}\ncommand = ["server"]\n{settings}{more}\n{tables}')


def fleet(port: int, tables: str = "") -> ServingFleet:
    configure(port, tables=tables)
    (found,) = load_config(Path("nxpipe.toml"), {}).fleets
    assert isinstance(found, ServingFleet)
    return found


@dataclass
class Agent:
    """A running agent, and the messages that systemd gets from it."""

    process: "subprocess.Popen[str]"
    channel: socket.socket
    statuses: list[str] = field(default_factory=list)

    def await_status(self, start: str) -> None:
        self.channel.settimeout(20)
        while not (message := self._message()).startswith(start):
            self.statuses.append(message)

    def _message(self) -> str:
        try:
            return self.channel.recv(4096).decode()
        except TimeoutError:
            if self.process.poll() is None:
                raise
            raise AssertionError(self.process.communicate()[1]) from None

    def await_ready(self) -> None:
        self.await_status("READY=1")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@contextmanager
def agent_of(place: Place, *server_command: str) -> Iterator[Agent]:
    path = str(place.root / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(path)
        process = subprocess.Popen(
            [str(NXPIPE), *place.words, "--", *server_command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NOTIFY_SOCKET": path},
        )
        try:
            yield Agent(process, channel)
        finally:
            if process.poll() is None:
                process.terminate()  # so that it ends its server
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            process.kill()
            process.communicate()


def get(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    return connection.getresponse().status


def has_ended(pid: int) -> bool:
    """True if there is no such process, or a zombie that its parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def awaited(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return holds


def test_an_instance_is_in_service_when_its_late_server_is_healthy_and_has_answered_the_probe(
    place: Place, port: int
) -> None:
    expected = """expect = '{"labels": ["capital", "heart"], "score": 0.91}'\ntolerance = 0.01\n"""
    configure(port, tables=f"{PROBE}{expected}")
    with agent_of(place, *command(port, late=0.7)) as agent:
        agent.await_status("STATUS=start the server")
        assert place.state == "Pending:Wait"
        agent.await_ready()
        assert place.state == "InService"
        begun = [status.removeprefix("STATUS=").partition(" ")[0] for status in agent.statuses]
        assert begun == ["check", "fetch", "send", "complete"]
        with pytest.raises(OSError, match=r"closed|reset"):
            get(port, "/exit")
        code, out, err = agent.end()
    assert code == 7
    assert "the server exited with code 7; its last lines: the device is gone\n" in err
    files = ["executables", "files", "manifest.json", "weights.safetensors"]
    assert out == f"{['.nxpipe', *files]}\nnotifies: False\n"  # only the main process of a unit may notify systemd


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (3, "exited with code 3 before it was ready; correct the server or the fleet's command"),
        (
            "SIGKILL",
            "was ended by SIGKILL before it was ready; if the kernel reports that memory is out, choose a larger "
            "instance type",
        ),
    ],
)
def test_a_server_that_exits_before_it_is_ready_gives_the_instance_up_with_its_last_lines(
    place: Place, port: int, ends: object, how: str
) -> None:
    configure(port)
    answer = place.run(*command(port, ends=ends))
    assert (answer.code, place.state) == (NOT_READY, None)
    (sentence,) = (line for line in answer.err.splitlines() if line.startswith("Error: "))
    lines = r"loading the model | no such tensor: \x1b[31mlayer.0"
    assert sentence == f"Error: the server {how}; its last lines: {lines}"


@pytest.mark.parametrize(
    ("address", "late", "last"), [("127.0.0.1", 60, "503"), ("127.0.0.2", 0, "Connection refused")]
)
def test_a_server_that_is_never_healthy_is_stopped_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, address: str, late: int, last: str
) -> None:
    """A server that listens on another address is as unhealthy for the load balancer as one without a model."""
    monkeypatch.chdir(tmp_path)
    readiness = Readiness(fleet(port), address, time.monotonic() + 0.8)
    started, handler = time.monotonic(), signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(NotReady, match=rf"did not answer GET /health on {address}:{port} with 200 .*check: {last};"),
        ModelServer(command(port, late=late, child="child"), os.environ, 30.0) as model_server,
    ):
        readiness.await_health(model_server)
    assert time.monotonic() - started < 8
    assert awaited(lambda: has_ended(int(Path("child").read_text())))
    assert signal.getsignal(signal.SIGTERM) is handler
    readiness.require_free_port()


def test_sigterm_lets_the_server_finish_its_open_requests_and_leaves_no_process(place: Place, port: int) -> None:
    """Of an agent that was restarted in service: there is no hook to complete."""
    configure(port)
    assert hook_of(place).answer("CONTINUE")
    with agent_of(place, *command(port, child="child")) as agent:
        agent.await_ready()
        answers: list[int] = []
        request = threading.Thread(target=lambda: answers.append(get(port, "/slow")))
        request.start()
        time.sleep(0.3)
        agent.process.send_signal(signal.SIGTERM)
        code, out, err = agent.end()
        request.join()
    assert (code, answers) == (0, [200]), err
    assert out.endswith("drained\n")
    assert "Error" not in err
    assert awaited(lambda: has_ended(int(Path("child").read_text())))


@pytest.mark.sample(4)
def test_a_server_that_ignores_sigterm_is_killed_after_the_draining_time(place: Place, port: int) -> None:
    configure(port)
    with agent_of(place, *command(port, deaf=True)) as agent:
        agent.await_ready()
        stopped = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        code, _, _ = agent.end()
    assert code == 128 + signal.SIGKILL
    assert 0.9 < time.monotonic() - stopped < 8


def test_an_agent_that_is_stopped_before_its_server_is_ready_gives_the_instance_up(place: Place, port: int) -> None:
    configure(port)
    with agent_of(place, *command(port, late=60, child="child")) as agent:
        assert awaited(lambda: Path("child").exists() and bool(Path("child").read_text()))
        agent.process.send_signal(signal.SIGTERM)
        code, _, err = agent.end()
    assert (code, place.state) == (exit_codes.TERMINATED.number, None), err
    assert awaited(lambda: has_ended(int(Path("child").read_text())))


def test_another_process_on_the_port_does_not_answer_for_the_server(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        configure(port)
        answer = place.run(*command(port))
    assert (answer.code, place.state) == (NOT_READY, None)
    assert f"another process listens on port {port} of 127.0.0.1 before the server starts" in answer.err


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("expected", "fault"),
    [
        ("""expect = '{"score": 0.9}'""", "has 0.912 at $.score, and 0.9 is expected"),
        ("status = 201", "has status 200, and 201 is expected; it begins with '{"),
    ],
)
def test_a_wrong_answer_to_the_probe_gives_the_instance_up(place: Place, port: int, expected: str, fault: str) -> None:
    configure(port, tables=f"{PROBE}{expected}\n")
    answer = place.run(*command(port))
    assert (answer.code, place.state) == (NOT_READY, None)
    assert f"the response to the probe POST /predict {fault}" in answer.err


@pytest.mark.parametrize(
    ("expected", "found", "fault"),
    [
        ({"a": 1}, {"a": 1.0, "b": None}, None),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 2}]}, None),
        ([1.0], [1.009], None),
        ([1.0], [1.02], "has 1.02 at $[0], and 1.0 is expected"),
        ([1], [1, 2], "has [1, 2] at $, and [1] is expected"),
        ({"a": 1}, {}, "has no $.a"),
        ({"": 1}, {}, "has no $."),
        ({"a": 1}, {"a": True}, "has true at $.a, and 1 is expected"),
        ({"a": None}, {"a": 0}, "has 0 at $.a, and null is expected"),
        ("a", ["a"], 'has ["a"] at $, and "a" is expected'),
        (1, 10**400, f"has {'1' + '0' * 199}... at $, and 1 is expected"),
        (0.5, float("nan"), "has NaN at $, and 0.5 is expected"),
    ],
)
def test_a_response_has_what_is_expected_and_may_have_more(expected: Any, found: Any, fault: str | None) -> None:
    assert difference(expected, found, 0.01) == fault


@pytest.mark.parametrize("abstract", [True, False])
def test_systemd_is_notified_at_a_path_and_at_an_abstract_address(tmp_path: Path, abstract: bool) -> None:
    name = f"@nxpipe-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name[1:]}" if abstract else name)
        ServiceManager({"NOTIFY_SOCKET": name}).notify(READY="1", STATUS="two\nlines=1")
        assert channel.recv(4096) == b"READY=1\nSTATUS=two lines=1"
    with pytest.raises(NotReady, match="systemd cannot be notified"):
        ServiceManager({"NOTIFY_SOCKET": name}).notify(READY="1")


# The hook's action may be pending later than the agent is ready: an instance of a warm pool starts within seconds.


def hook_of(place: Place) -> LifecycleHook:
    instance = str(place.metadata.values["instance-id"])
    return LifecycleHook(HOOK, FleetInstance(instance, "inf2.xlarge", "us-east-1", GROUP, "127.0.0.1"))


class Hooks(set[str]):
    """The hooks that an instance waits for. Each attempt to complete one looks for it here."""

    attempts = 0

    def __contains__(self, hook: object) -> bool:
        self.attempts += 1
        return super().__contains__(hook)


@dataclass(frozen=True)
class LateHook:
    """The action of a hook, which is pending from the call on."""

    instance: Any
    hooks: frozenset[str]

    def __call__(self) -> None:
        self.instance.hooks_to_answer.update(self.hooks)
        self.instance.lifecycle_state = "Pending:Wait"

    def await_attempts(self, more: int) -> None:
        wanted = self.instance.hooks_to_answer.attempts + more
        deadline = time.monotonic() + 60
        while self.instance.hooks_to_answer.attempts < wanted:
            assert time.monotonic() < deadline, "the agent makes no more attempts"
            time.sleep(0.05)


@contextmanager
def not_yet_waiting(state: str) -> Iterator[LateHook]:
    """The instance is in an earlier state, without a pending action, until the function is called."""
    groups = autoscaling_backends["123456789012"]["us-east-1"].autoscaling_groups
    (instance,) = groups[GROUP].instance_states
    late = LateHook(instance, frozenset(instance.hooks_to_answer))
    instance.hooks_to_answer = Hooks()
    instance.lifecycle_state = state
    yield late


@pytest.mark.parametrize("state", ["Pending", "Warmed:Stopped"])
def test_an_agent_that_is_faster_than_the_hook_waits_for_it(place: Place, state: str) -> None:
    with not_yet_waiting(state) as wait_for_the_hook:
        threading.Timer(0.4, wait_for_the_hook).start()
        assert hook_of(place).answer("CONTINUE")
    assert place.state == "InService"


def test_an_agent_that_fails_after_a_restart_in_service_does_not_give_its_instance_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words would be wrong: an instance in service is not abandoned, its health checks decide."""
    assert hook_of(place).answer("CONTINUE")
    monkeypatch.setenv("NXPIPE_FORWARDED", str(place.root / "position.json"))
    monkeypatch.setenv("NXPIPE_GIVEN_UP", str(place.root / "given-up"))
    Path("dev/neuron0").unlink()
    answer = place.run("true")
    assert (answer.code, place.state) == (NOT_READY, "InService")
    assert answer.err.count("has 0 Neuron devices") == 1
    assert "is given up" not in answer.err
    assert not (place.root / "given-up").exists()


@pytest.mark.sample(4)
def test_an_instance_that_cannot_serve_is_given_up_although_its_hook_comes_later(place: Place) -> None:
    Path("dev/neuron0").unlink()
    with not_yet_waiting("Pending") as wait_for_the_hook:
        threading.Timer(1.5, wait_for_the_hook).start()
        assert place.run("server").code == NOT_READY
    assert place.state is None


def test_a_hook_that_was_completed_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook_of(place).answer("CONTINUE")
    monkeypatch.setattr(agent_group, "time", SimpleNamespace(monotonic=time.monotonic))  # no call of sleep
    assert not hook_of(place).answer("CONTINUE")
    assert not hook_of(place).answer("ABANDON")
    assert place.state == "InService"


def test_an_instance_whose_hook_never_comes_does_not_wait_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_group, "_ACTION_WITHIN", 0)
    with (
        not_yet_waiting("Pending"),
        pytest.raises(HookNotCompleted, match=r"has no pending action for instance .* in state Pending"),
    ):
        hook_of(place).answer("CONTINUE")


def test_a_server_that_exits_while_the_agent_waits_for_the_hook_gives_the_instance_up(place: Place, port: int) -> None:
    configure(port)
    with not_yet_waiting("Pending") as wait_for_the_hook, agent_of(place, *command(port)) as agent:
        agent.await_status(f"STATUS=complete hook {HOOK}")
        with pytest.raises(OSError, match=r"closed|reset"):
            get(port, "/exit")
        wait_for_the_hook.await_attempts(2)  # before the second, the agent has seen that the server exited
        wait_for_the_hook()
        code, _, err = agent.end()
    assert (code, place.state) == (NOT_READY, None), err
    assert "the server exited with code 7 before it was ready" in err
