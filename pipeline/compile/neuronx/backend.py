"""Backend of neuronx-cc: a child process with limits of time and memory, its error codes, and the NEFF.

neuronx-cc starts processes of its own, so limits and the final kill apply to the session: all of them together.
"""

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.compile import findings as rules
from nxpipe.pipeline.compile.backend import PROGRAM, BackendOutput
from nxpipe.pipeline.compile.findings import DOES_NOT_FIT, Finding, Rule
from nxpipe.pipeline.compile.neuronx.cache_entry import cache_entries
from nxpipe.pipeline.compile.neuronx.toolchain import (
    compiler_environment,
    compiler_flags,
)
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.weights import Arrays, Tensors
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.nodes import Value
    from nxpipe.pipeline.compile.spec import BuildSpec


_Argument = TypeVar("_Argument")
_INTERVAL: Final = 0.2  # seconds between two measurements of memory


@dataclass(frozen=True)
class ProcessLimits:
    seconds: float
    memory: int  # bytes


class OutOfTime(Exception):
    """The process exceeded its time limit."""


class OutOfMemory(Exception):
    """The process exceeded its memory limit."""


def run_limited(work: Callable[[_Argument], None], argument: _Argument, log: Path, limits: ProcessLimits) -> int:
    """Run `work` in a child process with its output in `log`; return the exit status, negative if a signal ended it."""
    process = get_context("spawn").Process(target=_begin, args=(work, argument, log))
    process.start()
    try:
        _watch(process, limits)
    finally:
        _end(process)
    assert process.exitcode is not None
    return process.exitcode


def _begin(work: Callable[[_Argument], None], argument: _Argument, log: Path) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    work(argument)


def _watch(process: BaseProcess, limits: ProcessLimits) -> None:
    deadline = time.monotonic() + limits.seconds
    while not wait([process.sentinel], timeout=_INTERVAL):
        if time.monotonic() > deadline:
            raise OutOfTime
        if sum(_resident(process.pid)) > limits.memory:
            raise OutOfMemory


def _end(process: BaseProcess) -> None:
    """Kill the whole session, even if its first process has ended: its id is not reused until `join`."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)  # if it has no session of its own yet
    process.join()


def _resident(session: int | None) -> Iterator[int]:
    """Resident bytes of each process of a session; shared memory counts for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            fields = entry.read_text().rpartition(")")[2].split()  # the process name may contain spaces and parentheses
            if int(fields[3]) == session:
                yield int(fields[21]) * page


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
        ["EUOC002", "EHCA005", *_numbers("EVRF", 1, 4, 6, 10, 11, 15, 19, 65)],
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


_STATUS: Final = re.compile(r"neuronx-cc failed with (-?[0-9]+)")
_CACHED: Final = "Got a cached failed neff"


class CompilerFailed(BuildRefused):
    """neuronx-cc failed for a reason outside the program; the same build may succeed later."""

    deterministic = False


def explain(model: str, program: str, status: int, output: str) -> BuildRefused:
    """The error for a process that left no NEFF and ended with `status` (negative: by that signal)."""
    title = f"{model} {program}"
    finding = finding_of(output, program)
    if _CACHED in output:
        return CompilerFailed(
            f"{title}: AWS's compile cache returned the failure of an earlier attempt; run "
            "`neuron_parallel_compile --command clean`, or unset NEURON_COMPILE_CACHE_URL"
        )
    if finding is not None:
        kind = DoesNotFit if finding.rule is DOES_NOT_FIT else BuildRefused
        return kind(f"{title}: neuronx-cc reports {finding.message} ({finding.rule.id}); {finding.advice}")
    compiler = _STATUS.search(output)
    ended = int(compiler[1]) if compiler else status
    if ended == -signal.SIGKILL:
        return NotEnoughMemory(
            f"{title}: the compiler was killed, as the kernel does when memory runs out; use a machine with more of it"
        )
    if ended < 0:
        return CompilerFailed(f"{title}: signal {-ended} ended the compiler; run the same command again")
    if compiler:
        code = first_code(output) or "no error code"
        return CompilerFailed(
            f"{title}: neuronx-cc ended with status {ended} and {code}, which AWS's reference does not attribute to a "
            "program; run the same command again, and report it to AWS if it stays"
        )
    return CompilerFailed(f"{title}: torch_neuronx failed: {_last_line(output)}; nxpipe doctor shows the releases")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else "no output"


LONGEST: Final = 2 * 3600.0  # seconds for one program
_READ: Final = 1 << 20  # bytes of the end of a log, where the errors are
_NOTED: Final = 8000  # characters of the output in the note of an error
_LOG: Final = "process.log"
_CACHE: Final = "cache"
_HEADER: Final = 1024  # bytes in front of the archive in a NEFF


@dataclass(frozen=True)
class TraceJob:
    """The input of the child process."""

    capture: "CaptureRequest"
    tensors: Tensors
    inputs: Arrays
    outputs: tuple[str, ...]
    arguments: str
    environment: Mapping[str, str]
    folder: Path

    @property
    def workdir(self) -> Path:
        """The folder of the NEFF, apart from the compile cache, which may contain others."""
        return self.folder / "neuronx"

    @property
    def cache(self) -> Path:
        """The compile cache, unless the user has set another one."""
        return self.folder / _CACHE


class NeuronxBackend:
    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> "Graph":
        """nxpipe's own capture: its key names the program, and its errors name lines of the model's source."""
        with step(f"capture {shape.name}"):
            return spec.capture(shape)

    def program(
        self, spec: "BuildSpec", shape: Shape, frontend_output: "Graph", store: "Store", step: Step, *, force: bool
    ) -> BackendOutput:
        with step(f"compile {shape.name} with neuronx-cc"):
            limits = ProcessLimits(LONGEST, available_memory())
            compiled = compile_neff(spec, shape, frontend_output, spec.tensors(), limits)
        files = {**compiled, f"ports/{shape.name}.json": _ports(frontend_output)}
        facts = {"degree": 1, "graph_key": frontend_output.key, "outputs": sorted(frontend_output.outputs)}
        return BackendOutput({path: store.put_blob(data) for path, data in files.items()}, facts)


def compile_neff(
    spec: "BuildSpec", shape: Shape, graph: "Graph", tensors: Tensors, limits: ProcessLimits
) -> dict[str, bytes]:
    """The compiled program, and the files of its entries in the compile cache."""
    from nxpipe.emulator.capture import example_inputs

    capture = spec.capture_request(shape)
    assert capture is not None  # `require_source` refuses saved programs

    with TemporaryDirectory(prefix="nxpipe-neuronx-") as name:
        job = TraceJob(
            capture=capture,
            tensors=tensors,
            inputs=example_inputs(graph, spec.source.config, seed=0),
            outputs=tuple(graph.outputs),
            arguments=shlex.join(compiler_flags(spec)),
            environment=compiler_environment(spec, os.environ, Path(name) / _CACHE),
            folder=Path(name),
        )
        neff = _neff(spec.source.id, shape.name, job, limits)
        return {PROGRAM: neff, **cache_entries(job.cache, shape.name)}


def _neff(model: str, program: str, job: TraceJob, limits: ProcessLimits) -> bytes:
    try:
        return _compiled(model, program, job, limits)
    except BuildRefused as error:
        error.add_note(f"The end of the compiler's output:\n{_output(job.folder)[-_NOTED:]}")
        raise


def _compiled(model: str, program: str, job: TraceJob, limits: ProcessLimits) -> bytes:
    try:
        status = run_limited(trace_job, job, job.folder / _LOG, limits)
    except OutOfTime as error:
        raise CompilerFailed(
            f"{model} {program}: the compiler exceeded {limits.seconds:.0f} s; use a smaller bucket, or a "
            "faster machine"
        ) from error
    except OutOfMemory as error:
        raise NotEnoughMemory(
            f"{model} {program}: the compiler took more than the {human_bytes(limits.memory)} that were free; "
            "use a machine with more memory"
        ) from error
    if status != 0:
        raise explain(model, program, status, _output(job.folder))
    neffs = sorted(job.workdir.rglob("*.neff"))
    if len(neffs) != 1:
        raise CompilerFailed(f"{model} {program}: torch_neuronx left {len(neffs)} NEFF files instead of one")
    neff = neffs[0].read_bytes()
    if len(neff) <= _HEADER:
        raise CompilerFailed(
            f"{model} {program}: the NEFF is truncated at {len(neff)} bytes; its header alone has {_HEADER}"
        )
    return neff


def trace_job(job: TraceJob) -> None:
    """Body of the child process. Its working directory is the job's folder, where neuronx-cc leaves files."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    from nxpipe.emulator.capture.reference import trace_for_neuron

    trace_for_neuron(job.capture, dict(job.tensors), job.inputs, job.outputs, job.workdir, job.arguments)


def _output(folder: Path) -> str:
    """The compiler's own log, then the output of the process: its last line is the error."""
    logs = [*sorted(folder.rglob("log-neuron-cc.txt")), folder / _LOG]
    return "\n".join(log.read_bytes()[-_READ:].decode(errors="replace") for log in logs if log.exists())


def _ports(graph: "Graph") -> bytes:
    """Inputs and outputs by name and type, in the order of the NEFF's arguments and results."""

    def described(values: "Mapping[str, Value]") -> list[dict[str, object]]:
        return [
            {"name": name, "dtype": str(value.type.dtype), "shape": list(value.type.shape)}
            for name, value in values.items()
        ]

    return canonical_json({"inputs": described(graph.inputs), "outputs": described(graph.outputs)})
