"""Worker: one job from its document to its result, and the executor that runs jobs in this process.

Workers share nothing but the store.
A cell is two steps, its program and its evidence; the result of each is committed to the store under its own cache key.
An artifact is assembled from the results of its cells only, so its bytes do not depend on the
number of machines or the order of the jobs.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.builds import StepResult, keep_step_result, record_observation, step_result
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Incomplete
from nxpipe.artifact_store.evidence import Evidence, Limits
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from nxpipe.artifact_store.weights import Elements, put_weights
from nxpipe.emulator.confinement import active_limits, confined
from nxpipe.pipeline.build.cache import hold_lease, raise_known_failure, record_failure
from nxpipe.pipeline.build.jobs import Event, Job, JobFinished, JobLog, JobStarted, failure_from
from nxpipe.pipeline.build.plan import find_unverified
from nxpipe.pipeline.compile.artifact_files import UTILISATION, device_program
from nxpipe.pipeline.compile.artifact_files import to_bytes as utilisation_file
from nxpipe.pipeline.compile.backend import PROGRAM, Backend, BackendOutput
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.thresholds import Thresholds, require_within
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.progress import Step, Watch
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.evidence import EvidenceCollector, WeightCache, compared

if TYPE_CHECKING:
    from nxpipe.artifact_store.backends.protocol import Sent
    from nxpipe.pipeline.models.weights import Tensors


_WEIGHTS: Final = WeightCache()  # shared by all jobs of this process: consecutive cells mostly belong to one model
_LOG_INTERVAL: Final = 2.0  # seconds
_KIB: Final = 1024


def run_job(job: Job, send: Callable[[Event], None]) -> JobFinished:
    """Run a job. An exception becomes the failure in the returned event; an interruption propagates."""
    began, failure, built = time.monotonic(), None, False
    try:
        with confined(active_limits()):
            built = _run(job, send)
    except Exception as error:
        failure = failure_from(error)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB + _reader_memory()
    return JobFinished(job.key, time.monotonic() - began, cached=not built, memory=memory, failure=failure)


def _run(job: Job, send: Callable[[Event], None]) -> bool:
    """Build the job's cell or publish its artifact; False for a cache hit."""

    def log(text: str) -> None:
        send(JobLog(job.key, text.strip()))

    @contextmanager
    def step(title: str) -> Iterator[None]:
        log(title)
        yield

    request = BuildSpec.of(job.spec)
    request.check()
    store = _store(job.store, job.kms_key)
    builder = CellBuilder(store, step, log, job.thresholds, force=job.force, weight_cache=_WEIGHTS)
    if job.shape is not None:
        return builder.make(request, job.shape)
    published = None if job.force else store.find(job.key)
    if published is not None and find_unverified(published, store, request, job.thresholds) is None:
        return False
    builder.publish(request, partial(_log_progress, log))
    return True


def _reader_memory() -> int:
    """Peak memory, in bytes, of the confined processes that read model files for this process."""
    client = sys.modules.get("nxpipe.emulator.confinement.client")  # imported on first use
    return client.peak() if client is not None else 0


@cache
def _store(url: str, kms_key: str | None) -> "Store":
    from nxpipe.artifact_store.url import open_store

    return open_store(url, kms_key=kms_key)


@contextmanager
def _log_progress(log: Callable[[str], None], title: str, total: int) -> Iterator["Sent"]:
    """Log the progress every few seconds while bytes are sent."""
    done, logged = 0, time.monotonic()

    def sent(size: int) -> None:
        nonlocal done, logged
        done += size
        if time.monotonic() - logged >= _LOG_INTERVAL:
            logged = time.monotonic()
            log(f"{title}: {100 * min(done, total) // max(total, 1)} % of {human_bytes(total)}")

    yield sent


_Keep: TypeAlias = Callable[[Store, str, Mapping[str, Blob], dict[str, object]], StepResult]


class CellBuilder:
    """Builder of cells that keeps loaded weights for the next cell. `force` bypasses cache and leases; the store still
    refuses a result whose bytes differ from the stored ones."""

    def __init__(
        self,
        store: Store,
        step: Step,
        log: Callable[[str], None],
        thresholds: Thresholds,
        *,
        force: bool = False,
        weight_cache: WeightCache | None = None,
    ) -> None:
        self._store = store
        self._step = step
        self._log = log
        self._thresholds = thresholds
        self._force = force
        self._weight_cache = weight_cache or WeightCache()

    def make(self, request: BuildSpec, shape: Shape) -> bool:
        """Build a cell; False if every step was a cache hit."""
        backend = _backend_of(request.backend, partial(hold_lease, self._store, log=self._log))
        run_frontend: Callable[[], Any] = cache(partial(backend.frontend, request, shape, self._step))

        def program() -> BackendOutput:
            return backend.program(request, shape, run_frontend(), self._store, self._step, force=self._force)

        @cache
        def collector() -> EvidenceCollector:
            weights = self._weight_cache.of(request, self._step)
            return EvidenceCollector(request, shape, run_frontend(), weights, self._store, self._step)

        program_key, *evidence_keys = request.cell_keys(shape)
        built = self._build_step(program_key, program)
        for kind, key in zip(request.evidence_kinds, evidence_keys, strict=True):

            def evidence(kind: str = kind) -> BackendOutput:
                return collector().collect(kind, self._thresholds)

            built = self._build_step(key, evidence, record_observation) or built
            self._require_thresholds(request, shape, key)
        return built

    def publish(self, request: BuildSpec, watch: Watch) -> Published:
        """Publish an artifact whose cells are all committed. If a blob is missing, which no listing shows, rebuild the
        cells first."""
        tensors = self._weight_cache.of(request, self._step).tensors
        try:
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)
        except Incomplete:
            for shape in sorted(request.shapes):
                self.make(request, shape)
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)

    def _build_step(self, key: str, build: Callable[[], BackendOutput], keep: _Keep = keep_step_result) -> bool:
        if self._force:
            self._commit(key, build, keep)
            return True
        if self._is_cached(key):
            return False
        with hold_lease(self._store, key, self._log):
            if self._is_cached(key):
                return False
            self._commit(key, build, keep)
            return True

    def _is_cached(self, key: str) -> bool:
        if step_result(self._store, key) is not None:
            return True
        raise_known_failure(self._store, key, self._thresholds)
        return False

    def _commit(self, key: str, build: Callable[[], BackendOutput], keep: _Keep) -> None:
        with record_failure(self._store, key, self._thresholds):
            output = build()
        keep(self._store, key, output.files, dict(output.facts))

    def _require_thresholds(self, request: BuildSpec, shape: Shape, key: str) -> None:
        """Raise VerificationFailed for committed evidence that is beyond today's thresholds."""
        result = step_result(self._store, key)
        if result is not None:
            require_within(request.source.id, [compared(shape, result)], self._thresholds)


@dataclass(frozen=True)
class _Program:
    shape: Shape
    result: StepResult
    evidence: Mapping[str, StepResult]  # by kind

    def executable(self) -> Executable:
        shape, facts = self.shape, self.result.facts
        return Executable.model_validate(
            {
                "name": shape.name,
                "phase": shape.phase,
                "batch": shape.batch,
                "sequence": shape.sequence,
                "tensor_parallel": facts["degree"],
                "graph_key": facts["graph_key"],
                "outputs": facts["outputs"],
                "blob": self.result.blob(PROGRAM),
                "device": self._device(),
            }
        )

    def files(self) -> dict[str, Blob]:
        """Files beside the program, by path in the artifact."""
        apart = {PROGRAM, *device_program(self.shape.name).values()}
        return {file.path: file.blob for file in self.result.files if file.path not in apart}

    def _device(self) -> dict[str, object] | None:
        """The program for Neuron devices, if the back end has compiled one."""
        paths, stored = device_program(self.shape.name), {file.path for file in self.result.files}
        if not stored.issuperset(paths.values()):
            return None
        return {field: self.result.blob(path) for field, path in paths.items()}


def publish(
    request: BuildSpec, tensors: "Tensors", store: Store, step: Step, watch: Watch, allowed: Thresholds
) -> Published:
    """Store weights and evidence, then publish the manifest, which makes the artifact visible."""
    programs = [_program(request, shape, store) for shape in sorted(request.shapes)]
    with step(f"store {len(tensors)} tensors"):
        size = sum(tensors.kinds[name].nbytes for name in tensors)
        with watch(f"store {request.source.id}", size) as sent:
            weights = put_weights(store.blobs, _elements(tensors), sent)
    with step("publish"):
        manifest = _manifest(request, programs, weights, store)
        for document in _evidence(request, programs, manifest, allowed):
            store.attest(document)
        return store.publish(manifest)


def _evidence(
    request: BuildSpec, programs: list[_Program], manifest: Manifest, allowed: Thresholds
) -> Iterator[Evidence]:
    """A document of each kind."""
    limits = Limits.model_validate(asdict(allowed))
    for kind in request.evidence_kinds:
        results = tuple(compared(program.shape, program.evidence[kind]) for program in programs)
        require_within(request.source.id, results, allowed)
        yield Evidence(manifest=manifest.digest, kind=kind, programs=results, limits=limits)


def _program(request: BuildSpec, shape: Shape, store: Store) -> _Program:
    program_key, *evidence_keys = request.cell_keys(shape)
    result = step_result(store, program_key)
    found = ((kind, step_result(store, key)) for kind, key in zip(request.evidence_kinds, evidence_keys, strict=True))
    evidence = {kind: document for kind, document in found if document is not None}
    if result is None or len(evidence) < len(request.evidence_kinds):
        raise Incomplete(
            f"{request.source.id}: the build of {shape.name} is no longer in {store.url}; "
            "run the same command again to rebuild it"
        )
    return _Program(shape, result, evidence)


def _manifest(request: BuildSpec, programs: list[_Program], weights: tuple[Tensor, ...], store: Store) -> Manifest:
    source = request.source
    files: dict[str, Blob] = {}
    for program in programs:
        files |= program.files()
    figures: dict[str, Any] = {program.shape.name: program.result.facts.get("utilisation") for program in programs}
    if all(figures.values()):
        files[UTILISATION] = store.put_blob(utilisation_file(figures))
    if source.config:
        files["config.json"] = store.put_blob(canonical_json(source.relevant_config()))
    inputs = request.key_inputs()
    companions = {path: store.put_blob(data) for path, data in request.companions.contents()}
    if {path: blob.sha256 for path, blob in companions.items()} != inputs.get("files", {}):
        raise ModelSourceError(f"{source.id}: a file beside the model changed while it was published; build again")
    files |= companions
    return Manifest(
        model=ModelRef(id=source.id, revision=source.revision, task=source.task),
        target=request.target.compiler_target,
        backend=request.backend,
        key_inputs=store.put_blob(canonical_json(inputs)),
        executables=tuple(program.executable() for program in programs),
        weights=weights,
        files=tuple(File(path=path, blob=files[path]) for path in sorted(files)),
    )


def _elements(tensors: "Tensors") -> Iterator[Elements]:
    """Yield tensors one at a time, so that only those being stored are in memory."""
    import numpy as np

    for name in tensors:
        kind, elements = tensors.kinds[name], np.ascontiguousarray(tensors[name])
        yield Elements(name, str(kind.dtype), kind.shape, elements.reshape(-1).view(np.uint8).data)


class InlineExecutor:
    """Executor of one job at a time in this process, for builds that are shorter than the start of another process."""

    name: Final = "local"

    def __init__(self, apply: Callable[[Event], None]) -> None:
        """`apply` receives the events while a job runs, since `events` returns only when it has finished."""
        self._apply = apply
        self._job: Job | None = None

    def takes(self, job: Job) -> bool:
        return self._job is None

    def start(self, job: Job) -> None:
        self._job = job

    def events(self, patience: float) -> Sequence[Event]:
        if self._job is None:
            return ()
        self._apply(JobStarted(self._job.key, "this process"))
        job, self._job = self._job, None
        return (run_job(job, self._apply),)

    def close(self) -> None:
        """Nothing to stop: jobs run only inside `events`."""


def _backend_of(name: str, hold: Callable[[str], AbstractContextManager[None]]) -> Backend:
    if name == "neuronx":
        from nxpipe.pipeline.compile.neuronx.backend import NeuronxBackend

        return NeuronxBackend(hold)
    from nxpipe.pipeline.compile.frontend import EmulatorBackend

    return EmulatorBackend()
