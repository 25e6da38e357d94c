"""Programs to profile: of a file, of an artifact, or compiled from a specification without weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.artifacts.difference import identity
from nxpipe.pipeline.predict.constants import PREDICTED, ProgramTime, predict_artifact, predict_program
from nxpipe.pipeline.util.errors import InputInvalid, ProgramInvalid
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.analysis.profile import Profile
    from nxpipe.emulator.analysis.what_if import Change
    from nxpipe.emulator.isa.program import Program
    from nxpipe.pipeline.models.spec import ModelSpec
    from nxpipe.pipeline.util.progress import Step

Identity = tuple[str, int, int, int]


@dataclass(frozen=True, eq=False)
class ProfiledProgram:
    """A program with its names. `aws` is the time of `AWS's compiler` for the same configuration; `identity` its phase,
    batch, bucket and degree, None for a program in a file."""

    name: str
    origin: str
    target: str
    program: "Program"
    aws: ProgramTime
    identity: Identity | None = None

    @cached_property
    def profile(self) -> "Profile":
        from nxpipe.emulator.analysis.profile import profile

        return profile(self.program)

    @cached_property
    def changes(self) -> "list[Change]":
        from nxpipe.emulator.analysis.what_if import changes

        return changes(self.profile)

    @property
    def title(self) -> str:
        return f"{self.name} of {self.origin}" if self.origin else self.name

    def document(self) -> dict[str, Any]:
        return {
            "program": self.name,
            "origin": self.origin,
            "target": self.target,
            **self.profile.document(),
            "aws_compiler": self.aws.document(),
            "changes": [change.document() for change in self.changes],
        }


def program_in_file(path: Path) -> ProfiledProgram:
    """The program of a .nxe file, which names no model."""
    from nxpipe.emulator.executable.executable import read

    program = _legal(read(path).program, str(path))
    unnamed = ProgramTime(None, f"a file names no model, so {PREDICTED} is not predicted")
    return ProfiledProgram(path.name, "", f"NeuronCore-{program.core}", program, unnamed)


def programs_of_artifact(manifest: "Manifest", store: "Store", name: str | None = None) -> Iterator[ProfiledProgram]:
    """The programs of an artifact, or the one of that name."""
    from nxpipe.pipeline.verify.stored_artifact import read_instructions

    aws = predict_artifact(manifest, store)
    for stored in _selected(manifest, name):
        program = _legal(read_instructions(manifest, stored, store).program, f"{manifest.model.id} {stored.name}")
        yield ProfiledProgram(stored.name, manifest.name, manifest.target, program, aws[stored.name], identity(stored))


def programs_of_spec(model_spec: "ModelSpec", step: "Step") -> Iterator[ProfiledProgram]:
    """The programs of a specification, compiled without weights and without a store."""
    from nxpipe.emulator.compile import emit
    from nxpipe.pipeline.compile.frontend import compile_shape
    from nxpipe.pipeline.compile.spec import BuildSpec

    spec = BuildSpec.without_weights(model_spec)
    inputs = {"config": spec.source.relevant_config(), "options": {"autocast": spec.autocast}}
    for shape in spec.shapes:
        with step(f"compile {shape.name}"):
            program = emit(compile_shape(spec, shape), spec.target.core).program
        aws = predict_program(
            spec.source.id,
            inputs,
            instance=spec.target.name,
            phase=shape.phase,
            batch=shape.batch,
            sequence=shape.sequence,
            degree=program.ranks,
        )
        same = (shape.phase, shape.batch, shape.sequence, program.ranks)
        yield ProfiledProgram(shape.name, model_spec.title, spec.target.name, program, aws, same)


def _selected(manifest: "Manifest", name: str | None) -> "tuple[Executable, ...]":
    programs = {program.name: program for program in manifest.executables}
    if name is None:
        return manifest.executables
    if name not in programs:
        available = f"{manifest.name} has {', '.join(programs) or 'no program'}"
        raise InputInvalid(f"{available}, not {name!r}{did_you_mean(name, programs)}")
    return (programs[name],)


def _legal(program: "Program", where: str) -> "Program":
    """The program; ProgramInvalid for one that violates the ISA, whose timeline would not end."""
    from nxpipe.emulator.isa.constraints import ProgramInvalid as Illegal
    from nxpipe.emulator.isa.legality import check

    try:
        check(program)
    except Illegal as error:
        raise ProgramInvalid(f"{where}: {error}") from error
    return program
