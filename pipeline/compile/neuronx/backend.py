"""Backend neuronx: one NEFF for each program, compiled by neuronx-cc in a child process. Contract: docs/neuronx.md."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.compile.backend import PROGRAM, BackendOutput
from nxpipe.pipeline.compile.neuronx.cache_entry import cache_entries
from nxpipe.pipeline.compile.neuronx.errors import CompilerFailed, explain
from nxpipe.pipeline.compile.neuronx.process import Limits, OutOfMemory, OutOfTime, run_limited
from nxpipe.pipeline.compile.neuronx.toolchain import (
    TARGETS,
    compiler_environment,
    compiler_flags,
    toolchain,
    wrapper_flags,
)
from nxpipe.pipeline.models.program_file import SavedProgram
from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.versions import compiler_digest, source_digest
from nxpipe.pipeline.models.weights import Arrays, Tensors
from nxpipe.pipeline.util.console import human_bytes
from nxpipe.pipeline.util.errors import BuildRefused, NotEnoughMemory
from nxpipe.pipeline.util.machine import available_memory
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph, Value
    from nxpipe.pipeline.compile.spec import BuildSpec

LONGEST: Final = 2 * 3600.0  # seconds that one program may take
_READ: Final = 1 << 20  # bytes of the end of a log, where the errors are
_NOTED: Final = 8000  # characters of the output that travel with an error
_LOG: Final = "process.log"
_CACHE: Final = "cache"
_HEADER: Final = 1024  # bytes, before the archive that a NEFF is


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
        """The folder in which the NEFF is found; the compile cache beside it may hold others."""
        return self.folder / "neuronx"

    @property
    def cache(self) -> Path:
        """The compile cache, unless the user has set another one."""
        return self.folder / _CACHE


class Neuronx:
    verifies = False  # a NEFF runs on a device only

    def require_source(self, source: ModelSource) -> None:
        if isinstance(source, SavedProgram):
            raise BuildRefused(
                f"{source.id}: neuronx-cc cannot build a saved program; pass the model's folder or id, or "
                "--backend emulator"
            )

    def require_toolchain(self) -> None:
        toolchain()

    def check(self, spec: "BuildSpec") -> None:
        if spec.tensor_parallel != 1:
            raise BuildRefused(
                f"{spec.source.id}: torch_neuronx.trace compiles for one core, and --tp is {spec.tensor_parallel}; "
                f"pass --tp 1 where the model fits one core of {spec.target.name} (see nxpipe check), or "
                "--backend emulator"
            )
        if spec.target.compiler_target not in TARGETS:
            raise BuildRefused(
                f"{spec.source.id}: neuronx-cc has no target {spec.target.name}; its targets are "
                f"{', '.join(TARGETS)}; choose an instance of those, or --backend emulator"
            )
        wrapper_flags(os.environ)

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {
            "backend": "neuronx",
            "source": compiler_digest(),  # of nxpipe's own capture, whose graph gives the program its name
            "driver": source_digest(Path(__file__).parent),
            "flags": list(compiler_flags(spec)),
            "toolchain": toolchain(),
        }

    def weights_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {"weights": spec.weights.identity()}  # a NEFF contains its weights

    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> "Graph":
        """nxpipe's own capture: its key names the program, and its errors name lines of the model's source."""
        with step(f"capture {shape.name}"):
            return spec.capture(shape)

    def program(
        self, spec: "BuildSpec", shape: Shape, front: "Graph", store: "Store", step: Step, *, force: bool
    ) -> BackendOutput:
        with step(f"compile {shape.name} with neuronx-cc"):
            limits = Limits(LONGEST, available_memory())
            compiled = compile_neff(spec, shape, front, spec.tensors(), limits)
        files = {**compiled, f"ports/{shape.name}.json": _ports(front)}
        facts = {"degree": 1, "graph_key": front.key, "outputs": sorted(front.outputs)}
        return BackendOutput({path: store.put_blob(data) for path, data in files.items()}, facts)


def compile_neff(spec: "BuildSpec", shape: Shape, graph: "Graph", tensors: Tensors, limits: Limits) -> dict[str, bytes]:
    """The program, and the files that the compiler left for it in its cache."""
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


def _neff(model: str, program: str, job: TraceJob, limits: Limits) -> bytes:
    try:
        return _compiled(model, program, job, limits)
    except BuildRefused as error:
        error.add_note(f"The end of the compiler's output:\n{_output(job.folder)[-_NOTED:]}")
        raise


def _compiled(model: str, program: str, job: TraceJob, limits: Limits) -> bytes:
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
    found = sorted(job.workdir.rglob("*.neff"))
    if len(found) != 1:
        raise CompilerFailed(f"{model} {program}: torch_neuronx left {len(found)} NEFF files, and not exactly one")
    neff = found[0].read_bytes()
    if len(neff) <= _HEADER:
        raise CompilerFailed(
            f"{model} {program}: the NEFF is truncated at {len(neff)} bytes; its header alone has {_HEADER}"
        )
    return neff


def trace_job(job: TraceJob) -> None:
    """The work of the child process. neuronx-cc leaves files in its working directory, which is the job's folder."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    from nxpipe.emulator.capture.neuronx import trace_for_neuron

    trace_for_neuron(job.capture, dict(job.tensors), job.inputs, job.outputs, job.workdir, job.arguments)


def _output(folder: Path) -> str:
    """The compiler's own log, then the output of the process: its last line is the error."""
    logs = [*sorted(folder.rglob("log-neuron-cc.txt")), folder / _LOG]
    return "\n".join(log.read_bytes()[-_READ:].decode(errors="replace") for log in logs if log.exists())


def _ports(graph: "Graph") -> bytes:
    """Inputs and outputs by name and type, in the order in which the NEFF takes and gives them."""

    def described(values: "Mapping[str, Value]") -> list[dict[str, object]]:
        return [
            {"name": name, "dtype": str(value.type.dtype), "shape": list(value.type.shape)}
            for name, value in values.items()
        ]

    return canonical_json({"inputs": described(graph.inputs), "outputs": described(graph.outputs)})
