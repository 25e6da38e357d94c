"""Counters of what a process executes on emulated cores, in a file that the device tools read.

A process that loads programs publishes one file in a folder of the user, `$NXPIPE_COUNTERS` or a folder of its own in
the runtime directory: when it loads the first program, then once a second if something has changed. The file is removed
when the process ends; readers skip and remove files of processes that were killed. An execution costs an addition and
an append. Only the standard library is imported, so the tools load no numpy.
"""

import atexit
import json
import math
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from nxpipe.emulator.errors import ExecutionError, IndexOutOfRange, MissingTensor, WrongTensor
from nxpipe.emulator.run.status import RuntimeFault, Status

if TYPE_CHECKING:
    from nxpipe.emulator.isa.program import Program
    from nxpipe.emulator.run.model import Code

VARIABLE: Final = "NXPIPE_COUNTERS"
PERIOD: Final = 1.0  # seconds between two writes
SAMPLES: Final = 512  # latencies that are kept

Category: TypeAlias = Literal["constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors"]
CATEGORIES: Final[tuple[Category, ...]] = (
    *("constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors"),
)
ECC: Final = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")


_P = ParamSpec("_P")
_R = TypeVar("_R")


class Outcome(NamedTuple):
    """How neuron-monitor counts an execution: in its `execution_summary`, and in its `error_summary` if it failed."""

    summary: str
    error: str | None = None


COMPLETED: Final = Outcome("completed")
_HARDWARE: Final = Outcome("completed_with_err", "hardware")
_OTHER: Final = Outcome("completed_with_err", "generic")
_OUTCOMES: Final[Mapping[Status, Outcome]] = {
    Status.NRT_TIMEOUT: Outcome("timed_out", "runtime"),
    Status.NRT_QUEUE_FULL: Outcome("failed_to_queue", "runtime"),
    Status.NRT_EXEC_NC_BUSY: Outcome("failed_to_queue", "runtime"),
    Status.NRT_RESOURCE: Outcome("failed_to_queue", "runtime"),
    Status.NRT_CLOSED: Outcome("failed_to_queue", "runtime"),
    Status.NRT_INVALID_HANDLE: Outcome("failed_to_queue", "runtime"),
    Status.NRT_EXEC_BAD_INPUT: Outcome("incorrect_input", "generic"),
    Status.NRT_EXEC_COMPLETED_WITH_NUM_ERR: Outcome("completed_with_num_err", "numerical"),
    Status.NRT_EXEC_COMPLETED_WITH_ERR: Outcome("completed_with_err", "model"),
    Status.NRT_EXEC_OOB: Outcome("completed_with_err", "model"),
    Status.NRT_COLL_PENDING: Outcome("timed_out", "runtime"),
    Status.NRT_HW_ERROR: _HARDWARE,
    Status.NRT_EXEC_UNIT_UNRECOVERABLE: _HARDWARE,
    Status.NRT_EXEC_HW_ERR_COLLECTIVES: _HARDWARE,
    Status.NRT_EXEC_HW_ERR_HBM_UE: _HARDWARE,
    Status.NRT_EXEC_HW_ERR_NC_UE: _HARDWARE,
    Status.NRT_EXEC_HW_ERR_DMA_ABORT: _HARDWARE,
    Status.NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE: Outcome("completed_with_err", "transient"),
}
SUMMARIES: Final = (
    *("completed", "completed_with_err", "completed_with_num_err", "timed_out", "incorrect_input", "failed_to_queue"),
)
ERRORS: Final = ("generic", "numerical", "transient", "model", "runtime", "hardware")


def outcome_of(fault: BaseException) -> Outcome:
    """The counters of a failed execution."""
    if isinstance(fault, RuntimeFault):
        return _OUTCOMES.get(fault.status, _OTHER)
    if isinstance(fault, MissingTensor | WrongTensor):
        return _OUTCOMES[Status.NRT_EXEC_BAD_INPUT]
    if isinstance(fault, IndexOutOfRange | ExecutionError):
        return _OUTCOMES[Status.NRT_EXEC_COMPLETED_WITH_ERR]
    return _OTHER


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of one execution on one core: its duration, None if unknown, busy seconds by engine, FLOPs."""

    seconds: float | None = None
    engines: Mapping[str, float] = field(default_factory=dict)
    flops: int = 0

    @classmethod
    def of(cls, program: "Program") -> "Prediction":
        from nxpipe.emulator.analysis.utilization import busy, totals
        from nxpipe.emulator.schedule.timeline import latency_ns

        total, latency = totals(program), latency_ns(program)
        return cls._of_ns(latency, busy(total), total.multiply_adds)

    @classmethod
    def read(cls, document: Any) -> "Prediction | None":
        """The figures of a program's utilization, as its build has stored them; None if they have another form."""
        try:
            time_, products = document["time"], document["tensor_engine"]["multiply_adds"]
            latency, engines = time_["latency_ns"], time_["busy_ns"]
            found = cls._of_ns(
                None if latency is None else float(latency),
                {str(engine): float(ns) for engine, ns in engines.items()},
                int(products),
            )
            figures = (found.seconds or 0.0, found.flops, *found.engines.values())
            return found if all(0 <= figure < math.inf for figure in figures) else None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    @classmethod
    def _of_ns(cls, latency: float | None, busy_ns: Mapping[str, float], multiply_adds: int) -> "Prediction":
        engines = {engine: ns / 1e9 for engine, ns in busy_ns.items()}
        return cls(None if latency is None else latency / 1e9, engines, 2 * multiply_adds)


@dataclass(eq=False)
class ProgramCounters:
    """Executions of a loaded program on its cores, counted by one thread at a time.

    `predict` is called once, after the first execution and by the thread that publishes."""

    name: str
    digest: str
    cores: range
    memory: Mapping[Category, int]  # bytes on each core, with those that it shares with other programs
    predict: Callable[[], Prediction] = Prediction
    executions: int = 0
    failures: Counter[Outcome] = field(default_factory=Counter)
    latencies: "deque[tuple[float, ProgramCounters]]" = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @cached_property
    def prediction(self) -> Prediction:
        prediction, self.predict = self.predict(), Prediction  # it may hold the program
        return prediction

    def complete(self, seconds: float) -> None:
        """Count an execution that took so long on the host."""
        self.executions += 1
        self.latencies.append((seconds, self))

    def fail(self, fault: BaseException) -> None:
        self.failures[outcome_of(fault)] += 1

    def run(self, execute: Callable[_P, _R], *arguments: _P.args, **named: _P.kwargs) -> _R:
        """The result of an execution, which is counted."""
        begun = time.perf_counter()
        try:
            result = execute(*arguments, **named)
        except BaseException as fault:
            self.fail(fault)
            raise
        self.complete(time.perf_counter() - begun)
        return result


@dataclass
class _CoreSums:
    """Sums over the programs of one core."""

    busy: float = 0.0  # seconds, on the emulator's clock
    flops: int = 0
    engines: dict[str, float] = field(default_factory=dict)

    def add(self, program: ProgramCounters) -> None:
        if program.executions:
            own, times = program.prediction, program.executions
            self.busy += times * (own.seconds or 0.0)
            self.flops += times * own.flops
            for engine, seconds in own.engines.items():
                self.engines[engine] = self.engines.get(engine, 0.0) + times * seconds


class ProcessCounters:
    """The counters of this process, and their file."""

    def __init__(self, folder: Path) -> None:
        self.instance = ""  # the emulated instance type, if the runtime has one
        self.compiled = 0  # programs that were compiled to be loaded
        self.ecc: Counter[tuple[int, str]] = Counter()  # injected events, by device and kind
        self._path = folder / f"{os.getpid()}.json"
        self._process, self._born, self._command = (
            os.getpid(),
            birth_of(os.getpid()),
            " ".join((Path(sys.argv[0]).name, *sys.argv[1:]))[:256],
        )
        self._lock, self._programs, self._loads = threading.Lock(), list[ProgramCounters](), 0
        self._memory: Counter[tuple[int, Category]] = Counter()
        self._latencies: deque[tuple[float, ProgramCounters]] = deque(maxlen=SAMPLES)
        self._ended: list[ProgramCounters] = []
        self._writing, self._written, self._is_removed = threading.Lock(), "", False
        self._thread: threading.Thread | None = None

    def load(self, program: ProgramCounters) -> ProgramCounters:
        """Count a program from now on."""
        with self._lock:
            program.latencies = self._latencies
            self._programs.append(program)
            self._loads += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish, name="counters", daemon=True)
                self._thread.start()
                atexit.register(self._remove)
        return program

    def unload(self, program: ProgramCounters) -> None:
        """The program's counts stay in the sums."""
        with self._lock:
            if program in self._programs:
                self._programs.remove(program)
                if not program.executions:
                    program.predict = Prediction  # it may hold the program
                if program.executions or program.failures:
                    self._ended.append(program)

    def take(self, core: int, category: Category, nbytes: int) -> None:
        """Count memory of a core; a negative number releases it."""
        with self._lock:
            self._memory[core, category] += nbytes

    def document(self) -> dict[str, Any]:
        """What is published."""
        with self._lock:
            programs, ended, memory = tuple(self._programs), tuple(self._ended), +self._memory
            latencies = list(self._latencies)
        counted = (*ended, *programs)
        outcomes = Counter[Outcome]()
        for each in counted:
            outcomes.update(_outcomes(each))
        used = {core for program in programs for core in program.cores} | {core for core, _ in memory}
        sums = {core: _CoreSums() for core in sorted({core for each in counted for core in each.cores} | used)}
        for program in counted:
            for core in program.cores:
                sums[core].add(program)
        return {
            "pid": self._process,
            "born": self._born,
            "command": self._command,
            "tag": os.environ.get("NEURON_PROCESS_TAG", "")[:255],
            "instance": self.instance,
            "cores": [
                {
                    "core": core,
                    "in_use": core in used,
                    "busy": own.busy,
                    "flops": own.flops,
                    "engines": dict(own.engines),
                    "memory": {category: memory[core, category] for category in CATEGORIES},
                }
                for core, own in sums.items()
            ],
            "programs": [
                {
                    "name": program.name,
                    "digest": program.digest,
                    "cores": list(program.cores),
                    "memory": dict(program.memory),
                }
                for program in programs
            ],
            "loads": self._loads,
            "compiled": self.compiled,
            "executions": sum(program.executions for program in counted),
            "summary": _by_name(((outcome.summary, count) for outcome, count in outcomes.items()), SUMMARIES),
            "errors": _by_name(((outcome.error or "", count) for outcome, count in outcomes.items()), ERRORS),
            "latencies": [[seconds, program.prediction.seconds] for seconds, program in latencies],
            "ecc": [[device, kind, count] for (device, kind), count in self.ecc.items()],
        }

    def write(self) -> None:
        """Publish now, if something has changed. A full disk costs the counters and never an execution."""
        text = json.dumps(self.document(), separators=(",", ":"))
        with self._writing, suppress(OSError):
            if text != self._written and not self._is_removed:
                _write(self._path, text)
                self._written = text

    def _publish(self) -> None:
        while _current is self:
            self.write()
            time.sleep(PERIOD)

    def _remove(self) -> None:
        global _current
        if os.getpid() == self._process:  # and not a fork of it
            if _current is self:
                _current = None
            with self._writing, suppress(OSError):
                self._is_removed = True
                self._path.unlink(missing_ok=True)


class SessionCounters:
    """The counters of programs that are loaded together, each on all cores of the session."""

    def __init__(
        self, codes: "Mapping[str, Code]", cores: range, predict: Callable[[str], Prediction] | None = None
    ) -> None:
        """`predict` gives the figures of a program, by its name."""
        self._process, self._cores = process_counters(), cores
        # Programs of a session share weights and states, and use the scratchpad one after the other.
        states = {name: type_.nbytes for code in codes.values() for name, type_ in code.states.items()}
        weights = {name: size for code in codes.values() for name, size in code.weights.items()}
        self._memory: dict[Category, int] = {
            "constants": sum(weights.values()),
            "model_shared_scratchpad": max((code.scratch for code in codes.values()), default=0),
            "tensors": sum(states.values()),
        }
        self._take(1)
        self.programs = {
            name: self._process.load(
                ProgramCounters(name, f"{id(code):032x}", cores, _memory_of(code), partial(predict or _unknown, name))
            )
            for name, code in codes.items()
        }

    def close(self) -> None:
        """Release the cores; again without effect."""
        for program in self.programs.values():
            self._process.unload(program)
        self._take(-1)
        self._memory = {}

    def _take(self, sign: int) -> None:
        for core in self._cores:
            for category, nbytes in self._memory.items():
                self._process.take(core, category, sign * nbytes)


def _unknown(_: str) -> Prediction:
    return Prediction()


def _memory_of(code: "Code") -> dict[Category, int]:
    states = sum(type_.nbytes for type_ in code.states.values())
    return {"constants": sum(code.weights.values()), "model_shared_scratchpad": code.scratch, "tensors": states}


def _outcomes(program: ProgramCounters) -> Mapping[Outcome, int]:
    """Counts on all cores of a program; a failure is one of each core."""
    counts = {**program.failures, COMPLETED: program.executions}
    return {outcome: count * len(program.cores) for outcome, count in counts.items()}


def _by_name(counts: Iterable[tuple[str, int]], names: Iterable[str]) -> dict[str, int]:
    sums = dict.fromkeys(names, 0)
    for name, count in counts:
        if name in sums:
            sums[name] += count
    return sums


_current: ProcessCounters | None = None
_opening: Final = threading.Lock()


def process_counters() -> ProcessCounters:
    """The counters of this process."""
    global _current
    with _opening:
        if _current is None:
            _current = ProcessCounters(counters_folder())
        return _current


def _forget() -> None:
    """A fork has loaded nothing, and none of its parent's threads."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)


def counters_folder() -> Path:
    """Where the processes of this user publish."""
    named = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(named) if named else Path(base or tempfile.gettempdir(), f"nxpipe-counters-{os.getuid()}")


def birth_of(pid: int) -> str:
    """When a process began, as the kernel counts; empty if it has ended or the kernel does not say. A number of a
    process is used again, but not with the same time."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def published(folder: Path | None = None) -> list[dict[str, Any]]:
    """What the running processes of this user have published, by the number of the process."""
    found = []
    for path in (folder or counters_folder()).glob("[0-9]*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # removed since, or of another version
            if path.lstat().st_uid != os.getuid():
                continue
            document = json.loads(path.read_text())
            if _is_running(int(document["pid"]), document["born"]):
                found.append(document)
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda document: int(document["pid"]))


def _is_running(pid: int, born: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return birth_of(pid) == born


def _write(path: Path, text: str) -> None:
    """Write atomically, into a folder of this user: a shared temporary folder may hold one of another user."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid():
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def in_use(document: Mapping[str, Any]) -> Iterator[int]:
    """The cores on which a published process has programs or tensors."""
    return (int(core["core"]) for core in document["cores"] if core["in_use"])
