"""The walk of one model: key, capture, passes, evidence, publish.

A request whose artifact the store holds stops at the first step, before numpy or torch is imported; one that failed
for good stops there too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifact_store import Published, Store
from artifact_store.backends.protocol import Sent, nobody
from artifact_store.canonical import canonical_json
from artifact_store.digest import sha256_hex
from artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from artifact_store.weights import Elements, put_weights
from pipeline.backends.made import Backend, Made, MadeProgram
from pipeline.evidence import Step
from pipeline.failed import refuse_what_failed_before, remembering
from pipeline.nearness import why_missed
from pipeline.request import BuildRequest
from pipeline.turn import turn
from pipeline.verify import Thresholds

if TYPE_CHECKING:
    from pipeline.models.weights import Tensors


# Told what is stored, and of how many bytes; tells of those that went out.
Watch = Callable[[str, int], AbstractContextManager[Sent]]


def unwatched(_: str, __: int) -> AbstractContextManager[Sent]:
    return nullcontext(nobody)


@dataclass(frozen=True)
class Built:
    published: Published
    cached: bool


def build(
    request: BuildRequest,
    store: Store,
    step: Step,
    say: Callable[[str], None],
    *,
    thresholds: Thresholds,
    force: bool = False,
    watch: Watch = unwatched,
) -> Built:
    """Publish the artifact of this request, or find it published.

    `force` builds whatever the store knows, and whoever else is at it.
    """
    request.check()
    inputs = request.key_inputs()
    key = sha256_hex(canonical_json(inputs))
    if force:
        with remembering(store, key, thresholds):
            return Built(_built(request, inputs, store, step, thresholds, watch), cached=False)
    if found := _known(store, key, thresholds):
        return found
    if hint := why_missed(store, inputs):
        say(hint)
    with turn(store, key, say):
        if found := _known(store, key, thresholds):
            return found
        with remembering(store, key, thresholds):
            return Built(_built(request, inputs, store, step, thresholds, watch), cached=False)


def _known(store: Store, key: str, thresholds: Thresholds) -> Built | None:
    """What became of this request before: its artifact, or the failure that it would end in again."""
    found = store.find(key)
    if found is not None:
        return Built(found, cached=True)
    refuse_what_failed_before(store, key, thresholds)
    return None


def _built(
    request: BuildRequest, inputs: dict[str, object], store: Store, step: Step, thresholds: Thresholds, watch: Watch
) -> Published:
    with step(f"read the configuration of {request.source.id}"):
        tensors = request.tensors()
    made = _backend(request)(request, tensors, step, thresholds)
    with step(f"store {len(tensors)} tensors"):
        size = sum(tensors.kinds[name].nbytes for name in tensors)
        with watch(f"store {request.source.id}", size) as sent:
            weights = put_weights(store.blobs, _elements(tensors), sent)
    with step("publish"):
        return store.publish(_manifest(request, inputs, made, weights, store))


def _backend(request: BuildRequest) -> Backend:
    if request.backend == "neuronx":
        from pipeline.backends.neuronx.compile import neffs

        return neffs
    from pipeline.backends.emulator import emulated

    return emulated


def _manifest(
    request: BuildRequest, inputs: dict[str, object], made: Made, weights: tuple[Tensor, ...], store: Store
) -> Manifest:
    """Store what is not stored yet, and name everything by its digest."""
    source = request.source
    files = dict(made.files)
    if source.config:
        files["config.json"] = canonical_json(source.relevant_config())
    return Manifest(
        model=ModelRef(id=source.id, revision=source.revision, task=source.task),
        target=request.target.compiler_target,
        backend=request.backend,
        key_inputs=store.put_blob(canonical_json(inputs)),
        executables=tuple(_executable(program, store) for program in made.programs),
        weights=weights,
        files=tuple(File(path=path, blob=store.put_blob(content)) for path, content in files.items()),
        report=dict(made.report),
    )


def _executable(program: MadeProgram, store: Store) -> Executable:
    shape = program.shape
    return Executable(
        name=shape.name,
        phase=shape.phase,
        batch=shape.batch,
        sequence=shape.sequence,
        tensor_parallel=program.degree,
        graph_key=program.graph_key,
        blob=store.put_blob(program.code),
    )


def _elements(tensors: "Tensors") -> Iterator[Elements]:
    """One after the other, so that no more of them are in memory than are stored at once."""
    import numpy as np

    for name in tensors:
        kind, elements = tensors.kinds[name], np.ascontiguousarray(tensors[name])
        yield Elements(name, str(kind.dtype), kind.shape, elements.reshape(-1).view(np.uint8).data)
