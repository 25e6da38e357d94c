"""What a worker does: one item, from its document to its end. The store it names is all that it has to do with."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Incomplete
from nxpipe.artifact_store.evidence import EMULATED, Evidence, Limits
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from nxpipe.artifact_store.parts import Part, keep_observation, keep_part, part_of, seen
from nxpipe.artifact_store.weights import Elements, put_weights
from nxpipe.emulator.confinement import confined, limits_now
from nxpipe.pipeline.artifacts.artifact_files import UTILISATION
from nxpipe.pipeline.artifacts.utilisation import to_bytes as utilisation_file
from nxpipe.pipeline.build.cache import refuse_what_failed_before, remembering, turn
from nxpipe.pipeline.build.jobs import Ended, Event, Item, Said
from nxpipe.pipeline.build.planner import doubt_of
from nxpipe.pipeline.build.status import fault_of
from nxpipe.pipeline.compile.made import PROGRAM, Made, backend_of, compared
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.console import human_bytes
from nxpipe.pipeline.util.progress import Watch
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.judged import insist
from nxpipe.pipeline.verify.materials import Shelf
from nxpipe.pipeline.verify.verify import Thresholds

if TYPE_CHECKING:
    from nxpipe.artifact_store.backends.protocol import Sent
    from nxpipe.pipeline.models.weights import Tensors


_SHELF: Final = Shelf()  # of this process, which mostly makes one cell of a model after the other
_SAID_EVERY: Final = 2.0  # seconds
_KIB: Final = 1024


def carry_out(item: Item, tell: Callable[[Event], None]) -> Ended:
    """Whatever goes wrong is in what it returns; only an interruption is raised."""
    began, fault, made = time.monotonic(), None, False
    try:
        with confined(limits_now()):
            made = _made(item, tell)
    except Exception as error:
        fault = fault_of(error)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB + _of_readers()
    return Ended(item.key, time.monotonic() - began, cached=not made, memory=memory, fault=fault)


def _made(item: Item, tell: Callable[[Event], None]) -> bool:
    def say(text: str) -> None:
        tell(Said(item.key, text.strip()))

    @contextmanager
    def step(title: str) -> Iterator[None]:
        say(title)
        yield

    request = item.asked.request()
    request.check()
    store = _store(item.store, item.kms_key)
    maker = Maker(store, step, say, item.thresholds, force=item.force, shelf=_SHELF)
    if item.shape is not None:
        return maker.make(request, item.shape)
    published = None if item.force else store.find(item.key)
    if published is not None and doubt_of(published, store, request, item.thresholds) is None:
        return False
    maker.publish(request, partial(_watched, say))
    return True


def _of_readers() -> int:
    """The most memory that a process took which reads models for this one."""
    client = sys.modules.get("nxpipe.emulator.confinement.client")  # which is imported by the first question
    return client.peak() if client is not None else 0


@cache
def _store(url: str, kms_key: str | None) -> "Store":
    from nxpipe.artifact_store.url import open_store

    return open_store(url, kms_key=kms_key)


@contextmanager
def _watched(say: Callable[[str], None], title: str, total: int) -> Iterator["Sent"]:
    """Bytes on their way, told from time to time."""
    done, spoke = 0, time.monotonic()

    def sent(size: int) -> None:
        nonlocal done, spoke
        done += size
        if time.monotonic() - spoke >= _SAID_EVERY:
            spoke = time.monotonic()
            say(f"{title}: {100 * min(done, total) // max(total, 1)} % of {human_bytes(total)}")

    yield sent


_Find: TypeAlias = Callable[[Store, str], Part | None]
_Keep: TypeAlias = Callable[[Store, str, Mapping[str, Blob], dict[str, object]], Part]


class Maker:
    """Makes cells one after the other; what it has loaded for one may serve the next. With `force` it makes what is
    there as well, whose bytes must come out equal, and waits for nobody."""

    def __init__(
        self,
        store: Store,
        step: Step,
        say: Callable[[str], None],
        thresholds: Thresholds,
        *,
        force: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        self._store = store
        self._step = step
        self._say = say
        self._thresholds = thresholds
        self._force = force
        self._shelf = shelf or Shelf()

    def make(self, request: BuildRequest, shape: Shape) -> bool:
        """False: all of it was there."""
        backend = backend_of(request)
        front: Callable[[], Any] = cache(partial(backend.front, request, shape, self._step))

        def program() -> Made:
            return backend.program(request, shape, front(), self._store, self._step, force=self._force)

        def evidence() -> Made:
            materials = self._shelf.of(request, self._step)
            return backend.evidence(request, shape, front(), materials, self._store, self._step, self._thresholds)

        key = request.program_key(shape)
        made = self._part(key, program)
        if request.verified:
            key = request.evidence_key(shape, key)
            made = self._part(key, evidence, seen, keep_observation) or made
            self._insist(request, shape, key)
        return made

    def publish(self, request: BuildRequest, watch: Watch) -> Published:
        """The artifact, all of whose cells are there. No listing shows that a part has lost a blob: it is made anew."""
        tensors = self._shelf.of(request, self._step).tensors
        try:
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)
        except Incomplete:
            for shape in sorted(request.shapes):
                self.make(request, shape)
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)

    def _part(self, key: str, make: Callable[[], Made], find: _Find = part_of, keep: _Keep = keep_part) -> bool:
        if self._force:
            self._keep(key, make, keep)
            return True
        if self._is_known(key, find):
            return False
        with turn(self._store, key, self._say):
            if self._is_known(key, find):
                return False
            self._keep(key, make, keep)
            return True

    def _is_known(self, key: str, find: _Find) -> bool:
        if find(self._store, key) is not None:
            return True
        refuse_what_failed_before(self._store, key, self._thresholds)
        return False

    def _keep(self, key: str, make: Callable[[], Made], keep: _Keep) -> None:
        with remembering(self._store, key, self._thresholds):
            made = make()
        keep(self._store, key, made.files, dict(made.facts))

    def _insist(self, request: BuildRequest, shape: Shape, key: str) -> None:
        """What was observed first stands, and may have been within other thresholds than today's."""
        part = seen(self._store, key)
        if part is not None:
            insist(request.source.id, [compared(shape, part)], self._thresholds)


@dataclass(frozen=True)
class _Program:
    shape: Shape
    part: Part
    evidence: Part | None

    def executable(self) -> Executable:
        shape, facts = self.shape, self.part.facts
        return Executable.model_validate(
            {
                "name": shape.name,
                "phase": shape.phase,
                "batch": shape.batch,
                "sequence": shape.sequence,
                "tensor_parallel": facts["degree"],
                "graph_key": facts["graph_key"],
                "outputs": facts["outputs"],
                "blob": self.part.blob(PROGRAM),
            }
        )

    def files(self) -> dict[str, Blob]:
        """All that is kept beside the program."""
        return {file.path: file.blob for file in self.part.files if file.path != PROGRAM}


def publish(
    request: BuildRequest, tensors: "Tensors", store: Store, step: Step, watch: Watch, allowed: Thresholds
) -> Published:
    """Make the artifact visible; every cell of it has been made. What was found out about it is there before it is."""
    programs = [_parts_of(request, shape, store) for shape in sorted(request.shapes)]
    with step(f"store {len(tensors)} tensors"):
        size = sum(tensors.kinds[name].nbytes for name in tensors)
        with watch(f"store {request.source.id}", size) as sent:
            weights = put_weights(store.blobs, _elements(tensors), sent)
    with step("publish"):
        manifest = _manifest(request, programs, weights, store)
        if request.verified:
            store.attest(_evidence(request, programs, manifest, allowed))
        return store.publish(manifest)


def _evidence(request: BuildRequest, programs: list[_Program], manifest: Manifest, allowed: Thresholds) -> Evidence:
    found = tuple(compared(each.shape, each.evidence) for each in programs if each.evidence)
    insist(request.source.id, found, allowed)
    limits = Limits.model_validate(asdict(allowed))
    return Evidence(manifest=manifest.digest, kind=EMULATED, programs=found, limits=limits)


def _parts_of(request: BuildRequest, shape: Shape, store: Store) -> _Program:
    part = part_of(store, request.program_key(shape))
    evidence = seen(store, request.evidence_key(shape)) if request.verified else None
    if part is None or (request.verified and evidence is None):
        raise Incomplete(
            f"{request.source.id}: what was made for {shape.name} is no longer in {store.url}; "
            "run the same command again, which makes it anew"
        )
    return _Program(shape, part, evidence)


def _manifest(request: BuildRequest, programs: list[_Program], weights: tuple[Tensor, ...], store: Store) -> Manifest:
    source = request.source
    files: dict[str, Blob] = {}
    for program in programs:
        files |= program.files()
    figures: dict[str, Any] = {each.shape.name: each.part.facts.get("utilisation") for each in programs}
    if all(figures.values()):
        files[UTILISATION] = store.put_blob(utilisation_file(figures))
    if source.config:
        files["config.json"] = store.put_blob(canonical_json(source.relevant_config()))
    return Manifest(
        model=ModelRef(id=source.id, revision=source.revision, task=source.task),
        target=request.target.compiler_target,
        backend=request.backend,
        key_inputs=store.put_blob(canonical_json(request.key_inputs())),
        executables=tuple(program.executable() for program in programs),
        weights=weights,
        files=tuple(File(path=path, blob=files[path]) for path in sorted(files)),
    )


def _elements(tensors: "Tensors") -> Iterator[Elements]:
    """One after the other, so that no more of them are in memory than are stored at once."""
    import numpy as np

    for name in tensors:
        kind, elements = tensors.kinds[name], np.ascontiguousarray(tensors[name])
        yield Elements(name, str(kind.dtype), kind.shape, elements.reshape(-1).view(np.uint8).data)
