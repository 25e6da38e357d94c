"""neuronx-cc as a program: its release, its process with limits of time and memory, and its errors.

It starts processes of its own, so limits and the final kill apply to the session: all of them together.
"""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.compile import findings as rules
from nxpipe.pipeline.compile.findings import DOES_NOT_FIT, Finding, Rule
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, MissingSoftware, NotEnoughMemory
from nxpipe.pipeline.util.process import processors
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.emulator.executable.neff import Neff


COMMAND: Final = "neuronx-cc"
COMPILER_REMEDY: Final = "install neuronx-cc from AWS's package index for Neuron, or use an AWS Neuron image"
_VERSION_LIMIT: Final = 120.0  # seconds; the command imports much of itself
_REPORTED: Final = re.compile(r"\bversion (\S+)")


def compiler_release() -> str | None:
    """The release of the command on the PATH; None without one. It may be of another Python environment."""
    command = shutil.which(COMMAND)
    if command is None:
        return None
    if Path(command).parent == Path(sysconfig.get_path("scripts")):
        with suppress(PackageNotFoundError):
            return version(COMMAND)
    return _reported(command, Path(command).stat().st_mtime_ns)


@lru_cache
def _reported(command: str, _changed: int) -> str | None:
    """The release that the command prints; it takes seconds, so it runs once in a process."""
    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _REPORTED.search(answer.stdout + answer.stderr)
    return found[1] if found and answer.returncode == 0 else None


# The process --------------------------------------------------------------------------------------------------------

_INTERVAL: Final = 0.2  # seconds between two measurements of memory


@dataclass(frozen=True)
class ProcessLimits:
    seconds: float
    memory: int  # bytes


class OutOfTime(Exception):
    """The process exceeded its time limit."""


class OutOfMemory(Exception):
    """The process exceeded its memory limit."""


def run_limited(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], limits: ProcessLimits
) -> int:
    """Run a command in a folder and in a session of its own, with its output in `log`; return the exit status,
    negative if a signal ended it. No process of the session survives."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with _guarded(process.pid):
            _watch(process, limits)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # only now may its id be that of another process
    return process.returncode


@contextmanager
def _guarded(session: int) -> Iterator[None]:
    """Let a process of the shell kill the session when this process ends. The workers of a build are ended by a signal
    to their own session, which does not reach this one."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # where no process is left to kill
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()  # the end of its input, which the end of this process is too


def _watch(process: "subprocess.Popen[bytes]", limits: ProcessLimits) -> None:
    deadline = time.monotonic() + limits.seconds
    while not _has_ended(process):
        if time.monotonic() > deadline:
            raise OutOfTime
        if sum(_resident(process.pid)) > limits.memory:
            raise OutOfMemory


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the process, and leave it to be collected: until then its id is that of its session alone."""
    deadline = time.monotonic() + _INTERVAL
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_INTERVAL / 20)
    return True


def _resident(session: int) -> Iterator[int]:
    """Resident bytes of each process of a session; shared memory counts for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            fields = entry.read_text().rpartition(")")[2].split()  # the process name may contain spaces and parentheses
            if int(fields[3]) == session:
                yield int(fields[21]) * page


# Errors -------------------------------------------------------------------------------------------------------------

_SMALLER: Final = "use a smaller bucket or batch, or a target with more memory"
_INTEGERS: Final = "keep integers and booleans out of this operation, or cast its operands to fp32"
_QUANTISED: Final = "build from the checkpoint that is not quantised"
_OTHER_OPERATOR: Final = "replace the operator in the model; nxpipe check names its line"


def _numbers(family: str, *numbers: int) -> list[str]:
    return [f"{family}{number:03}" for number in numbers]


_TABLE: Final[tuple[tuple[Rule, str, list[str]], ...]] = (
    (rules.NOT_CAPTURED, "report it, with the model's configuration", ["EVRF064"]),
    (rules.GRAPH_BREAK, "use padding or buckets for a size that depends on values", ["EMOD025"]),
    (
        rules.OPERATOR,
        _OTHER_OPERATOR,
        ["EUOC002", "EHCA005", *_numbers("EVRF", 1, 4, 6, 10, 11, 14, 15, 19, 29, 65)],
    ),
    (rules.POSITIONS, "use a bucket of at most as many tokens as the table has rows", _numbers("EVRF", 31, 56)),
    (rules.UNKNOWN_OPTION, "report it, with the target", ["EARG001"]),
    (rules.INT64, "keep integers within 32 bits", ["ESFH002", *_numbers("EVRF", 35, 60, 61, 62, 63)]),
    (rules.OPERAND_TYPE, _INTEGERS, ["ESPP004", "ESPP047", *_numbers("EVRF", 5, 13, 16, 22)]),
    (rules.OPERAND_TYPE, _QUANTISED, _numbers("EVRF", *range(36, 51), 53, 54, 55, 57, 58)),
    (rules.FP8_KIND, "use the E4M3 of the target, or bf16", _numbers("EVRF", 51, 52)),
    (rules.WINDOW, "pool without dilation", _numbers("EVRF", 17, 18)),
    (rules.DOES_NOT_FIT, _SMALLER, ["EOOM001", "EOOM002", "EVRF009", "EXSP001"]),
    (rules.DOES_NOT_FIT, _SMALLER, ["EBVF030", "EVRF007", "EXTP004", "EBIR023"]),
)
_BY_CODE: Final = {code: (rule, advice) for rule, advice, codes in _TABLE for code in codes}

_CODE: Final = re.compile(r"NCC_([A-Z]{4}[0-9]{3})\b\]?:?[ \t]*([^\n]*)")
_LONGEST: Final = 300  # characters of the compiler's message
_NO_MEMORY: Final = "[F137]"  # in the output, when the kernel killed a process of the compiler


class CompilerFailed(BuildRefused):
    """neuronx-cc failed for a reason outside the program; the same build may succeed later."""

    deterministic = False


def rule_of(code: str) -> Rule | None:
    """The rule of an error code such as NCC_EVRF001; None for one that AWS does not attribute to a program."""
    found = _BY_CODE.get(code.removeprefix("NCC_"))
    return found[0] if found else None


def finding_of(output: str, program: str) -> Finding | None:
    """The first error code in the output that the reference attributes to the program, as a finding."""
    for match in _CODE.finditer(output):
        if match[1] in _BY_CODE:
            rule, advice = _BY_CODE[match[1]]
            message = " ".join(match[2].split())[:_LONGEST].rstrip(".")
            return Finding(rule, f"NCC_{match[1]}: {message or rule.meaning}", advice, programs=(program,))
    return None


def first_code(output: str) -> str | None:
    """The first code of any kind, of the compiler's own defects too."""
    match = _CODE.search(output)
    return f"NCC_{match[1]}" if match else None


def refusal(finding: Finding, verb: str) -> BuildRefused:
    """The error of a finding of the compiler about one program; `verb` is what the compiler does."""
    kind = DoesNotFit if finding.rule is DOES_NOT_FIT else BuildRefused
    return kind(f"{finding.programs[0]}: neuronx-cc {verb} {finding.message} ({finding.rule.id}); {finding.advice}")


def explain(name: str, status: int, output: str) -> BuildRefused:
    """The error for a compilation of program `name` that ended with `status` (negative: by that signal)."""
    finding = finding_of(output, name)
    if finding is not None:
        return refusal(finding, "reports")
    if status == -signal.SIGKILL or _NO_MEMORY in output:
        return NotEnoughMemory(
            f"{name}: the compiler was killed, as the kernel does when memory runs out; use a machine with more of it"
        )
    if status < 0:
        return CompilerFailed(f"{name}: signal {-status} ended the compiler; run the same command again")
    code = first_code(output)
    if code is None:
        return CompilerFailed(
            f"{name}: neuronx-cc ended with status {status} and without an error code: {_last_line(output)}; run the "
            "same command again with --verbose, which shows the end of its log"
        )
    return CompilerFailed(
        f"{name}: neuronx-cc ended with status {status} and {code}, which AWS's reference does not attribute to "
        "a program; run the same command again, and report it to AWS if it stays"
    )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:_LONGEST].rstrip(".") if lines else "no output"


# A compilation ------------------------------------------------------------------------------------------------------

_READ: Final = 1 << 20  # bytes of the end of a log, where the errors are
_NOTED: Final = 8000  # characters of the output in the note of an error
_OUTPUT: Final = "process.log"
_LOG: Final = "log-neuron-cc.txt"  # the compiler's own
_MODULE: Final = "module.pb"
_NEFF: Final = "module.neff"  # a relative path: the header of a NEFF has it
_JOBS: Final = 8  # processes of the compiler by default
_JOB_MEMORY: Final = 4 << 30  # bytes


def compile_module(name: str, module: bytes, flags: Sequence[str], limits: ProcessLimits) -> bytes:
    """The NEFF of a canonical HLO module. `name` begins the message of an error.

    Raises MissingSoftware, BuildRefused and DoesNotFit for what the compiler refuses, CompilerFailed and
    NotEnoughMemory for what may succeed later; the end of the compiler's log is a note of the error.
    """
    command = shutil.which(COMMAND)
    if command is None:
        raise MissingSoftware(f"{COMMAND} on the PATH", "Compilation for Neuron devices", COMPILER_REMEDY)
    with TemporaryDirectory(prefix="nxpipe-neuronx-") as path:
        folder = Path(path)
        (folder / _MODULE).write_bytes(module)
        words = [command, "compile", _MODULE, "--framework", "XLA", *flags, "--output", _NEFF, *_parallel_jobs(limits)]
        try:
            _run(name, words, folder, limits)
            return _neff(name, folder / _NEFF)
        except BuildRefused as error:
            error.add_note(f"The end of the compiler's output:\n{_output(folder)[-_NOTED:]}")
            raise


def read_compiled(name: str, neff: bytes) -> "Neff":
    """The NEFF of a compilation; CompilerFailed if it is damaged, as when the disk was full."""
    from nxpipe.emulator.errors import NeffInvalid
    from nxpipe.emulator.executable.neff import read_neff

    try:
        return read_neff(BytesIO(neff))
    except NeffInvalid as error:
        raise CompilerFailed(f"{name}: {error}") from error


def _parallel_jobs(limits: ProcessLimits) -> list[str]:
    """Fewer processes on a small machine. They change no result, so they are no part of a key."""
    jobs = max(1, min(processors(), limits.memory // _JOB_MEMORY))
    return ["--num-parallel-jobs", str(jobs)] if jobs < _JOBS else []


def _run(name: str, words: Sequence[str], folder: Path, limits: ProcessLimits) -> None:
    try:
        status = run_limited(words, folder, folder / _OUTPUT, compiler_environment(os.environ), limits)
    except OutOfTime as error:
        raise CompilerFailed(
            f"{name}: the compiler exceeded {limits.seconds:.0f} s; use a smaller bucket, or a faster machine"
        ) from error
    except OutOfMemory as error:
        raise NotEnoughMemory(
            f"{name}: the compiler took more than the {human_bytes(limits.memory)} that were free; use a machine with "
            "more memory"
        ) from error
    if status != 0:
        raise explain(name, status, _output(folder))


def compiler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without variables of Neuron and XLA: they are for frameworks and the runtime, and what
    the compiler would read from them would be in no key."""
    return {name: value for name, value in environ.items() if not name.startswith(("NEURON_", "XLA_"))}


def _neff(name: str, path: Path) -> bytes:
    if not path.is_file():
        raise CompilerFailed(f"{name}: neuronx-cc ended with status 0 and left no NEFF; run the same command again")
    return path.read_bytes()


def _output(folder: Path) -> str:
    """The compiler's own log, then the output of the process: its last line is the error."""
    logs = [folder / _LOG, folder / _OUTPUT]
    return "\n".join(log.read_bytes()[-_READ:].decode(errors="replace") for log in logs if log.exists())
