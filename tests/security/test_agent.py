"""Class F of the review: what an instance's agent is told by its metadata service, its monitor, its folder, by AWS and
by whoever ends it.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.fleet.agent.group import LifecycleHook
from nxpipe.pipeline.util import exit_codes
from tests.agent.conftest import server
from tests.agent.project import CONFIG
from tests.agent.test_agent_run import HOOK, Place, place
from tests.agent.test_agent_watch import BUSY
from tests.agent.test_agent_watch import Place as Watched
from tests.agent.test_agent_watch import place as watched
from tests.artifact_store.afar import patch
from tests.pipeline.command import NXPIPE
from tests.pipeline.in_process import InProcess, nxpipe

pytestmark = pytest.mark.sample(2)

__all__ = ["nxpipe", "place", "server", "watched"]

NOT_READY = exit_codes.NOT_READY.number
ESCAPES = "\x1b]0;PWNED\x07\n::error::x"


def attempt(*ids: str) -> Any:
    return pytest.mark.attempt(*ids)


def is_one_sentence(said: str) -> bool:
    """In one line, without a traceback, and without anything that a terminal would obey."""
    return said.count("\n") == 1 and said[:-1].isprintable() and "internal error" not in said


# The metadata service


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        pytest.param("instance-type", ESCAPES, "returns no valid", marks=attempt("F01")),
        pytest.param("instance-type", "t3.micro", "t3.micro is not an instance type", marks=attempt("F02")),
        pytest.param("instance-id", "i" * 50_000_000, "returns no valid", marks=attempt("F03")),
        pytest.param("instance-id", b"i-\xff\xfe", "returns no valid", marks=attempt("F04")),
        pytest.param("instance-type", b"inf2\x00", "returns no valid", marks=attempt("F04")),
        pytest.param("placement/region", "x.evil.example/#", "returns no valid", marks=attempt("F08")),
        ("instance-id", "", "returns no valid"),
        ("tags/instance/aws:autoscaling:groupName", ESCAPES, "returns no valid"),
        ("tags/instance/aws:autoscaling:groupName", "g" * 2000, "returns no valid"),
    ],
)
def test_nonsense_of_the_metadata_service_is_one_sentence(
    nxpipe: InProcess, place: Place, name: str, value: str | bytes, what: str
) -> None:
    place.metadata.values[name] = value
    answer = nxpipe("agent", "run", "--fleet", "search", "--to", "served", "--devices", "dev")
    assert (answer.code, answer.out) == (NOT_READY, "")
    errors = answer.err.removeprefix("  check the devices")
    assert what in errors
    assert errors.rpartition("Error: ")[2][:-1].isprintable()
    assert not Path("served").exists()


@pytest.mark.parametrize(
    "endpoint",
    [
        pytest.param("http://127.0.0.1:1", marks=attempt("F05")),
        pytest.param("gopher://x y", marks=attempt("F06")),
        pytest.param("http://[", marks=attempt("F06")),
        pytest.param("http://127.0.0.1:many", marks=attempt("F06")),
        pytest.param("nonsense", marks=attempt("F06")),
    ],
)
def test_a_metadata_service_that_is_none_is_one_sentence(
    nxpipe: InProcess, place: Place, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
    answer = nxpipe(*place.words)
    assert (answer.code, is_one_sentence(answer.err)) == (NOT_READY, True), answer.err
    assert "instance metadata service" in answer.err


@attempt("F07")
def test_the_group_of_another_project_has_no_colour_here(nxpipe: InProcess, place: Place) -> None:
    place.metadata.values["tags/instance/aws:autoscaling:groupName"] = "other-green"
    answer = nxpipe("agent", "run", "--fleet", "search", "--to", "served", "--devices", "dev")
    assert answer.code == 0, answer.err
    assert "search--green" not in answer.err


# The hook


@attempt("F09")
def test_an_auto_scaling_that_does_not_answer_is_one_sentence(
    nxpipe: InProcess, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_AUTO_SCALING", "http://127.0.0.1:1")
    answer = nxpipe(*place.words)
    assert answer.code == NOT_READY
    assert "was not completed with CONTINUE" in answer.err


@attempt("F10", "F11")
def test_an_instance_that_can_serve_is_told_of_once_and_serves_after_a_restart(nxpipe: InProcess, place: Place) -> None:
    assert nxpipe(*place.words).code == 0
    assert place.state == "InService"
    assert nxpipe(*place.words).code == 0


@attempt("F12")
def test_a_refusal_of_aws_is_said_and_nothing_of_it_reaches_the_terminal(
    nxpipe: InProcess, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def complete_lifecycle_action(self, **_: str) -> None:
            denied = {"Code": "AccessDenied", "Message": "no \x1b[31m PWN"}
            raise ClientError({"Error": denied}, "CompleteLifecycleAction")

    monkeypatch.setattr(LifecycleHook, "_client", lambda _: Refusing())
    answer = nxpipe(*place.words)
    assert answer.code == NOT_READY
    assert "was not completed with CONTINUE" in answer.err
    assert "\x1b" not in answer.err


def _unsigned(place: Place) -> None:
    Path("nxpipe.toml").write_text(
        CONFIG + '[signing]\nrequire = ["production"]\n[[signing.trusted]]\nname = "r"\nkey = "file:r.key.pub"\n'
    )


def _corrupt(place: Place) -> None:
    patch(Path("store") / blob_path(place.published.executables[0].blob))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        pytest.param(_unsigned, exit_codes.REFUSED.number, marks=attempt("F13")),
        pytest.param(_corrupt, exit_codes.CORRUPT.number, marks=attempt("F14")),
        pytest.param(lambda _: None, NOT_READY, marks=attempt("F15")),
        pytest.param(
            lambda _: Path("nxpipe.toml").write_text("garbage"), exit_codes.CONFIGURATION.number, marks=attempt("F16")
        ),
        pytest.param(lambda _: Path("dev/neuron0").unlink(), NOT_READY, marks=attempt("F22")),
    ],
)
def test_an_instance_that_cannot_serve_is_given_up(
    nxpipe: InProcess, place: Place, spoil: Callable[[Place], object], code: int
) -> None:
    assert nxpipe("store", "keygen", "r.key").code == 0
    spoil(place)
    command = ("--", "no-such-program") if code == NOT_READY and Path("dev/neuron0").exists() else ()
    answer = nxpipe(*place.words, *command)
    assert (answer.code, place.state) == (code, None), answer.err
    assert not Path("served/manifest.json").exists()


_ENDED_WHILE_IT_PREPARES = """
import os, signal, sys, time
from nxpipe.pipeline.fleet.agent.run import Agent
from nxpipe.pipeline.cli.main import main

def prepare(self, instance, step):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

Agent.prepare = prepare
sys.argv = ["nxpipe", *sys.argv[1:]]
main()
"""


@attempt("F17")
def test_an_agent_that_is_ended_while_it_prepares_gives_the_instance_up(place: Place) -> None:
    words = [sys.executable, "-c", _ENDED_WHILE_IT_PREPARES, *place.words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == exit_codes.TERMINATED.number, done.stderr
    assert place.state is None


# The folder


@pytest.mark.sample(4)
@attempt("F18")
def test_a_fetch_that_is_killed_leaves_nothing_that_a_server_would_read(place: Place, nxpipe: InProcess) -> None:
    words = [str(NXPIPE), "agent", "run", "--fleet", "search", "--to", "served", "--devices", "dev"]
    for moment in (0.2, 0.5, 0.8, 1.1):
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        running.send_signal(signal.SIGKILL)
        running.wait()
        manifest = Path("served/manifest.json")
        assert not manifest.exists() or manifest.read_bytes() == place.published.to_bytes()
    assert nxpipe(*words[1:]).code == 0
    assert Path("served/manifest.json").read_bytes() == place.published.to_bytes()


@attempt("F19")
def test_a_folder_with_files_of_a_stranger_is_refused(place: Place, nxpipe: InProcess) -> None:
    Path("served").mkdir()
    Path("served/notes").write_text("mine")
    answer = nxpipe(*place.words)
    assert (answer.code, place.state) == (exit_codes.REFUSED.number, None)
    assert Path("served/notes").read_text() == "mine"


@attempt("F20")
def test_a_link_to_a_folder_is_that_folder(place: Place, nxpipe: InProcess) -> None:
    Path("elsewhere").mkdir()
    Path("served").symlink_to("elsewhere")
    assert nxpipe(*place.words).code == 0
    assert Path("elsewhere/manifest.json").read_bytes() == place.published.to_bytes()


@attempt("F21")
def test_a_part_of_the_folder_that_leads_out_is_refused(place: Place, nxpipe: InProcess, tmp_path: Path) -> None:
    words = [word for word in place.words if word not in ("--hook", HOOK)]
    assert nxpipe(*words).code == 0
    outside = tmp_path / "outside"
    Path("served/executables").rename(outside)
    before = sorted(outside.iterdir())
    Path("served/executables").symlink_to(outside)
    for path in outside.rglob("*"):
        if path.is_file():
            path.write_bytes(b"changed")
    answer = nxpipe(*words)
    assert answer.code == exit_codes.REFUSED.number, answer.err
    assert sorted(outside.iterdir()) == before
    assert all(path.read_bytes() == b"changed" for path in outside.rglob("*") if path.is_file())


# The monitor


def watch(nxpipe: InProcess, watched: Watched, monkeypatch: pytest.MonkeyPatch, said: bytes, then: str = "") -> Any:
    monkeypatch.chdir(watched.root)
    Path("said").write_bytes(said)
    monitor = watched.root / "monitor"
    monitor.write_text(f"#!/bin/sh\ncat said\n{then}\n")
    monitor.chmod(0o755)
    return nxpipe("agent", "watch", "--fleet", "search", "--log", "/nxpipe/demo/search", "--monitor", str(monitor))


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"\x1b]0;PWNED\x07", marks=attempt("F30")),
        pytest.param(b"[]", marks=attempt("F31")),
        pytest.param(b"[" * 500_000, id="nested"),
        pytest.param(b"\xff\xfe{}", id="no UTF-8"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", id="five thousand digits"),
    ],
)
def test_a_line_that_is_no_report_ends_it_in_one_sentence(
    nxpipe: InProcess, watched: Watched, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    answer = watch(nxpipe, watched, monkeypatch, line + b"\n")
    assert (answer.code, is_one_sentence(answer.err)) == (NOT_READY, True), answer.err
    assert watched.events() == []


def _core(utilisation: str) -> str:
    cores = f'{{"neuroncores_in_use": {{"0": {{"neuroncore_utilization": {utilisation}}}}}}}'
    return f'{{"neuron_runtime_data": [{{"report": {{"neuroncore_counters": {cores}}}}}]}}'


def _failed(count: str) -> str:
    summary = f'{{"error_summary": {{"hardware": {count}}}}}'
    return f'{{"neuron_runtime_data": [{{"report": {{"execution_stats": {summary}}}}}]}}'


def _held(size: str) -> str:
    usage = f'{{"usage_breakdown": {{"neuroncore_memory_usage": {{"0": {{"tensors": {size}}}}}}}}}'
    return f'{{"neuron_runtime_data": [{{"report": {{"memory_used": {{"neuron_runtime_used_bytes": {usage}}}}}}}]}}'


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "report",
    [
        *[pytest.param(_core(entry), marks=attempt("F32")) for entry in ("NaN", "Infinity", "1e999")],
        *[pytest.param(_failed(entry), marks=attempt("F33")) for entry in ('"many"', '"3"', "true", "[1]", "{}")],
        pytest.param('{"neuron_runtime_data": [{"report": "x"}]}', marks=attempt("F34")),
        pytest.param('{"neuron_runtime_data": "x"}', marks=attempt("F34")),
        pytest.param('{"neuron_runtime_data": [7]}', marks=attempt("F34")),
        pytest.param('{"neuron_runtime_data": [{"report": {"memory_used": [1]}}]}', marks=attempt("F34")),
        pytest.param('{"neuron_hardware_info": [1]}', marks=attempt("F34")),
        *[pytest.param(_core(entry), marks=attempt("F36")) for entry in ("-1", "1e6", "379478809005936895323497096")],
        *[pytest.param(_failed(entry), marks=attempt("F36")) for entry in ("-5", "1e300", "379478809005936895323")],
        *[pytest.param(_held(entry), marks=attempt("F36")) for entry in ("-5", "1e300", "NaN")],
        pytest.param('{"neuron_hardware_info": {"neuron_device_count": -1}}', marks=attempt("F36")),
    ],
)
def test_a_report_that_no_device_can_have_is_left_out_and_said(
    nxpipe: InProcess, watched: Watched, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    answer = watch(nxpipe, watched, monkeypatch, f"{report}\n{json.dumps(BUSY)}\n".encode())
    assert answer.code == NOT_READY  # the monitor has ended
    assert "invalid report of" in answer.err
    assert [event["neuroncore_memory_usage_bytes"] for event in watched.events()] == [1000]


@attempt("F35")
@pytest.mark.parametrize("then", ["exec cat /dev/zero", "head -c 1048577 /dev/zero; exec sleep 60"])
def test_a_line_without_an_end_is_not_read_to_it(
    nxpipe: InProcess, watched: Watched, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    answer = watch(nxpipe, watched, monkeypatch, b"", then)
    assert (answer.code, is_one_sentence(answer.err)) == (NOT_READY, True), answer.err
    assert "a line of more than 1048576 bytes" in answer.err
    assert watched.events() == []
