"""The walk of one model: key, capture, passes, evidence, publish.

A request whose artifact the store holds stops at the first step, before numpy or torch is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifact_store import Published, Store
from artifact_store.canonical import canonical_json
from artifact_store.digest import sha256_hex
from artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from pipeline.evidence import NO_EVIDENCE, Evidence, Step, gather
from pipeline.request import BuildRequest, Shape
from pipeline.verify import Thresholds

if TYPE_CHECKING:
    from emulator.graph import Graph
    from pipeline.models.weights import Tensors


@dataclass(frozen=True)
class Built:
    published: Published
    cached: bool


def build(
    request: BuildRequest, store: Store, step: Step, *, thresholds: Thresholds | None, force: bool = False
) -> Built:
    """Publish the artifact of this request, or find it published. `thresholds` of None skips the comparison."""
    request.check()
    inputs = request.key_inputs()
    found = None if force else store.find(sha256_hex(canonical_json(inputs)))
    if found is not None:
        return Built(found, cached=True)
    tensors = _tensors(request, step)
    programs = {shape: _compile(request, shape, step) for shape in sorted(request.shapes)}
    evidence = gather(request, programs, tensors, step, thresholds) if thresholds else NO_EVIDENCE
    with step(f"store {len(tensors)} tensors"):
        weights = tuple(_store_tensor(name, tensors, store) for name in tensors)
    with step("publish"):
        return Built(store.publish(_manifest(request, inputs, programs, weights, evidence, store)), cached=False)


def _tensors(request: BuildRequest, step: Step) -> "Tensors":
    """The weights that the model asks for; nothing of them is loaded yet."""
    from emulator.capture import parameter_specs
    from pipeline.models.weights import Tensors

    with step(f"read the configuration of {request.source.id}"):
        return Tensors(request.weights, parameter_specs(request.capture(request.shapes[0])))


def _compile(request: BuildRequest, shape: Shape, step: Step) -> "Graph":
    """One program, through all of the compiler's front end."""
    from emulator.compile import compile_graph
    from emulator.passes import PassOptions

    with step(f"compile {shape.name}"):
        options = PassOptions(request.autocast, request.autocast_type, request.target.compiler_target)
        return compile_graph(request.capture(shape), options)


def _manifest(
    request: BuildRequest,
    inputs: dict[str, object],
    programs: Mapping[Shape, "Graph"],
    weights: tuple[Tensor, ...],
    evidence: Evidence,
    store: Store,
) -> Manifest:
    """Store what is not stored yet, and name everything by its digest."""
    source = request.source
    files = {"config.json": canonical_json(source.relevant_config()), **evidence.golden}
    return Manifest(
        model=ModelRef(id=source.id, revision=source.revision, task=source.task),
        target=request.target.compiler_target,
        backend="emulator",
        request_key=sha256_hex(canonical_json(inputs)),
        key_inputs=inputs,
        executables=tuple(_executable(request, shape, graph, store) for shape, graph in programs.items()),
        weights=weights,
        files=tuple(File(path=path, blob=store.put_blob(content)) for path, content in files.items()),
        report=dict(evidence.report),
    )


def _executable(request: BuildRequest, shape: Shape, graph: "Graph", store: Store) -> Executable:
    return Executable(
        name=shape.name,
        phase=shape.phase,
        batch=shape.batch,
        sequence=shape.sequence,
        tensor_parallel=request.tensor_parallel,
        graph_key=graph.key,
        blob=store.put_blob(graph.to_bytes()),
    )


def _store_tensor(name: str, tensors: "Tensors", store: Store) -> Tensor:
    import numpy as np

    kind, elements = tensors.kinds[name], np.ascontiguousarray(tensors[name])
    blob = store.put_blob(elements.reshape(-1).view(np.uint8).data)
    return Tensor(name=name, dtype=str(kind.dtype), shape=kind.shape, blob=blob)
