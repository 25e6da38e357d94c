"""One NEFF for each program, by AWS's compiler in a process of its own."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NoReturn

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.compile.made import PROGRAM, Made
from nxpipe.pipeline.compile.neuronx.cached import cache_entries
from nxpipe.pipeline.compile.neuronx.faults import CompilerFailed, explain
from nxpipe.pipeline.compile.neuronx.flags import compiler_environment, compiler_flags
from nxpipe.pipeline.compile.neuronx.limited import Limits, OutOfMemory, OutOfTime, run_limited
from nxpipe.pipeline.compile.neuronx.request import NeuronxRequest
from nxpipe.pipeline.models.weights import Tensors
from nxpipe.pipeline.request import Shape
from nxpipe.pipeline.util.errors import BuildRefused, NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.nodes import Value

LONGEST: Final = 2 * 3600.0  # seconds that one program may take
_READ: Final = 1 << 20  # bytes of the end of a log, where the errors are
_NOTED: Final = 8000  # characters of the output that travel with an error
_SAID: Final = "said.txt"
_CACHE: Final = "cache"
_HEADER: Final = 1024  # bytes, before the archive that a NEFF is


@dataclass(frozen=True)
class Job:
    """All that the process is told."""

    capture: "CaptureRequest"
    tensors: Tensors
    inputs: Arrays
    outputs: tuple[str, ...]
    arguments: str
    environment: Mapping[str, str]
    folder: Path

    @property
    def workdir(self) -> Path:
        """Where the NEFF is looked for; AWS's cache, which may hold another one, is beside it."""
        return self.folder / "neuronx"

    @property
    def cache(self) -> Path:
        """AWS's, unless the user has another one."""
        return self.folder / _CACHE


class Neuronx:
    def front(self, request: NeuronxRequest, shape: Shape, step: Step) -> "Graph":
        with step(f"capture {shape.name}"):
            return _captured(request, shape)

    def program(
        self, request: NeuronxRequest, shape: Shape, front: "Graph", store: "Store", step: Step, *, force: bool
    ) -> Made:
        with step(f"compile {shape.name} with neuronx-cc"):
            limits = Limits(LONGEST, available_memory())
            made = compile_neff(request, shape, front, request.tensors(), limits)
        files = {**made, f"ports/{shape.name}.json": _ports(front)}
        facts = {"degree": 1, "graph_key": front.key, "outputs": sorted(front.outputs)}
        return Made({path: store.put_blob(data) for path, data in files.items()}, facts)

    def evidence(self, request: NeuronxRequest, shape: Shape, *_: object) -> NoReturn:
        raise BuildRefused(f"{request.source.id} {shape.name}: a NEFF runs on a device only, and cannot be verified")


def _captured(request: NeuronxRequest, shape: Shape) -> "Graph":
    """Our own reading of the model: it names the program, and refuses with a line of source what cannot be traced."""
    from nxpipe.emulator.capture import capture

    return capture(request.capture(shape))


def compile_neff(
    request: NeuronxRequest, shape: Shape, graph: "Graph", tensors: Tensors, limits: Limits
) -> dict[str, bytes]:
    """The program, and what the compiler has put into its cache for it."""
    from nxpipe.emulator.capture import example_inputs

    with TemporaryDirectory(prefix="nxpipe-neuronx-") as name:
        job = Job(
            capture=request.capture(shape),
            tensors=tensors,
            inputs=example_inputs(graph, request.source.config, seed=0),
            outputs=tuple(graph.outputs),
            arguments=shlex.join(compiler_flags(request)),
            environment=compiler_environment(request, os.environ, Path(name) / _CACHE),
            folder=Path(name),
        )
        neff = _neff(request.source.id, shape.name, job, limits)
        return {PROGRAM: neff, **cache_entries(job.cache, shape.name)}


def _neff(model: str, program: str, job: Job, limits: Limits) -> bytes:
    try:
        return _compiled(model, program, job, limits)
    except BuildRefused as error:
        error.add_note(f"The end of the compiler's output:\n{_output(job.folder)[-_NOTED:]}")
        raise


def _compiled(model: str, program: str, job: Job, limits: Limits) -> bytes:
    try:
        status = run_limited(carry_out, job, job.folder / _SAID, limits)
    except OutOfTime as error:
        raise CompilerFailed(
            f"{model} {program}: the compiler was not done after {limits.seconds:.0f} s; use a smaller bucket, or a "
            "faster machine"
        ) from error
    except OutOfMemory as error:
        raise NotEnoughMemory(
            f"{model} {program}: the compiler took more than the {human_bytes(limits.memory)} that were free; "
            "use a machine with more memory"
        ) from error
    if status != 0:
        raise explain(model, program, status, _output(job.folder))
    found = sorted(job.workdir.rglob("*.neff"))
    if len(found) != 1:
        raise CompilerFailed(f"{model} {program}: torch_neuronx left {len(found)} NEFF files, where one is a program")
    neff = found[0].read_bytes()
    if len(neff) <= _HEADER:
        raise CompilerFailed(
            f"{model} {program}: a NEFF of {len(neff)} bytes is cut off; its header alone has {_HEADER}"
        )
    return neff


def carry_out(job: Job) -> None:
    """Inside the process. The folder is the place of the files that neuronx-cc leaves where it is called."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    from nxpipe.emulator.capture.neuronx import trace_for_neuron

    trace_for_neuron(job.capture, dict(job.tensors), job.inputs, job.outputs, job.workdir, job.arguments)


def _output(folder: Path) -> str:
    """The compiler's own log, then what the process said: its last line is the error."""
    logs = [*sorted(folder.rglob("log-neuron-cc.txt")), folder / _SAID]
    return "\n".join(log.read_bytes()[-_READ:].decode(errors="replace") for log in logs if log.exists())


def _ports(graph: "Graph") -> bytes:
    """Inputs and outputs by name and type, in the order in which the NEFF takes and gives them."""

    def described(values: "Mapping[str, Value]") -> list[dict[str, object]]:
        return [
            {"name": name, "dtype": str(value.type.dtype), "shape": list(value.type.shape)}
            for name, value in values.items()
        ]

    return canonical_json({"inputs": described(graph.inputs), "outputs": described(graph.outputs)})
