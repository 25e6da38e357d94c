"""nxpipe's own compiler, and the emulator's answer as evidence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import artifact_files
from pipeline.backends.made import Made, MadeProgram
from pipeline.errors import DoesNotFit
from pipeline.evidence import NO_EVIDENCE, Step, gather
from pipeline.request import BuildRequest, Shape
from pipeline.utilisation import to_bytes as utilisation_file
from pipeline.verify import Thresholds

if TYPE_CHECKING:
    from emulator.compile import Program
    from emulator.utilisation import Utilisation
    from pipeline.models.weights import Tensors


@dataclass(frozen=True)
class _Emitted:
    """A program of instructions as it is stored, with the tables that are stored beside it, by digest."""

    code: bytes
    tables: Mapping[str, bytes]
    utilisation: "Utilisation"


def emulated(request: BuildRequest, tensors: "Tensors", step: Step, thresholds: Thresholds) -> Made:
    programs: dict[Shape, Program] = {}
    emitted: dict[Shape, _Emitted] = {}
    for shape in sorted(request.shapes):
        programs[shape] = compiled(request, shape, step)
        emitted[shape] = _emitted(request, shape, programs[shape], step)
    evidence = gather(request, programs, tensors, step, thresholds) if request.verified else NO_EVIDENCE
    files = dict(evidence.golden)
    for shape, one in emitted.items():
        files[artifact_files.graph(shape.name)] = programs[shape].graph.to_bytes()
        files |= {artifact_files.constant(digest): data for digest, data in one.tables.items()}
    files[artifact_files.UTILISATION] = utilisation_file(
        {shape.name: (one.utilisation, programs[shape].padding) for shape, one in emitted.items()}
    )
    return Made(
        programs=tuple(
            MadeProgram(shape, programs[shape].degree, programs[shape].graph.key, one.code)
            for shape, one in emitted.items()
        ),
        files=files,
        report=evidence.report,
    )


def compiled(request: BuildRequest, shape: Shape, step: Step) -> "Program":
    """One program, through all of the compiler's front end."""
    from emulator.passes import PassOptions
    from emulator.passes.shard import DegreeImpossible

    with step(f"compile {shape.name}"):
        target = request.target.compiler_target
        options = PassOptions(request.autocast, request.autocast_type, target, request.tensor_parallel)
        try:
            return request.compile(shape, options)
        except DegreeImpossible as error:
            raise request.without_degree(error.reason, error.degrees) from error


def _emitted(request: BuildRequest, shape: Shape, program: "Program", step: Step) -> _Emitted:
    """Through its back end. A program that breaks a rule of its core is not stored."""
    from emulator.emit import emit
    from emulator.errors import OutOfMemory
    from emulator.executable import to_bytes
    from emulator.isa.limits import check
    from emulator.memory import room
    from emulator.utilisation import utilisation

    with step(f"emit {shape.name}"):
        try:
            executable = emit(program, request.target.core, room=room(request.target))
        except OutOfMemory as error:
            raise DoesNotFit(f"{request.source.id} {shape.name}: {error}") from error
        check(executable.program)
        stored, tables = executable.without_large_constants()
        return _Emitted(to_bytes(stored), tables, utilisation(executable.program))
