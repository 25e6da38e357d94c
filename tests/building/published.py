"""Artifacts that a build would find, without building any: real keys, next to no content."""

from collections.abc import Iterator
from pathlib import Path

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Executable, Manifest, ModelRef
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.models.spec import specs_of_config
from tests.artifact_store.samples import evidence


def publish_all(folder: Path) -> None:
    """All that nxpipe.toml describes; without the flushes to the disk, which would take minutes for thousands."""
    store = open_store(f"file://{folder}/store")
    config = load_config(folder / "nxpipe.toml", {})
    for asked in specs_of_config(config, (), folder):
        request = BuildSpec.of(asked)
        manifest = Manifest(
            model=ModelRef(id=request.source.id, revision=None, task=request.source.task),
            target=request.target.compiler_target,
            backend=request.backend,
            key_inputs=store.put_blob(canonical_json(request.key_inputs())),
            executables=tuple(_programs(request, store.put_blob(b"program"))),
            weights=(),
            files=(),
        )
        store.records.create(evidence(store, manifest))
        store.records.create(ActionRecord.of(manifest, store.put_blob(manifest.to_bytes())))


def _programs(request: BuildSpec, program: Blob) -> Iterator[Executable]:
    for shape in sorted(request.shapes):
        yield Executable(
            name=shape.name,
            phase=shape.phase,
            batch=shape.batch,
            sequence=shape.sequence,
            tensor_parallel=request.tensor_parallel,
            graph_key=program.sha256,
            outputs=("logits",),
            blob=program,
        )
