"""Plan of a build: every cell of every artifact, its status in the store, its size, and why it is a cache miss.

Planning compiles nothing. The store is read in a few requests, not in one for each cell: two listings, and one read for
each published artifact. Work and memory are estimated from the model's configuration alone: they decide the order and
the number of jobs at once, never a result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.evidence import coverage_gap
from nxpipe.artifact_store.layout import ACTIONS, FAILURES, PARTS, action_path, failure_path, part_path
from nxpipe.pipeline.build.cache import Timings, raise_known_failure, timing_key
from nxpipe.pipeline.build.jobs import CellStatus, Failure, failure_from
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape, default_phases, shapes_of
from nxpipe.pipeline.models.source import DEFAULT_BUCKET, Companions
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds, evidence_shortfall
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.display import Displayed, Part, TablePart
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.util.exit_codes import combined_code
from nxpipe.pipeline.util.process import no_collection
from nxpipe.pipeline.util.text import for_terminal

if TYPE_CHECKING:
    from nxpipe.artifact_store.index.nearest import NearestArtifact


_ALONE: Final = 900 << 20  # bytes of a worker with its libraries and a small model, measured on two small encoders
_PER_PARAMETER: Final = 12  # bytes: fp32 weights, the emulator's rounded copy, the reference's copy
_BASE: Final = 5e9  # multiply-adds that take as long as the fixed cost of a cell: capture, passes, checks
SMALL_BUILD: Final = 4 * _BASE  # built in this process sooner than another process has imported its libraries


def parameters_of(config: Mapping[str, object]) -> int:
    """Approximate number of weights of a transformer; the parts of a composite are summed."""
    parts = (part for name, part in config.items() if name.endswith("_config"))
    inner = sum(parameters_of(part) for part in parts if isinstance(part, Mapping))
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if not hidden:
        return inner
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers") or 1
    wide = _first(config, "intermediate_size", "d_ff", "n_inner", "ffn_dim") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts") or 1
    vocabulary = _first(config, "vocab_size")
    return inner + vocabulary * hidden + layers * (4 * hidden * hidden + 3 * experts * hidden * wide)


def cell_work(request: BuildSpec, shape: Shape) -> float:
    """Multiply-adds of one run, plus the fixed cost."""
    tokens = shape.batch * (1 if shape.phase == "decode" else shape.sequence)
    hidden = _first(request.source.config, "hidden_size", "d_model", "n_embd", "dim")
    attention = tokens * shape.sequence * hidden
    return _BASE + (parameters_of(request.source.config) + attention / max(tokens, 1)) * tokens


def worker_memory(request: BuildSpec) -> int:
    """Bytes of a worker that builds one cell of the specification."""
    return _ALONE + (_PER_PARAMETER * parameters_of(request.source.config) if request.verified else 0)


def _first(config: Mapping[str, object], *names: str) -> int:
    """The first of these sizes that the configuration has; else 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a plan. `key` is the cache key of its last step, "" if it is refused. `why` explains a cache miss;
    `failure` is set if the cell cannot be built. `work` is its size relative to other cells; `seconds` an estimate from
    earlier builds."""

    key: str
    shape: Shape
    status: CellStatus
    why: str = ""
    work: float = 0.0
    seconds: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class PlannedArtifact:
    """An artifact of a plan. `key` is the request key, "" if it is refused. `memory`: estimated bytes of a worker on
    one of its cells."""

    key: str
    title: str
    spec: ModelSpec
    cells: tuple[PlannedCell, ...]
    memory: int = 0

    @property
    def is_published(self) -> bool:
        return all(cell.status is CellStatus.PUBLISHED for cell in self.cells)


@dataclass(frozen=True, repr=False)
class BuildPlan(Displayed):
    """The artifacts of a build; `store` is a URL."""

    store: str
    artifacts: tuple[PlannedArtifact, ...]

    def cells(self) -> Iterator[tuple[PlannedArtifact, PlannedCell]]:
        for artifact in self.artifacts:
            for cell in artifact.cells:
                yield artifact, cell

    def display(self) -> Iterator[Part]:
        rows = [
            (
                *(artifact.title, cell.shape.name, cell.status.value),
                "-" if cell.seconds is None else f"{cell.seconds:.0f} s",
                cell.failure.message if cell.failure else cell.why or "-",
            )
            for artifact, cell in self.cells()
        ]
        yield f"Build into {self.store}"
        yield TablePart("", ("artifact", "program", "state", "estimate", "why"), rows)

    @property
    def exit_code(self) -> int:
        """Exit code of a dry run: not 0 if a cell cannot be built."""
        return combined_code(cell.failure.code for _, cell in self.cells() if cell.failure)


_LISTED: Final = 64  # keys; for more, one listing is cheaper than a request for each
_SEARCHED: Final = 200  # key inputs to read that are in no index; a build must not wait for thousands
_FIELDS: Final = 3  # differing fields in the line of a cache miss
_WIDTH: Final = 60  # characters of a value
_EXPLAINED: Final = 16  # artifacts whose nearest one is searched; those of a large matrix have similar reasons
_FORCED: Final = "forced"
_UNVERIFIED: Final = "compiled, and not yet verified with these weights"
_MISS: Final = "cache miss"


@dataclass(frozen=True)
class Unverified:
    """A published artifact without evidence within [verify]. `beyond` is the error if its evidence is beyond the
    thresholds; None if it has none."""

    beyond: VerificationFailed | None = None


def find_unverified(published: Published, store: Store, request: BuildSpec, allowed: Thresholds) -> Unverified | None:
    """None if the artifact has all evidence that the specification requires."""
    if not request.verified:
        return None
    manifest, evidence = published.manifest, store.evidence(published.manifest_digest)
    if coverage_gap(manifest, evidence) is not None:
        return Unverified()
    sentence = evidence_shortfall(manifest, evidence, allowed)
    if not sentence:
        return None
    text = f"{published.name} was published with other thresholds: {sentence}; try --autocast none, or change [verify]"
    return Unverified(VerificationFailed(text))


@dataclass
class _Lookup:
    """A resolved artifact, its cells' cache keys, and its state in the store. `cells`: shape, and the keys of
    its steps."""

    spec: ModelSpec
    request: BuildSpec
    key: str
    is_published: bool = False
    unverified: Unverified | None = None
    cells: list[tuple[Shape, tuple[str, ...]]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.is_published and self.unverified is None

    @property
    def title(self) -> str:
        request = self.request
        return f"{self.spec.name or request.source.id} on {request.target.name}, tp {request.tensor_parallel}"


def make_plan(
    specs: Sequence[ModelSpec],
    store: Store,
    thresholds: Thresholds,
    timings: Timings,
    *,
    force: bool = False,
    hints: bool = False,
) -> BuildPlan:
    """Plan the specifications against the store. `hints` explains each cache miss by the nearest artifact, which takes
    a search."""
    resolved = [_resolve(spec) for spec in specs]
    lookups = [item for item in resolved if isinstance(item, _Lookup)]
    published = _present(store, ACTIONS, action_path, [lookup.key for lookup in lookups])
    known = [] if force else [lookup for lookup in lookups if lookup.key in published]
    for lookup, unverified in zip(
        known, store.backend.each(partial(_unverified, store, thresholds), known), strict=True
    ):
        lookup.is_published, lookup.unverified = True, unverified
    resolved = list(_with_files_checked(resolved))
    lookups = [item for item in resolved if isinstance(item, _Lookup)]
    for lookup in lookups:
        lookup.cells = [(shape, lookup.request.cell_keys(shape)) for shape in sorted(lookup.request.shapes)]
    open_keys = [key for lookup in lookups if not lookup.is_complete for _, keys in lookup.cells for key in keys]
    step_results = frozenset() if force else _present(store, PARTS, part_path, open_keys)
    failures = frozenset() if force else _present(store, FAILURES, failure_path, set(open_keys) - step_results)
    planner = _Planner(
        store, thresholds, timings, step_results, failures, force=force, hints_left=_EXPLAINED if hints else 0
    )
    return BuildPlan(
        store.url, tuple(planner.artifact(item) if isinstance(item, _Lookup) else item for item in resolved)
    )


def _resolve(spec: ModelSpec) -> _Lookup | PlannedArtifact:
    try:
        request = BuildSpec.of(spec)
        request.check()
        return _Lookup(spec, request, digest_of(request.key_inputs()))
    except Exception as error:
        return _refused(spec, failure_from(error))


def _with_files_checked(resolved: Iterable[_Lookup | PlannedArtifact]) -> Iterator[_Lookup | PlannedArtifact]:
    """The artifacts; those to publish with a malformed file are refused, before anything is compiled."""
    failure_of = cache(_companions_failure)  # all variants of a model have the same files
    for item in resolved:
        failure = None
        if isinstance(item, _Lookup) and not item.is_published:
            failure = failure_of(item.request.companions)
        yield _refused(item.spec, failure) if failure else item


def _companions_failure(companions: Companions) -> Failure | None:
    try:
        companions.check()
    except Exception as error:
        return failure_from(error)
    return None


def _refused(spec: ModelSpec, failure: Failure) -> PlannedArtifact:
    """A refused artifact, with the cells that its specification names."""
    shapes = shapes_of(spec.phases or default_phases(spec.task or ""), spec.batches, spec.buckets or (DEFAULT_BUCKET,))
    cells = tuple(PlannedCell("", shape, CellStatus.REFUSED, failure=failure) for shape in sorted(shapes))
    return PlannedArtifact("", f"{spec.title} on {spec.target}, tp {spec.tp or 1}", spec, cells)


def _unverified(store: Store, thresholds: Thresholds, lookup: _Lookup) -> Unverified | None:
    """`find_unverified`; an artifact that was just removed counts as one to publish again."""
    published = store.find(lookup.key)
    return find_unverified(published, store, lookup.request, thresholds) if published else Unverified()


def _present(store: Store, folder: str, path_of: Callable[[str], str], keys: Iterable[str]) -> frozenset[str]:
    """The keys that have an object in the store; many keys are looked up in one listing."""
    requested = list(keys)
    if len(requested) > _LISTED:
        return frozenset(path.removeprefix(folder) for path in store.backend.paths(folder)).intersection(requested)
    stats = store.backend.each(lambda key: store.backend.stat(path_of(key)), requested)
    return frozenset(key for key, stat in zip(requested, stats, strict=True) if stat is not None)


@dataclass
class _Planner:
    """Planner of artifacts, given the step results and known failures that are in the store."""

    store: Store
    thresholds: Thresholds
    timings: Timings
    step_results: frozenset[str]
    failures: frozenset[str]
    force: bool
    hints_left: int

    def artifact(self, lookup: _Lookup) -> PlannedArtifact:
        if lookup.is_complete:
            cells = [PlannedCell(keys[-1], shape, CellStatus.PUBLISHED) for shape, keys in lookup.cells]
        elif lookup.unverified and lookup.unverified.beyond:
            failure = failure_from(lookup.unverified.beyond)
            cells = [PlannedCell(keys[-1], shape, CellStatus.FAILED, failure=failure) for shape, keys in lookup.cells]
        else:
            cells = [self._cell(lookup, shape, keys) for shape, keys in lookup.cells]
            if any(cell.why == _MISS for cell in cells):
                why = self._nearest(lookup.request)
                cells = [replace(cell, why=why) if cell.why == _MISS else cell for cell in cells]
        return PlannedArtifact(lookup.key, lookup.title, lookup.spec, tuple(cells), worker_memory(lookup.request))

    def _cell(self, lookup: _Lookup, shape: Shape, keys: tuple[str, ...]) -> PlannedCell:
        key, work = keys[-1], cell_work(lookup.request, shape)
        if self.step_results.issuperset(keys):
            return PlannedCell(key, shape, CellStatus.COMMITTED, work=work)
        if failure := self._known_failure(keys):
            return PlannedCell(key, shape, CellStatus.FAILED, work=work, failure=failure)
        why = _FORCED if self.force else _UNVERIFIED if lookup.unverified or keys[0] in self.step_results else _MISS
        seconds = self.timings.estimate(timing_key(lookup.request, shape), work)
        return PlannedCell(key, shape, CellStatus.QUEUED, why, work, seconds)

    def _known_failure(self, keys: tuple[str, ...]) -> Failure | None:
        for key in self.failures.intersection(keys):
            try:
                raise_known_failure(self.store, key, self.thresholds)
            except Exception as error:
                return failure_from(error)
        return None

    def _nearest(self, request: BuildSpec) -> str:
        if not self.hints_left:
            return _MISS
        self.hints_left -= 1
        return explain_cache_miss(self.store, request.key_inputs()) or _MISS


def explain_cache_miss(store: "Store", inputs: dict[str, object]) -> str | None:
    """One line for a build: the nearest artifact and the fields in which it differs; None in an empty store."""
    from nxpipe.artifact_store.index.nearest import nearest_artifacts

    try:
        with no_collection():
            nearest = nearest_artifacts(store, inputs, count=1, at_most=_SEARCHED)
    except StoreError as error:
        # A hint is not worth a failed build; a store that cannot be read fails the publish.
        return f"cache miss: the nearest artifact cannot be found: {error}"
    return (
        f"cache miss: nearest artifact {nearest[0].published.name} differs in {_fields(nearest[0])}"
        if nearest
        else None
    )


def _fields(nearest: "NearestArtifact") -> str:
    """The first differing fields, as `options.autocast ("matmult" there, "all" here)`."""
    listed = nearest.differences[:_FIELDS]
    fields = [
        f"{for_terminal(difference.path)} ({shorten(difference.before)} there, {shorten(difference.after)} here)"
        for difference in listed
    ]
    omitted = len(nearest.differences) - len(listed)
    return ", ".join(fields) + (f" and {omitted} more fields" if omitted else "")


def shorten(text: str | None) -> str:
    """Canonical JSON for a terminal, without the middle of a long value."""
    if text is None:
        return "-"
    printable = for_terminal(text)
    return printable if len(printable) <= _WIDTH else f"{printable[: _WIDTH - 20]}...{printable[-17:]}"
