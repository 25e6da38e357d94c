"""How many bytes a store holds, for which models, and how much of it is shared or orphaned."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.maintenance.reachability import History, find_roots, mark, orphans
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.store import Store


@dataclass(frozen=True)
class ModelUsage:
    """`logical` counts each artifact as if it were alone; `stored` each blob once; `own` those of no other model."""

    model_id: str
    artifacts: int
    logical: int
    stored: int
    own: int


@dataclass(frozen=True)
class Usage:
    models: tuple[ModelUsage, ...]
    logical: int
    artifacts_stored: int  # each blob once, whatever the number of models that share it
    shared: int  # of these, those that several models need
    orphans: int
    orphaned: int
    objects: int
    stored: int  # everything, records and listings too


def usage(store: Store) -> Usage:
    now = store.backend.now()
    listed = list(store.backend.walk(""))
    blobs: dict[str, dict[str, int]] = {}
    owners: dict[str, str] = {}  # the model of each manifest
    artifacts: Counter[str] = Counter()
    logical: Counter[str] = Counter()

    def add(model: str, named: Collection[Blob]) -> None:
        logical[model] += sum(blob.size for blob in named)
        blobs.setdefault(model, {}).update((blob.sha256, blob.size) for blob in named)

    def count(manifest: Manifest, document: Blob) -> None:
        owners[document.sha256] = manifest.model.id
        artifacts[manifest.model.id] += 1
        add(manifest.model.id, (document, *manifest.blobs()))

    reach = mark(store, listed, find_roots(store, History(), now), now, visit=count)
    for manifest, documents in reach.evidence.items():
        if manifest in owners:
            add(owners[manifest], {blob for each in documents for blob in each.blobs()})
    users = Counter(digest for each in blobs.values() for digest in each)
    sizes = {digest: size for each in blobs.values() for digest, size in each.items()}
    loose = orphans(listed, reach)
    return Usage(
        models=tuple(
            ModelUsage(
                model_id=model,
                artifacts=artifacts[model],
                logical=logical[model],
                stored=sum(each.values()),
                own=sum(size for digest, size in each.items() if users[digest] == 1),
            )
            for model, each in sorted(blobs.items())
        ),
        logical=logical.total(),
        artifacts_stored=sum(sizes.values()),
        shared=sum(size for digest, size in sizes.items() if users[digest] > 1),
        orphans=len(loose),
        orphaned=sum(found.size for found in loose),
        objects=len(listed),
        stored=sum(found.size for found in listed),
    )
