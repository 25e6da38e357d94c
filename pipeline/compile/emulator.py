"""nxpipe's own compiler, and the emulator's answer as evidence."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.compile.made import ANSWERS, INPUTS, PROGRAM, Made, observed
from nxpipe.pipeline.compile.utilisation import document as utilisation_document
from nxpipe.pipeline.request import BuildRequest, Shape, compiler_digest, digest_of
from nxpipe.pipeline.util.errors import DoesNotFit
from nxpipe.pipeline.verify.evidence import Step, gather
from nxpipe.pipeline.verify.materials import Materials
from nxpipe.pipeline.verify.surroundings import surroundings
from nxpipe.pipeline.verify.verify import Thresholds

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.emulator.compile import Program


class Emulator:
    def front(self, request: BuildRequest, shape: Shape, step: Step) -> "Program":
        return compiled(request, shape, step)

    def program(
        self, request: BuildRequest, shape: Shape, front: "Program", store: "Store", step: Step, *, force: bool
    ) -> Made:
        """Equal graphs are lowered once, whatever they came from."""
        graph = front.graph.to_bytes()
        key = digest_of(_emission_question(request, front, sha256_hex(graph)))
        emission = None if force else step_result(store, key)
        if emission is None:
            files, facts = _emitted(request, shape, front, store, step)
            emission = keep_step_result(store, key, files, facts)
        facts = {"degree": front.degree, "graph_key": front.graph.key, "outputs": sorted(front.whole.outputs)}
        return Made(
            {artifact_files.graph(shape.name): store.put_blob(graph), **{f.path: f.blob for f in emission.files}},
            {**facts, **emission.facts},
        )

    def evidence(
        self,
        request: BuildRequest,
        shape: Shape,
        front: "Program",
        materials: Materials,
        store: "Store",
        step: Step,
        thresholds: Thresholds,
    ) -> Made:
        found = gather(request, shape, front, materials, step, thresholds)
        files = {INPUTS: store.put_blob(found.inputs), ANSWERS: store.put_blob(found.answers)}
        return Made(files, observed(found.deviations, request.yardstick, surroundings()))


def compiled(request: BuildRequest, shape: Shape, step: Step) -> "Program":
    """One program, through all of the compiler's front end."""
    from nxpipe.emulator.passes import PassOptions
    from nxpipe.emulator.passes.shard import DegreeImpossible

    with step(f"compile {shape.name}"):
        target = request.target.compiler_target
        options = PassOptions(request.autocast, request.autocast_type, target, request.tensor_parallel)
        try:
            return request.compile(shape, options)
        except DegreeImpossible as error:
            raise request.without_degree(error.reason, error.degrees) from error


def _emission_question(request: BuildRequest, program: "Program", graph: str) -> dict[str, object]:
    """All that the back end reads, down to the modules that it names in its figures."""
    from nxpipe.emulator.analysis.graph_memory import room

    return {
        "format": "nxpipe.emission/1",
        "graph": graph,
        "whole": graph if program.whole is program.graph else sha256_hex(program.whole.to_bytes()),
        "degree": program.degree,
        "parameters": {name: asdict(piece) for name, piece in program.parameters.items()},
        "states": {name: asdict(piece) for name, piece in program.states.items()},
        "padding": asdict(program.padding),
        "core": request.target.core,
        "room": room(request.target),
        "compiler": compiler_digest(),
    }


def _emitted(
    request: BuildRequest, shape: Shape, program: "Program", store: "Store", step: Step
) -> tuple[Mapping[str, "Blob"], dict[str, object]]:
    """Through the back end. A program that breaks a rule of its core is not stored."""
    from nxpipe.emulator.analysis.graph_memory import room
    from nxpipe.emulator.analysis.utilization import utilisation
    from nxpipe.emulator.emit import emit
    from nxpipe.emulator.errors import OutOfMemory
    from nxpipe.emulator.executable.executable import to_bytes
    from nxpipe.emulator.isa.legality import check

    with step(f"emit {shape.name}"):
        try:
            executable = emit(program, request.target.core, room=room(request.target))
        except OutOfMemory as error:
            raise DoesNotFit(f"{request.source.id} {shape.name}: {error}") from error
        check(executable.program)
        stored, tables = executable.without_large_constants()
        files = {artifact_files.constant(digest): data for digest, data in tables.items()} | {PROGRAM: to_bytes(stored)}
        used = utilisation(executable.program)
        return (
            {path: store.put_blob(data) for path, data in files.items()},
            {"utilisation": utilisation_document(used, program.padding)},
        )
