"""What was asked otherwise, in a person's words."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.index.leaves import Difference, differences
from nxpipe.artifact_store.index.nearest import Near, nearest
from nxpipe.artifact_store.index.segments import Report
from nxpipe.artifact_store.layout import part_path
from nxpipe.pipeline.build.plan import PlannedArtifact, PlannedCell
from nxpipe.pipeline.request import BuildRequest, Shape, cache_room, digest_of
from nxpipe.pipeline.util.console import table
from nxpipe.pipeline.util.escape import for_terminal

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store


_SHOWN: Final = 3  # differing fields that fit a line
_WIDEST: Final = 60  # characters of a value in a table
_READ_FOR_A_HINT: Final = 200  # key inputs that are in no index; a build must not wait for thousands


def why_missed(store: "Store", inputs: dict[str, object]) -> str | None:
    """One line for a build that found nothing: the nearest artifact, and where it was asked for otherwise."""
    from nxpipe.artifact_store.errors import StoreError
    from nxpipe.artifact_store.index.nearest import nearest
    from nxpipe.pipeline.util.garbage import no_collection

    try:
        with no_collection():
            found = nearest(store, inputs, count=1, at_most=_READ_FOR_A_HINT)
    except StoreError as error:
        # A hint is worth no failed build; a store that is really broken stops the publish.
        return f"  not in the store, and the nearest cannot be told: {error}"
    return f"  not in the store; {_in_one_line(found[0])}" if found else None


def _in_one_line(near: "Near") -> str:
    """Ends in the first fields, as `options.autocast: "matmult" there, "all" here`."""
    differing = near.differences[:_SHOWN]
    said = [f"{for_terminal(one.path)}: {value(one.before)} there, {value(one.after)} here" for one in differing]
    more = len(near.differences) - len(said)
    return f"the nearest is {near.published.name}, with {'; '.join(said)}" + (f"; and {more} more" if more else "")


def difference_table(differences: "Sequence[Difference]", before: str, after: str) -> str:
    rows = [(for_terminal(one.path), value(one.before), value(one.after)) for one in differences]
    return table(("field", before, after), rows)


def differences_as_json(differences: "Sequence[Difference]", before: str, after: str) -> list[dict[str, object]]:
    """A side that lacks the field has no word in it."""
    return [
        {"field": one.path}
        | {side: json.loads(text) for side, text in ((before, one.before), (after, one.after)) if text is not None}
        for one in differences
    ]


def value(text: str | None) -> str:
    """Canonical JSON on a terminal; the middle of a long one is left out."""
    if text is None:
        return "-"
    shown = for_terminal(text)
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 20]}...{shown[-17:]}"


_SEARCHED: Final = 5  # artifacts, the nearest, whose programs are compared with


@dataclass(frozen=True)
class NearProgram:
    """The program of an artifact that was asked for in the words most like ours."""

    artifact: Near
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
    nearest: Sequence[Near]
    programs: Sequence[ProgramAnswer] = ()


def of_artifact(published: "Published", store: "Store", count: int, report: Report) -> Answer:
    """One that is there, beside those that were asked for in nearly the same words."""
    inputs = store.key_inputs(published.manifest)
    return Answer(published.model_id, published.request_key, True, nearest(store, inputs, count=count, report=report))


def of_request(request: BuildRequest, planned: PlannedArtifact, store: "Store", count: int, report: Report) -> Answer:
    inputs = request.key_inputs()
    near = nearest(store, inputs, count=max(count, _SEARCHED), report=report)
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
    request: BuildRequest, cell: PlannedCell, asked: Sequence[tuple[Near, Mapping[str, Any]]]
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
