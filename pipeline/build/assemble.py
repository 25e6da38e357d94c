"""An artifact put together from the parts of its programs: the same bytes, whoever made them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.builds import StepResult, observed, step_result
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Incomplete
from nxpipe.artifact_store.evidence import EMULATED, Evidence, Limits
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from nxpipe.artifact_store.weights import Elements, put_weights
from nxpipe.pipeline.compile.artifact_files import UTILISATION
from nxpipe.pipeline.compile.made import PROGRAM, compared
from nxpipe.pipeline.compile.utilisation import to_bytes as utilisation_file
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.progress import Watch
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.judged import insist
from nxpipe.pipeline.verify.verify import Thresholds

if TYPE_CHECKING:
    from nxpipe.pipeline.models.weights import Tensors


@dataclass(frozen=True)
class _Program:
    shape: Shape
    part: StepResult
    evidence: StepResult | None

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
    part = step_result(store, request.program_key(shape))
    evidence = observed(store, request.evidence_key(shape)) if request.verified else None
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
