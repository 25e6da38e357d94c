"""From neuron-monitor to CloudWatch: each of its reports becomes one event of the fleet's log."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from nxpipe.pipeline.fleet.agent.embedded import event, metrics
from nxpipe.pipeline.fleet.agent.report import ReportInvalid, figures
from nxpipe.pipeline.util.aws import asking, client
from nxpipe.pipeline.util.errors import AwsError, NotReady

_RUNTIME: Final = ("neuroncore_counters", "memory_used", "execution_stats")
_COMPILER: Final = "neuronx-cc"
_LONGEST: Final = 2**20  # bytes of one report; one of a trn2.48xlarge has some hundred thousand
_PATIENCE: Final = 5  # seconds that the monitor has to end


@dataclass
class Compilers:
    """The compiler's processes that were not there at the last look: on a fleet there should never be one."""

    processes: Path
    _seen: frozenset[str] = field(default=frozenset())

    def begun(self) -> int:
        running = frozenset(each.name for each in self.processes.glob("[0-9]*") if _compiles(each))
        begun = len(running - self._seen)
        self._seen = running
        return begun


@dataclass(frozen=True)
class FleetLog:
    """One stream for each instance."""

    group: str
    instance: str
    logs: Any

    @classmethod
    def open(cls, group: str, instance: str, region: str) -> "FleetLog":
        logs = client("logs", region)
        already = logs.exceptions.ResourceAlreadyExistsException  # of the same instance, before it was restarted
        with asking(f"make a stream in the log {group}"), suppress(already):
            logs.create_log_stream(logGroupName=group, logStreamName=instance)
        return cls(group, instance, logs)

    def write(self, at: int, text: str) -> None:
        with asking(f"write into the log {self.group}"):
            self.logs.put_log_events(
                logGroupName=self.group,
                logStreamName=self.instance,
                logEvents=[{"timestamp": at, "message": text}],
            )


def watch(
    monitor: str,
    period: int,
    dimensions: dict[str, str],
    log: FleetLog,
    compilers: Compilers,
    say: Callable[[str], None],
) -> None:
    """Until the monitor ends, which it should not. A report that cannot be, and one that AWS did not take, is lost and
    said: the next one is newer.
    """
    with _reports(monitor, period) as reports:
        for report in reports:
            at = int(time.time() * 1000)
            try:
                sent = metrics(figures(report), compilers.begun())
                log.write(at, event(at, dimensions, log.instance, sent))
            except ReportInvalid as wrong:
                say(f"{monitor} reported what no device can have ({wrong}); left out, going on")
            except AwsError as lost:
                say(f"{lost}; going on")


@contextmanager
def _reports(monitor: str, period: int) -> Iterator[Iterator[dict[str, Any]]]:
    with TemporaryDirectory() as folder:
        settings = Path(folder, "monitor.json")
        kinds = [{"type": kind} for kind in _RUNTIME]
        wanted = {"period": f"{period}s", "neuron_runtimes": [{"tag_filter": ".*", "metrics": kinds}]}
        settings.write_text(json.dumps({**wanted, "system_metrics": []}))
        command = [monitor, "-c", str(settings)]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        except OSError as missing:
            raise NotReady(
                f"{monitor} cannot be started ({missing.strerror}); install aws-neuronx-tools in the AMI, or name the "
                "program with --monitor"
            ) from missing
        try:
            yield _documents(process, monitor)
        finally:
            _end(process)


def _documents(process: "subprocess.Popen[bytes]", monitor: str) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    while line := process.stdout.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise NotReady(f"{monitor} wrote a line of more than {_LONGEST} bytes, which is no report")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as broken:
            raise NotReady(f"{monitor} wrote what is no report ({broken}): {line[:80]!r}") from broken
        if not isinstance(found, dict):
            raise NotReady(f"{monitor} wrote what is no report, but {line[:80]!r}")
        yield found
    raise NotReady(f"{monitor} ended with {process.wait()}; what it said is above, and it is to be started again")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _compiles(process: Path) -> bool:
    """By the words that it was started with: the compiler is a script, whose program is an interpreter."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")[:2]
    except OSError:
        return False  # it has ended since
    return any(Path(word.decode(errors="replace")).name == _COMPILER for word in words if word)
