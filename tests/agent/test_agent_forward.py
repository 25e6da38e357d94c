"""`nxpipe agent forward`: the journal of an instance's units is in the fleet's log group, also when it is given up."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from nxpipe.pipeline.fleet.agent import logs as forwarding
from nxpipe.pipeline.fleet.agent.logs import (
    AGENT,
    FleetStreams,
    JournalEntry,
    StopSignal,
    batches,
    deliver_last_words,
    refused_events,
)
from nxpipe.pipeline.util.errors import AwsError, NotReady
from tests.agent.journal import Journal
from tests.agent.metadata import metadata_service
from tests.agent.test_agent_run import Place, place
from tests.pipeline.command import NXPIPE, Answer, nxpipe

__all__ = ["place"]

pytestmark = pytest.mark.sample(8)

GROUP, INSTANCE = "/nxpipe/demo/search", "i-0a1b"
WATCH = "nxpipe-watch.service"


@dataclass
class Instance:
    root: Path
    journal: Journal
    logs: Any
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    words = ("agent", "forward", "--log", GROUP, "--unit", AGENT, "--unit", WATCH)

    def forward(self, *more: str, **environment: str) -> Answer:
        return nxpipe(*self.words, *more, cwd=self.root, **environment)

    def start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([str(NXPIPE), *self.words], cwd=self.root)
        self.running.append(process)
        return process

    def stream(self, name: str, instance: str = INSTANCE) -> list[str]:
        missing = self.logs.exceptions.ResourceNotFoundException
        try:
            events = self.logs.get_log_events(
                logGroupName=GROUP, logStreamName=f"{instance}/{name}", startFromHead=True
            )["events"]
        except missing:
            return []
        return [event["message"] for event in events]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Journal:
    monkeypatch.setenv("NXPIPE_FORWARDED", str(tmp_path / "state/position.json"))
    return Journal.installed(tmp_path, monkeypatch)


@pytest.fixture
def instance(
    server: dict[str, str], journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Instance]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    logs = boto3.client("logs", region_name="us-east-2")
    logs.create_log_group(logGroupName=GROUP)
    with metadata_service() as metadata:
        metadata.values |= {
            "instance-id": INSTANCE,
            "instance-type": "inf2.xlarge",
            "placement/region": "us-east-2",
            "local-ipv4": "127.0.0.1",
        }
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        held = Instance(tmp_path, journal, logs)
        yield held
        for process in held.running:
            process.kill()
            process.wait()
    logs.delete_log_group(logGroupName=GROUP)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_unit_has_a_stream_with_what_it_writes_and_what_systemd_reports_about_it(instance: Instance) -> None:
    instance.journal.write("a request")
    instance.journal.write("utilisation", WATCH)
    instance.journal.write("Main process exited, code=killed", "init.scope", UNIT=AGENT)
    instance.journal.write("Process 7 (python) dumped core", "systemd-coredump@1.service", COREDUMP_UNIT=AGENT)
    instance.journal.write("Out of memory: Killed process 7", "", _TRANSPORT="kernel")
    instance.journal.write([0x62, 0xFF])  # bytes that are not UTF-8
    instance.journal.write("")
    assert instance.forward("--once").code == 0
    reported = ["Main process exited, code=killed", "Process 7 (python) dumped core"]
    assert instance.stream("agent") == ["a request", *reported, "b\N{REPLACEMENT CHARACTER}"]
    assert instance.stream("watch") == ["utilisation"]
    assert instance.stream("kernel") == ["Out of memory: Killed process 7"]


def test_journalctl_is_asked_for_the_units_and_for_no_message_that_another_user_forges(instance: Instance) -> None:
    assert instance.forward("--once").code == 0
    (call,) = instance.journal.calls
    both = "{0}=nxpipe-agent.service {0}=nxpipe-watch.service"
    matches = " + ".join(
        [
            both.format("_SYSTEMD_UNIT"),
            *(f"_UID=0 {both.format(name)}" for name in ("UNIT", "COREDUMP_UNIT", "OBJECT_SYSTEMD_UNIT")),
            "_TRANSPORT=kernel PRIORITY=0 PRIORITY=1 PRIORITY=2 PRIORITY=3 PRIORITY=4",
        ]
    )
    assert call == f"--quiet --no-pager --output=json --all --boot {matches}"


def test_a_restart_neither_loses_nor_repeats_a_line(instance: Instance) -> None:
    instance.journal.write("before")
    process = instance.start()
    wait_for(lambda: instance.stream("agent") == ["before"])
    process.send_signal(signal.SIGTERM)
    instance.journal.write("at the end")  # journald stores a moment later what the units have written
    assert process.wait(20) == 0
    assert instance.stream("agent") == ["before", "at the end"]  # SIGTERM delivers the rest
    instance.journal.write("between")
    process = instance.start()
    wait_for(lambda: len(instance.stream("agent")) == 3)
    wait_for(lambda: "i=3;" in (instance.root / "state/position.json").read_text())
    process.kill()
    process.wait()
    instance.journal.write("after it was killed")
    assert instance.forward("--once").code == 0
    assert instance.stream("agent") == ["before", "at the end", "between", "after it was killed"]


@pytest.mark.parametrize("stored", ['{"instance": "i-other", "cursor": "s=0;i=1;b=0"}', '{"cursor": "-x"}', "[", "[]"])
def test_the_position_of_another_instance_or_a_damaged_one_does_not_count(instance: Instance, stored: str) -> None:
    path = instance.root / "state/position.json"
    path.parent.mkdir()
    path.write_text(stored)
    instance.journal.write("the first")
    assert instance.forward("--once").code == 0
    assert instance.stream("agent") == ["the first"]


def test_a_journal_that_ends_is_an_error_so_that_systemd_restarts_the_forwarder(instance: Instance) -> None:
    answer = instance.forward(JOURNAL_ENDS="1")
    assert (answer.code, answer.err.count("\n")) == (31, 1)
    assert "journalctl exited with 4" in answer.err


def test_a_log_group_that_does_not_exist_is_an_error_and_loses_no_line(instance: Instance) -> None:
    instance.journal.write("a line")
    answer = instance.forward("--once", "--log", "/nxpipe/demo/other")
    assert (answer.code, answer.err.count("\n")) == (32, 1)
    assert instance.forward("--once").code == 0
    assert instance.stream("agent") == ["a line"]


def test_a_line_that_is_no_entry_is_skipped_and_reported(instance: Instance) -> None:
    with instance.journal.path.open("a") as file:
        file.write("no JSON\n[1]\n" + "x" * 5_000_000 + "\n")
    instance.journal.entries = 3
    instance.journal.write("the next")
    answer = instance.forward("--once")
    assert answer.code == 0
    assert answer.err.count("is no entry of a journal, and is skipped") == 3
    assert instance.stream("agent") == ["the next"]


def test_more_lines_than_a_request_takes_arrive_in_order(instance: Instance) -> None:
    lines = [f"line {number}" for number in range(10_500)]
    at = time.time_ns() // 1000
    with instance.journal.path.open("a") as file:
        for number, text in enumerate(lines, 1):
            where = {"__CURSOR": f"s=0;i={number};b=0", "__REALTIME_TIMESTAMP": str(at), "_SYSTEMD_UNIT": AGENT}
            file.write(json.dumps({**where, "MESSAGE": text}) + "\n")
    assert instance.forward("--once").code == 0
    delivered: list[str] = []
    token: dict[str, str] = {}
    while len(delivered) < len(lines):
        page = instance.logs.get_log_events(
            logGroupName=GROUP, logStreamName=f"{INSTANCE}/agent", startFromHead=True, limit=10_000, **token
        )
        assert page["events"]
        delivered += [event["message"] for event in page["events"]]
        token = {"nextToken": page["nextForwardToken"]}
    assert delivered == lines


def _event(at: int, message: str = "x") -> dict[str, Any]:
    return {"timestamp": at, "message": message}


_DAY = 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("events", "sizes"),
    [
        ([_event(1)] * 10_001, [10_000, 1]),
        ([_event(1, "é" * 100_000)] * 11, [5, 5, 1]),  # 200,026 bytes each, of 1,048,576
        ([_event(0), _event(_DAY - 1), _event(_DAY)], [2, 1]),
        ([], []),
    ],
)
def test_a_request_is_within_the_limits_of_put_log_events(events: list[dict[str, Any]], sizes: list[int]) -> None:
    assert [len(batch) for batch in batches(events)] == sizes


def test_lines_are_in_chronological_order_after_the_clock_was_set_back() -> None:
    (batch,) = batches([_event(5, "a"), _event(3, "b"), _event(5, "c"), _event(3, "d")])
    assert [event["message"] for event in batch] == ["b", "d", "a", "c"]


def test_a_line_beyond_the_limit_of_an_event_is_split_between_characters() -> None:
    text = "a" + "é" * 200_000
    parts = [event["message"] for event in JournalEntry("", 7000, AGENT, text).events()]
    assert "".join(parts) == text
    assert [event["timestamp"] for event in JournalEntry("", 7000, AGENT, text).events()] == [7, 7]
    assert max(len(part.encode()) for part in parts) <= 256 * 1024 - 26


@pytest.mark.parametrize(
    "line", ['{"_aws": {"CloudWatchMetrics": []}}', ' \t{"a": 1, "\\u005fAWS": {}}', '{"\\u005f\\u0061ws": {}}']
)
def test_a_line_of_a_server_cannot_become_a_metric_of_the_fleet(line: str) -> None:
    """A server may log what its clients send, and alarms act on metrics."""
    (event,) = JournalEntry("", 0, AGENT, line).events()
    assert event["message"] == f"log: {line}"


@pytest.mark.parametrize("line", ['{"level": "info"}', "an _aws in text", "{x}"])
def test_other_lines_are_delivered_as_they_are(line: str) -> None:
    (event,) = JournalEntry("", 0, AGENT, line).events()
    assert event["message"] == line


@pytest.mark.parametrize(
    ("refused", "count"),
    [
        ({}, 0),
        ({"tooOldLogEventEndIndex": 2}, 2),
        ({"tooOldLogEventEndIndex": 2, "expiredLogEventEndIndex": 3}, 3),
        ({"tooNewLogEventStartIndex": 9, "expiredLogEventEndIndex": 1}, 2),
    ],
)
def test_refused_events_are_counted(refused: dict[str, int], count: int) -> None:
    assert refused_events({"rejectedLogEventsInfo": refused}, 10) == count


class _Service:
    """CloudWatch Logs with the given answers: a response, or the code of an error."""

    class exceptions:  # noqa: N801, as in botocore
        class ResourceAlreadyExistsException(Exception):
            pass

    def __init__(self, *answers: dict[str, Any] | str) -> None:
        self.answers = list(answers)
        self.got: list[list[str]] = []

    def create_log_stream(self, **names: str) -> None:
        raise self.exceptions.ResourceAlreadyExistsException

    def put_log_events(self, logEvents: list[dict[str, Any]], **names: str) -> dict[str, Any]:  # noqa: N803, as in botocore
        self.got.append([event["message"] for event in logEvents])
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            raise ClientError({"Error": {"Code": answer, "Message": "an error"}}, "PutLogEvents")
        return answer


class _Pauses(StopSignal):
    """Records the pauses and takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[float] = []

    def pause(self, seconds: float) -> None:
        self.taken.append(seconds)


def _streams(service: _Service) -> tuple[FleetStreams, _Pauses]:
    pauses = _Pauses()
    return FleetStreams(GROUP, INSTANCE, service, pauses, lambda said: None), pauses


def test_throttled_requests_are_repeated_with_growing_pauses() -> None:
    service = _Service(*["ThrottlingException"] * 7, {})
    streams, pauses = _streams(service)
    streams.write(AGENT, [_event(1, "a line")])
    assert service.got == [["a line"]] * 8
    assert pauses.taken == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    "answer", [{"rejectedLogEventsInfo": {"tooOldLogEventEndIndex": 2}}, "InvalidParameterException"]
)
def test_what_is_refused_for_good_is_counted_in_the_stream(answer: dict[str, Any] | str) -> None:
    service = _Service(answer, {})
    streams, _ = _streams(service)
    streams.write(AGENT, [_event(1, "a"), _event(2, "b")])
    assert service.got == [["a", "b"], ["nxpipe: 2 lines are missing here: CloudWatch Logs refused them"]]


def test_a_missing_permission_is_an_error_at_once() -> None:
    streams, pauses = _streams(_Service("AccessDeniedException"))
    with pytest.raises(AwsError, match="cannot write into the log"):
        streams.write(AGENT, [_event(1)])
    assert pauses.taken == []


def test_an_instance_is_abandoned_after_its_last_words_are_delivered(place: Place, journal: Journal) -> None:
    """The agent waits for the forwarder, which delivers all lines of the unit in their order."""
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName=GROUP)
    held, id_ = Instance(place.root, journal, logs), str(place.metadata.values["instance-id"])
    try:
        Path("dev/neuron0").unlink()
        journal.write("an earlier line")
        words = [str(NXPIPE), *place.words, "--", "true"]
        agent = subprocess.Popen(words, cwd=place.root, stderr=subprocess.PIPE, text=True)
        assert agent.stderr is not None
        line = next(line for line in agent.stderr if "is given up" in line)
        journal.write(line.rstrip())  # journald takes it from the agent's stderr
        assert f"nxpipe: instance {id_} is given up: dev has 0 Neuron devices" in line
        time.sleep(0.3)
        assert (place.state, agent.poll()) == ("Pending:Wait", None)
        held.start()
        wait_for(lambda: place.state != "Pending:Wait")
        assert held.stream("agent", id_) == ["an earlier line", line.rstrip()]
        assert agent.wait(20) == 31
    finally:
        for process in held.running:
            process.kill()
            process.wait()
        logs.delete_log_group(logGroupName=GROUP)


def test_an_instance_is_abandoned_without_a_forwarder_once_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forwarding, "_LAST_WORDS", 0.2)
    begun = time.monotonic()
    assert deliver_last_words(INSTANCE, NotReady("a fault\nin two lines"), os.environ)
    assert 0.2 <= time.monotonic() - begun < 5
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"nxpipe: instance {INSTANCE} is given up: a fault")
    assert said[1:] == ["nxpipe: the log was not delivered within 0 s"]


@pytest.mark.parametrize("cause", [SystemExit(143), KeyboardInterrupt()])
def test_a_signal_is_not_delayed(journal: Journal, cause: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """The process has three seconds after SIGTERM, and systemd stops the forwarder after it."""
    assert not deliver_last_words(INSTANCE, cause, os.environ)
    assert capsys.readouterr().err == ""
