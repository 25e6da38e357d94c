"""What stands in the store of all that is asked for, and why the rest does not: nothing is computed to find out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.layout import ACTIONS, FAILURES, PARTS, action_path, failure_path, part_path
from nxpipe.pipeline.build.events import Fault
from nxpipe.pipeline.build.failed import refuse_what_failed_before
from nxpipe.pipeline.build.faults import fault_of
from nxpipe.pipeline.build.nearness import why_missed
from nxpipe.pipeline.build.planned import Plan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.build.proved import Doubt, doubt_of
from nxpipe.pipeline.build.size import memory_of, work_of
from nxpipe.pipeline.build.timings import Timings, name_of
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.shapes import Shape, shapes_of
from nxpipe.pipeline.models.source import DEFAULT_BUCKET
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds

_LISTED: Final = 64  # keys, from which on one listing is less than a look for each
_EXPLAINED: Final = 16  # artifacts whose nearest is looked for; of a large matrix the first say it all
_FORCED: Final = "forced"
_UNVERIFIED: Final = "compiled, and not yet verified with these weights"
_NOTHING: Final = "not in the store"


@dataclass
class _Cell:
    shape: Shape
    program: str
    evidence: str | None

    @property
    def key(self) -> str:
        return self.evidence or self.program

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.program, self.evidence) if self.evidence else (self.program,)


@dataclass
class _Artifact:
    """One that can be asked for."""

    asked: ModelSpec
    request: BuildSpec
    key: str
    is_published: bool = False
    doubt: Doubt | None = None
    cells: list[_Cell] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Nothing is left to do."""
        return self.is_published and self.doubt is None


def make_plan(
    asked: Sequence[ModelSpec],
    store: Store,
    thresholds: Thresholds,
    timings: Timings,
    *,
    force: bool = False,
    hints: bool = False,
) -> Plan:
    """With `hints`, what is not there is told with what is nearest to it, which takes a search."""
    found = [_looked_up(one) for one in asked]
    artifacts = [one for one in found if isinstance(one, _Artifact)]
    published = _present(store, ACTIONS, action_path, [one.key for one in artifacts])
    standing = [] if force else [one for one in artifacts if one.key in published]
    for one, doubt in zip(standing, store.backend.each(partial(_doubt, store, thresholds), standing), strict=True):
        one.is_published, one.doubt = True, doubt
    for one in artifacts:
        one.cells = [_cell(one.request, shape) for shape in sorted(one.request.shapes)]
    open_keys = [key for one in artifacts if not one.is_whole for cell in one.cells for key in cell.keys]
    parts = frozenset() if force else _present(store, PARTS, part_path, open_keys)
    failures = frozenset() if force else _present(store, FAILURES, failure_path, set(open_keys) - parts)
    planner = _Planner(store, thresholds, timings, parts, failures, force=force, hints_left=_EXPLAINED if hints else 0)
    return Plan(store.url, tuple(planner.say(one) if isinstance(one, _Artifact) else one for one in found))


def _doubt(store: Store, thresholds: Thresholds, one: _Artifact) -> Doubt | None:
    """One that was removed a moment ago is made anew."""
    published = store.find(one.key)
    return doubt_of(published, store, one.request, thresholds) if published else Doubt()


@dataclass
class _Planner:
    """Says what stands, given what is present."""

    store: Store
    thresholds: Thresholds
    timings: Timings
    parts: frozenset[str]
    failures: frozenset[str]
    force: bool
    hints_left: int

    def say(self, one: _Artifact) -> PlannedArtifact:
        if one.is_whole:
            cells = [PlannedCell(cell.key, cell.shape, "published") for cell in one.cells]
        elif one.doubt and one.doubt.beyond:
            fault = fault_of(one.doubt.beyond)
            cells = [PlannedCell(cell.key, cell.shape, "failed", fault=fault) for cell in one.cells]
        else:
            cells = [self._open(one, cell) for cell in one.cells]
            if any(cell.why == _NOTHING for cell in cells):
                why = self._nearest(one.request)
                cells = [replace(cell, why=why) if cell.why == _NOTHING else cell for cell in cells]
        return PlannedArtifact(one.key, _title(one.asked, one.request), one.asked, tuple(cells), memory_of(one.request))

    def _open(self, one: _Artifact, cell: _Cell) -> PlannedCell:
        work = work_of(one.request, cell.shape)
        if self.parts.issuperset(cell.keys):
            return PlannedCell(cell.key, cell.shape, "committed", work=work)
        if fault := self._remembered(cell):
            return PlannedCell(cell.key, cell.shape, "failed", work=work, fault=fault)
        why = _FORCED if self.force else _UNVERIFIED if one.doubt or cell.program in self.parts else _NOTHING
        seconds = self.timings.estimate(name_of(one.request, cell.shape), work)
        return PlannedCell(cell.key, cell.shape, "to do", why, work, seconds)

    def _remembered(self, cell: _Cell) -> Fault | None:
        for key in self.failures.intersection(cell.keys):
            try:
                refuse_what_failed_before(self.store, key, self.thresholds)
            except Exception as error:
                return fault_of(error)
        return None

    def _nearest(self, request: BuildSpec) -> str:
        if not self.hints_left:
            return _NOTHING
        self.hints_left -= 1
        return (why_missed(self.store, request.key_inputs()) or _NOTHING).strip()


def _looked_up(asked: ModelSpec) -> _Artifact | PlannedArtifact:
    try:
        request = BuildSpec.of(asked)
        request.check()
        return _Artifact(asked, request, request.request_key)
    except Exception as error:
        return _refused(asked, fault_of(error))


def _refused(asked: ModelSpec, fault: Fault) -> PlannedArtifact:
    """What its words ask for, as far as they say it without the model."""
    shapes = shapes_of(asked.phases or ("forward",), asked.batches, asked.buckets or (DEFAULT_BUCKET,))
    cells = tuple(PlannedCell("", shape, "refused", fault=fault) for shape in sorted(shapes))
    return PlannedArtifact("", f"{asked.title} on {asked.target}, tp {asked.tp or 1}", asked, cells)


def _title(asked: ModelSpec, request: BuildSpec) -> str:
    return f"{asked.name or request.source.id} on {request.target.name}, tp {request.tensor_parallel}"


def _cell(request: BuildSpec, shape: Shape) -> _Cell:
    program = request.program_key(shape)
    return _Cell(shape, program, request.evidence_key(shape, program) if request.verified else None)


def _present(store: Store, folder: str, path_of: Callable[[str], str], keys: Iterable[str]) -> frozenset[str]:
    """Those of the keys that have an object; many are looked for in one listing."""
    wanted = list(keys)
    if len(wanted) > _LISTED:
        return frozenset(path.removeprefix(folder) for path in store.backend.paths(folder)).intersection(wanted)
    stats = store.backend.each(lambda key: store.backend.stat(path_of(key)), wanted)
    return frozenset(key for key, stat in zip(wanted, stats, strict=True) if stat is not None)
