"""nxpipe's own compiler, and the emulator's answer as evidence."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from artifact_store.canonical import canonical_json
from pipeline.backends.made import Made, MadeProgram
from pipeline.evidence import NO_EVIDENCE, Step, gather
from pipeline.request import BuildRequest, Shape
from pipeline.verify import Thresholds

if TYPE_CHECKING:
    from emulator.compile import Program
    from emulator.passes.shard import Piece
    from pipeline.models.weights import Tensors


def emulated(request: BuildRequest, tensors: "Tensors", step: Step, thresholds: Thresholds) -> Made:
    programs = {shape: compiled(request, shape, step) for shape in sorted(request.shapes)}
    evidence = gather(request, programs, tensors, step, thresholds) if request.verified else NO_EVIDENCE
    ranks = {f"ranks/{shape.name}.json": _ranks(program) for shape, program in programs.items() if program.degree > 1}
    return Made(
        programs=tuple(
            MadeProgram(shape, program.degree, program.graph.key, program.graph.to_bytes())
            for shape, program in programs.items()
        ),
        files={**evidence.golden, **ranks},
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


def _ranks(program: "Program") -> bytes:
    """Which piece of which tensor each rank has: weights are stored whole, one copy for all degrees."""

    def described(pieces: "Mapping[str, Piece]") -> dict[str, object]:
        return {
            name: {"axis": piece.axis, "sizes": list(piece.sizes), "parts": list(piece.parts)}
            for name, piece in pieces.items()
        }

    return canonical_json({"weights": described(program.parameters), "states": described(program.states)})
