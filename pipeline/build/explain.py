"""Explanation of a cache miss: the key inputs of a request, and of each of its programs, compared with those of the
nearest artifacts in the store."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.index.leaves import Difference, differences
from nxpipe.artifact_store.index.nearest import NearestArtifact, nearest_artifacts
from nxpipe.artifact_store.index.segments import Report
from nxpipe.artifact_store.layout import part_path
from nxpipe.pipeline.build.jobs import CellStatus
from nxpipe.pipeline.build.plan import PlannedArtifact, PlannedCell, shorten
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape, cache_capacity
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.text import for_terminal, table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store


_SEARCHED: Final = 5  # nearest artifacts whose programs are compared


def difference_table(differences: "Sequence[Difference]", before: str, after: str) -> str:
    rows = [
        (for_terminal(difference.path), shorten(difference.before), shorten(difference.after))
        for difference in differences
    ]
    return table(("field", before, after), rows)


def differences_as_json(differences: "Sequence[Difference]", before: str, after: str) -> list[dict[str, object]]:
    """A side that lacks the field is left out."""
    return [
        {"field": difference.path}
        | {
            side: json.loads(text)
            for side, text in ((before, difference.before), (after, difference.after))
            if text is not None
        }
        for difference in differences
    ]


@dataclass(frozen=True)
class NearestProgram:
    """The program in the store whose key inputs differ least."""

    artifact: NearestArtifact
    shape: Shape
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class ProgramLookup:
    """Cache hit or miss of one program; `nearest` is None unless the program has to be compiled."""

    cell: PlannedCell
    nearest: NearestProgram | None

    @property
    def is_hit(self) -> bool:
        return self.cell.status.in_store


@dataclass(frozen=True)
class CacheLookup:
    """Cache hit or miss of a request; `nearest` are other artifacts, the nearest first."""

    model: str
    key: str
    is_hit: bool
    nearest: Sequence[NearestArtifact]
    programs: Sequence[ProgramLookup] = ()


def look_up_artifact(published: "Published", store: "Store", count: int, report: Report) -> CacheLookup:
    """An artifact of the store, compared with others."""
    inputs = store.key_inputs(published.manifest)
    return CacheLookup(
        published.model_id, published.request_key, True, nearest_artifacts(store, inputs, count=count, report=report)
    )


def look_up_request(
    request: BuildSpec, planned: PlannedArtifact, store: "Store", count: int, report: Report
) -> CacheLookup:
    inputs = request.key_inputs()
    nearest = nearest_artifacts(store, inputs, count=max(count, _SEARCHED), report=report)
    candidates = [(artifact, store.key_inputs(artifact.published.manifest)) for artifact in nearest]
    programs = [
        ProgramLookup(
            cell, None if _needs_no_compiler(request, cell, store) else _nearest_program(request, cell, candidates)
        )
        for cell in planned.cells
    ]
    return CacheLookup(request.source.id, digest_of(inputs), planned.is_published, nearest[:count], programs)


def _needs_no_compiler(request: BuildSpec, cell: PlannedCell, store: "Store") -> bool:
    """True if the program is in the store, or if its status gives another reason: failed or refused."""
    if cell.status is not CellStatus.QUEUED:
        return True
    return store.backend.stat(part_path(request.program_key(cell.shape))) is not None


def _nearest_program(
    request: BuildSpec, cell: PlannedCell, candidates: Sequence[tuple[NearestArtifact, Mapping[str, Any]]]
) -> NearestProgram | None:
    requested = request.program_key_inputs(cell.shape)
    programs = [
        NearestProgram(artifact, shape, differences(stored, requested))
        for artifact, inputs in candidates
        for shape, stored in _program_inputs(inputs, requested)
    ]
    return min(programs, key=lambda program: len(program.differences), default=None)


def _program_inputs(inputs: Mapping[str, Any], like: Mapping[str, object]) -> Iterator[tuple[Shape, dict[str, object]]]:
    """Key inputs of each program of an artifact, derived from the artifact's own. Another producer may have written
    them."""
    shapes = list(_shapes(inputs.get("shapes")))
    shared_inputs = {name: value for name, value in inputs.items() if name in like}
    if isinstance(options := shared_inputs.get("options"), dict):
        shared_inputs["options"] = {name: value for name, value in options.items() if name != "verified"}
    for shape in shapes:
        own_inputs = {"shapes": [[shape.phase, shape.batch, shape.sequence]], "cache": cache_capacity(shape, shapes)}
        yield shape, {**shared_inputs, **own_inputs, "format": like["format"]}


def _shapes(value: object) -> Iterator[Shape]:
    for entry in value if isinstance(value, list) else ():
        match entry:
            case [str(phase), int(batch), int(sequence)]:
                yield Shape(phase, batch, sequence)
