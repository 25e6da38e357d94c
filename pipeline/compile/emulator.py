"""Emulator backend: a program through the front end and the back end of nxpipe's own compiler, stored as a `.nxe`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.compile.artifact_files import document as utilisation_document
from nxpipe.pipeline.compile.backend import PROGRAM, BackendOutput
from nxpipe.pipeline.compile.frontend import compile_shape
from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.versions import compiler_digest, digest_of
from nxpipe.pipeline.util.errors import DoesNotFit
from nxpipe.pipeline.util.progress import Step

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.pipeline.compile.spec import BuildSpec


class EmulatorBackend:
    def frontend(self, spec: "BuildSpec", shape: Shape, step: Step) -> "CompiledGraph":
        with step(f"compile {shape.name}"):
            return compile_shape(spec, shape)

    def program(
        self, spec: "BuildSpec", shape: Shape, front: "CompiledGraph", store: "Store", step: Step, *, force: bool
    ) -> BackendOutput:
        """Equal graphs are lowered once, whatever model they came from."""
        graph = front.graph.to_bytes()
        key = digest_of(_emission_key_inputs(spec, front, sha256_hex(graph)))
        emission = None if force else step_result(store, key)
        if emission is None:
            files, metadata = _emit(spec, shape, front, store, step)
            emission = keep_step_result(store, key, files, metadata)
        facts = {"degree": front.degree, "graph_key": front.graph.key, "outputs": sorted(front.whole.outputs)}
        return BackendOutput(
            {artifact_files.graph(shape.name): store.put_blob(graph), **{f.path: f.blob for f in emission.files}},
            {**facts, **emission.facts},
        )


def _emission_key_inputs(spec: "BuildSpec", program: "CompiledGraph", graph: str) -> dict[str, object]:
    """All that the back end reads, with the module paths that it names in its figures."""
    from nxpipe.emulator.analysis.graph_memory import room

    return {
        "format": "nxpipe.emission/1",
        "graph": graph,
        "whole": graph if program.whole is program.graph else sha256_hex(program.whole.to_bytes()),
        "degree": program.degree,
        "parameters": {name: asdict(piece) for name, piece in program.parameters.items()},
        "states": {name: asdict(piece) for name, piece in program.states.items()},
        "padding": asdict(program.padding),
        "core": spec.target.core,
        "room": room(spec.target),
        "compiler": compiler_digest(),
    }


def _emit(
    spec: "BuildSpec", shape: Shape, program: "CompiledGraph", store: "Store", step: Step
) -> tuple[Mapping[str, "Blob"], dict[str, object]]:
    """Run the back end. A program that breaks a rule of its core is not stored."""
    from nxpipe.emulator.analysis.graph_memory import room
    from nxpipe.emulator.analysis.utilization import utilisation
    from nxpipe.emulator.compile import emit
    from nxpipe.emulator.errors import OutOfMemory
    from nxpipe.emulator.executable.executable import to_bytes
    from nxpipe.emulator.isa.legality import check

    with step(f"emit {shape.name}"):
        try:
            executable = emit(program, spec.target.core, room=room(spec.target))
        except OutOfMemory as error:
            raise DoesNotFit(f"{spec.source.id} {shape.name}: {error}") from error
        check(executable.program)
        stored, tables = executable.without_large_constants()
        files = {artifact_files.constant(digest): data for digest, data in tables.items()} | {PROGRAM: to_bytes(stored)}
        used = utilisation(executable.program)
        return (
            {path: store.put_blob(data) for path, data in files.items()},
            {"utilisation": utilisation_document(used, program.padding)},
        )
