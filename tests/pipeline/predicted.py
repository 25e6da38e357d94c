"""Artifacts whose programs contain their predicted duration, without a compiler."""

import json
from collections.abc import Mapping

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from nxpipe.artifact_store.weights import Elements, put_weights
from nxpipe.emulator.ir.graph import Graph
from tests.artifact_store.samples import publish_verified

MODEL = "acme/tiny-bert"


def publish(
    store: Store,
    note: str,
    milliseconds: Mapping[int, float | None],
    *,
    model: str = MODEL,
    target: str = "inf2",
    phase: str = "forward",
    degree: int = 1,
    inputs: Mapping[str, object] | None = None,
    graph: Graph | None = None,
    weights: Mapping[str, Elements] | None = None,
) -> Published:
    """One program for each bucket. All other content depends on the note."""
    figures = {
        f"{phase}-b1-s{bucket}": {
            "time": {"latency_ns": None if ms is None else ms * 1e6},
            "instructions": {"static": 100 + len(note), "carried_out": 1000, "by_engine": {"tensor": {}}},
            "hbm": {"compulsory": {"input": 16_000, "output": 1_600_000}},
            "footprint": {"code": 4096},
        }
        for bucket, ms in milliseconds.items()
    }
    files = {"utilisation.json": json.dumps(figures).encode()}
    if graph is not None:
        files |= {f"graphs/{name}": graph.to_bytes() for name in figures}
    tensors: tuple[Tensor, ...] = put_weights(store.blobs, (weights or {}).values())
    return publish_verified(
        store,
        Manifest(
            model=ModelRef(id=model, revision=None, task="fill-mask"),
            target=target,
            backend="emulator",
            key_inputs=store.put_blob(canonical_json(dict(inputs or {"note": note, "target": target}))),
            executables=tuple(
                Executable(
                    name=f"{phase}-b1-s{bucket}",
                    phase=phase,
                    batch=1,
                    sequence=bucket,
                    tensor_parallel=degree,
                    graph_key=graph.key if graph else "0" * 64,
                    outputs=("logits",),
                    blob=store.put_blob(f"{note} {bucket}".encode()),
                )
                for bucket in milliseconds
            ),
            weights=tensors,
            files=tuple(File(path=path, blob=store.put_blob(data)) for path, data in sorted(files.items())),
        ),
    )


def name_of(one: Published) -> str:
    return f"{one.model_id}@{one.request_key[:12]}"
