"""Why a request is answered by the store or not: its key held against those of the artifacts that are most like it, and
the question of each of its programs against those of their programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.index.leaves import Difference, differences
from nxpipe.artifact_store.index.nearest import NearestArtifact, nearest_artifacts
from nxpipe.artifact_store.index.segments import Report
from nxpipe.artifact_store.layout import part_path
from nxpipe.pipeline.build.planned import PlannedArtifact, PlannedCell
from nxpipe.pipeline.request import BuildRequest, Shape, cache_room, digest_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store

_SEARCHED: Final = 5  # artifacts, the nearest, whose programs are compared with


@dataclass(frozen=True)
class NearProgram:
    """The program of an artifact that was asked for in the words most like ours."""

    artifact: NearestArtifact
    shape: Shape
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class ProgramAnswer:
    """`nearest` is that of a program that nobody has compiled."""

    cell: PlannedCell
    nearest: NearProgram | None

    @property
    def is_hit(self) -> bool:
        return self.cell.state in ("published", "committed")


@dataclass(frozen=True)
class Answer:
    """What the store knows of a request: `nearest` are other artifacts, the nearest first."""

    model: str
    key: str
    is_hit: bool
    nearest: Sequence[NearestArtifact]
    programs: Sequence[ProgramAnswer] = ()


def of_artifact(published: "Published", store: "Store", count: int, report: Report) -> Answer:
    """One that is there, beside those that were asked for in nearly the same words."""
    inputs = store.key_inputs(published.manifest)
    return Answer(
        published.model_id, published.request_key, True, nearest_artifacts(store, inputs, count=count, report=report)
    )


def of_request(request: BuildRequest, planned: PlannedArtifact, store: "Store", count: int, report: Report) -> Answer:
    inputs = request.key_inputs()
    near = nearest_artifacts(store, inputs, count=max(count, _SEARCHED), report=report)
    asked = [(one, store.key_inputs(one.published.manifest)) for one in near]
    programs = [
        ProgramAnswer(
            cell, None if _needs_no_compiler(request, cell, store) else _nearest_program(request, cell, asked)
        )
        for cell in planned.cells
    ]
    return Answer(request.source.id, digest_of(inputs), planned.is_published, near[:count], programs)


def _needs_no_compiler(request: BuildRequest, cell: PlannedCell, store: "Store") -> bool:
    """Or is not to be: what failed or cannot be asked for has a reason of its own."""
    return cell.state != "to do" or store.backend.stat(part_path(request.program_key(cell.shape))) is not None


def _nearest_program(
    request: BuildRequest, cell: PlannedCell, asked: Sequence[tuple[NearestArtifact, Mapping[str, Any]]]
) -> NearProgram | None:
    wanted = request.program_question(cell.shape)
    found = [
        NearProgram(one, shape, differences(question, wanted))
        for one, inputs in asked
        for shape, question in _questions(inputs, wanted)
    ]
    return min(found, key=lambda program: len(program.differences), default=None)


def _questions(inputs: Mapping[str, Any], like: Mapping[str, object]) -> Iterator[tuple[Shape, dict[str, object]]]:
    """What was asked of each program of an artifact, by what was asked of it all, which may be a stranger's."""
    shapes = list(_shapes(inputs.get("shapes")))
    told = {name: value for name, value in inputs.items() if name in like}
    if isinstance(options := told.get("options"), dict):
        told["options"] = {name: value for name, value in options.items() if name != "verified"}
    for shape in shapes:
        own = {"shapes": [[shape.phase, shape.batch, shape.sequence]], "cache": cache_room(shape, shapes)}
        yield shape, {**told, **own, "format": like["format"]}


def _shapes(said: object) -> Iterator[Shape]:
    for each in said if isinstance(said, list) else ():
        match each:
            case [str(phase), int(batch), int(sequence)]:
                yield Shape(phase, batch, sequence)
