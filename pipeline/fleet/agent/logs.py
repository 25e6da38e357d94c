"""Logs of an instance in the log group of its fleet: the journal of its units, and an agent's last words.

The journal is the buffer. No line is read before the lines before it are delivered, so memory holds one batch, and a
restart continues after the last delivered line: none is lost, and none repeats unless the process is killed within a
request. What the journal itself drops, by its rate limit, it states in a message of the unit, which is forwarded too.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.aws import client, convert_sdk_errors, error_code, is_transient
from nxpipe.pipeline.util.errors import AwsError, NotReady, sentence_of
from nxpipe.pipeline.util.exit_codes import exit_code_of
from nxpipe.pipeline.util.files import read_file, write_whole
from nxpipe.pipeline.util.process import report_crash
from nxpipe.pipeline.util.text import for_log

AGENT: Final = "nxpipe-agent.service"
KERNEL: Final = "kernel"  # in place of a unit
FORWARDED: Final = "NXPIPE_FORWARDED"  # environment variable: the file with the position in the journal

# Limits of PutLogEvents.
_BATCH_BYTES: Final = 1_048_576
_EVENT_OVERHEAD: Final = 26  # bytes of each event, beside its message
_EVENT_BYTES: Final = 256 * 1024 - _EVENT_OVERHEAD  # the limit until 2025, which some regions may still have
_EVENTS: Final = 10_000
_SPAN: Final = 24 * 3600 * 1000  # milliseconds

_QUIET: Final = 0.5  # seconds without a new line, after which a batch is sent
_LONGEST: Final = 3.0  # seconds from the first line of a batch until it is sent
_LINE_BYTES: Final = 4 * 2**20  # of journalctl's JSON, which takes up to four bytes for one of a binary message
_AFTER_STOP: Final = 20.0  # seconds to deliver the rest once the forwarder is stopped
_SYNC: Final = 0.3  # seconds that journald may take to store what a stopped unit wrote last
_LONGEST_PAUSE: Final = 30.0  # seconds between two attempts
_LAST_WORDS: Final = 15.0  # seconds that giving up waits for the log

_CURSOR: Final = re.compile(r"s=[0-9a-f]+;[0-9a-z=;]+")
# CloudWatch extracts metrics from each JSON event with the key "_aws", however the key is escaped. Alarms and rollouts
# act on the fleet's metrics, and a server may log what its clients send.
_METRIC_KEY: Final = re.compile(r"_aws|\\u00(?:5f|61|77|73)", re.IGNORECASE)


@dataclass(frozen=True)
class JournalEntry:
    cursor: str
    at: int  # microseconds
    source: str  # one of the followed units, or KERNEL
    text: str

    @classmethod
    def of(cls, line: bytes, units: Sequence[str]) -> "JournalEntry":
        """An entry of journalctl's JSON; ValueError or KeyError if it is none."""
        fields = json.loads(line)
        named = (_last(fields.get(name)) for name in ("UNIT", "COREDUMP_UNIT", "OBJECT_SYSTEMD_UNIT", "_SYSTEMD_UNIT"))
        source = next((unit for unit in named if unit in units), KERNEL)
        return cls(str(fields["__CURSOR"]), int(fields["__REALTIME_TIMESTAMP"]), source, _last(fields.get("MESSAGE")))

    def events(self) -> Iterator[dict[str, Any]]:
        """Events of CloudWatch Logs: several for a message beyond the limit, none without text."""
        for part in _parts(self.text.encode(errors="replace"), _EVENT_BYTES):
            yield {"timestamp": self.at // 1000, "message": part}


def _last(value: object) -> str:
    """The text of a field. Bytes that are not UTF-8 are a list of numbers, and a field may occur several times."""
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return bytes(value).decode(errors="replace")
    if isinstance(value, list):
        return _last(value[-1])
    return value if isinstance(value, str) else ""


def _parts(text: bytes, most: int) -> Iterator[str]:
    while text:
        end = min(most, len(text))
        while end < len(text) and text[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        part, text = text[:end].decode(), text[end:]
        yield _no_metric(part)


def _no_metric(text: str) -> str:
    return f"log: {text}" if text.lstrip().startswith("{") and _METRIC_KEY.search(text) else text


def batches(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The events in chronological order, in batches within the limits of PutLogEvents."""
    batch: list[dict[str, Any]] = []
    size = 0
    for event in sorted(events, key=lambda event: int(event["timestamp"])):  # the clock may have been set back
        more = len(event["message"].encode()) + _EVENT_OVERHEAD
        full = len(batch) == _EVENTS or size + more > _BATCH_BYTES
        if batch and (full or event["timestamp"] - batch[0]["timestamp"] >= _SPAN):
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += more
    if batch:
        yield batch


class StopSignal:
    """SIGTERM, after which the rest of the journal is delivered within a time limit."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._wake, self._waken = os.pipe()

    @contextmanager
    def handled(self) -> Iterator[None]:
        before = signal.signal(signal.SIGTERM, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            os.close(self._wake)
            os.close(self._waken)

    def _request(self, *_: object) -> None:
        if self._at is None:
            self._at = time.monotonic()
            os.write(self._waken, b"!")

    @property
    def requested(self) -> bool:
        return self._at is not None

    @property
    def left(self) -> float:
        """Seconds that remain for deliveries."""
        return float("inf") if self._at is None else self._at + _AFTER_STOP - time.monotonic()

    def readable(self, file: int, limit: float | None) -> bool:
        """Wait until a file has data; False at the limit, and once the stop is requested."""
        found, _, _ = select.select([file, self._wake], [], [], limit)
        return found == [file]

    def pause(self, seconds: float) -> None:
        if self.requested:
            time.sleep(max(0.0, min(seconds, self.left)))
        else:
            select.select([self._wake], [], [], seconds)


@dataclass(frozen=True)
class Journal:
    """The journal of some units, and the kernel's warnings and errors."""

    units: tuple[str, ...]
    program: str = "journalctl"

    @contextmanager
    def read(self, cursor: str | None, *, follow: bool) -> Iterator["subprocess.Popen[bytes]"]:
        """Entries after a cursor, or of this boot. `follow`: and all that come."""
        start = (
            [f"--after-cursor={cursor}"] if cursor else ["--boot"]
        )  # an image may contain the journal of another one
        form = ["--quiet", "--no-pager", "--output=json", "--all"]  # without --all, a long message is null
        command = [self.program, *form, *(["--follow", "--no-tail"] if follow else []), *start, *self._matches()]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        except OSError as missing:
            raise NotReady(
                f"{self.program} cannot be started ({missing.strerror}); use an image with systemd's journal"
            ) from missing
        try:
            yield process
        finally:
            process.kill()  # it only reads
            process.wait()

    def _matches(self) -> Iterator[str]:
        """What units write, and what systemd, journald and coredumps report about them: any process can set UNIT=,
        hence the match of the user. `+` is an alternative.
        """
        yield from (f"_SYSTEMD_UNIT={unit}" for unit in self.units)
        for name in ("UNIT", "COREDUMP_UNIT", "OBJECT_SYSTEMD_UNIT"):
            yield from ("+", "_UID=0", *(f"{name}={unit}" for unit in self.units))
        yield from ("+", "_TRANSPORT=kernel", *(f"PRIORITY={priority}" for priority in range(5)))


@dataclass
class Position:
    """The position in the journal up to which all is delivered, in a file. That of another instance does not count:
    an image may be made of an instance.
    """

    path: Path
    instance: str
    cursor: str | None = None
    delivered: dict[str, int] = field(default_factory=dict)  # time of the last delivered line, by unit

    @classmethod
    def load(cls, path: Path, instance: str) -> "Position":
        stored = _stored(path)
        cursor = stored.get("cursor")
        if stored.get("instance") != instance or not isinstance(cursor, str) or not _CURSOR.fullmatch(cursor):
            return cls(path, instance)
        return cls(path, instance, cursor)

    def advance(self, entries: Sequence[JournalEntry]) -> None:
        self.cursor = entries[-1].cursor
        for entry in entries:
            self.delivered[entry.source] = max(entry.at, self.delivered.get(entry.source, 0))
        document = {"instance": self.instance, "cursor": self.cursor, "delivered": self.delivered}
        write_whole(self.path, json.dumps(document).encode())


def _stored(path: Path) -> dict[str, Any]:
    """The document of the file; empty if there is none that can be read."""
    try:
        document = json.loads(read_file(path, limit=2**20))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


@dataclass
class FleetStreams:
    """Streams INSTANCE/SOURCE in the fleet's log group."""

    group: str
    instance: str
    logs: Any
    stop: StopSignal
    say: Callable[[str], None]
    _created: set[str] = field(default_factory=set)

    def write(self, source: str, events: Iterable[dict[str, Any]]) -> None:
        """Delivers events. What CloudWatch refuses for good is counted in the stream; an AwsError is for all others."""
        stream = f"{self.instance}/{source.removesuffix('.service').removeprefix('nxpipe-').replace(':', '-')}"
        for batch in batches(events):
            if refused := self._put(stream, batch):
                notice = f"nxpipe: {refused} lines are missing here: CloudWatch Logs refused them"
                self.say(f"{stream}: {notice}")
                self._put(stream, [{"timestamp": int(time.time() * 1000), "message": notice}])

    def _put(self, stream: str, batch: Sequence[dict[str, Any]]) -> int:
        """The number of events that were refused. Repeats until the service answers, or the stop's time is over."""
        pause = 1.0
        while True:
            try:
                self._create(stream)
                with convert_sdk_errors(f"write into the log {self.group}"):
                    answer = self.logs.put_log_events(
                        logGroupName=self.group, logStreamName=stream, logEvents=list(batch)
                    )
                return refused_events(answer, len(batch))
            except AwsError as error:
                if error_code(error) == "InvalidParameterException":
                    self.say(str(error))
                    return len(batch)
                if not is_transient(error) or self.stop.left <= pause:
                    raise
                self.say(f"{error}; the next attempt is in {pause:.0f} s")
            self.stop.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _create(self, stream: str) -> None:
        if stream in self._created:
            return
        already = self.logs.exceptions.ResourceAlreadyExistsException  # created before a restart
        with convert_sdk_errors(f"create a stream in the log {self.group}"), suppress(already):
            self.logs.create_log_stream(logGroupName=self.group, logStreamName=stream)
        self._created.add(stream)


def refused_events(answer: Mapping[str, Any], count: int) -> int:
    """How many of the events an answer of PutLogEvents refuses: too old, expired, or too far in the future."""
    refused = answer.get("rejectedLogEventsInfo") or {}
    early = max(refused.get("tooOldLogEventEndIndex", 0), refused.get("expiredLogEventEndIndex", 0))
    return int(early + count - refused.get("tooNewLogEventStartIndex", count))


class _Lines:
    """Lines of a program's output, a batch at a time."""

    def __init__(self, output: int, stop: StopSignal | None) -> None:
        """Without `stop`, until the output ends."""
        self._output, self._stop = output, stop
        self._pending = b""
        self._skips = False  # the rest of a line that is too long
        self.ended = False

    def batch(self) -> list[bytes]:
        """Lines until none comes for a moment, or they are enough for a request; none at the end or at the stop."""
        lines: list[bytes] = []
        size, until = 0, float("inf")
        while size < _BATCH_BYTES and not self.ended:
            limit = min(_QUIET, until - time.monotonic()) if lines else None
            if self._stop and ((limit is not None and limit <= 0) or not self._stop.readable(self._output, limit)):
                break
            chunk = os.read(self._output, 2**16)
            self.ended = not chunk
            more = self._split(chunk)
            if more and not lines:
                until = time.monotonic() + _LONGEST
            lines += more
            size += sum(map(len, more))
        return lines

    def _split(self, chunk: bytes) -> list[bytes]:
        *whole, self._pending = (self._pending + chunk).split(b"\n")
        if whole and self._skips:
            whole, self._skips = whole[1:], False
        if self._skips:
            self._pending = b""
        elif len(self._pending) > _LINE_BYTES:
            whole.append(self._pending[:80])  # no entry, which is reported
            self._pending, self._skips = b"", True
        return whole


@dataclass
class Forwarder:
    journal: Journal
    streams: FleetStreams
    position: Position
    stop: StopSignal
    say: Callable[[str], None]

    def run(self, *, once: bool) -> None:
        """Forwards until SIGTERM, and then what remains. `once`: what the journal has."""
        with self.stop.handled():
            if not once:
                self._follow()
                self.stop.pause(_SYNC)
            while self._deliver_rest() and not once:
                self.stop.pause(_SYNC)

    def _follow(self) -> None:
        with self.journal.read(self.position.cursor, follow=True) as process:
            assert process.stdout is not None
            lines = _Lines(process.stdout.fileno(), self.stop)
            while not self.stop.requested:
                self._deliver(lines.batch())
                if lines.ended:
                    raise NotReady(
                        f"{self.journal.program} exited with {process.wait()}; see its output above, and restart it"
                    )

    def _deliver_rest(self) -> int:
        with self.journal.read(self.position.cursor, follow=False) as process:
            assert process.stdout is not None
            lines, delivered = _Lines(process.stdout.fileno(), None), 0
            while not lines.ended and self.stop.left > 0:
                delivered += self._deliver(lines.batch())
        return delivered

    def _deliver(self, lines: Sequence[bytes]) -> int:
        entries = [entry for line in lines if (entry := self._entry(line))]
        by_source: dict[str, list[JournalEntry]] = {}
        for entry in entries:
            by_source.setdefault(entry.source, []).append(entry)
        for source, of_source in by_source.items():
            self.streams.write(source, (event for entry in of_source for event in entry.events()))
        if entries:
            self.position.advance(entries)
        return len(entries)

    def _entry(self, line: bytes) -> JournalEntry | None:
        try:
            return JournalEntry.of(line, self.journal.units)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.say(f"a line of {self.journal.program} is no entry of a journal, and is skipped: {line[:80]!r}")
            return None


def open_forwarder(
    group: str, instance: str, region: str, units: tuple[str, ...], path: Path, say: Callable[[str], None]
) -> Forwarder:
    stop = StopSignal()
    streams = FleetStreams(group, instance, client("logs", region), stop, say)
    return Forwarder(Journal(units), streams, Position.load(path, instance), stop, say)


def deliver_last_words(instance: str, cause: BaseException, environ: Mapping[str, str]) -> bool:
    """Writes why an instance is given up, and waits until the forwarder has delivered it, and so all lines before it.

    Not after SIGTERM, whose time limit is short: systemd stops the forwarder after the agent. True if it is written:
    then the agent writes no other sentence about the cause.
    """
    path = environ.get(FORWARDED)
    if not path or not isinstance(cause, Exception):
        return False
    begun = time.time_ns() // 1000
    sys.stderr.write(f"nxpipe: instance {instance} is given up: {for_log(_sentence_about(cause))}\n")
    sys.stderr.flush()
    until = time.monotonic() + _LAST_WORDS
    while _delivered(Path(path)) < begun:
        if time.monotonic() > until:
            sys.stderr.write(f"nxpipe: the log was not delivered within {_LAST_WORDS:.0f} s\n")
            break
        time.sleep(0.1)
    return True


def _sentence_about(cause: Exception) -> str:
    if exit_code_of(cause) is None:
        return report_crash(cause)
    lines: Sequence[str] = getattr(cause, "lines", ())  # one for each fault of a configuration
    return "; ".join(lines) or sentence_of(cause)


def _delivered(path: Path) -> int:
    times = _stored(path).get("delivered")
    at = times.get(AGENT) if isinstance(times, dict) else None
    return at if isinstance(at, int) else 0
