"""Serving payloads in a store: the files of a draft as blobs, safetensors by tensor, and the artifact that names them.

Equal folders give equal manifests, so an import can be repeated.
"""

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from pydantic import ValidationError

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.fetch.folder import files_of
from nxpipe.artifact_store.manifest import File, Manifest, ModelRef, ServingPayload, SharedFile, Tensor
from nxpipe.artifact_store.weights import Elements, put_weights
from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.artifacts.contract import (
    FileTree,
    Runtime,
    ServingContract,
    TreeFile,
    fetched_manifest,
    own_contract,
)
from nxpipe.pipeline.artifacts.recipes import Draft, DraftTree, ImportRequest
from nxpipe.pipeline.artifacts.runtime_folder import Content, safetensors_header
from nxpipe.pipeline.util.errors import ModelSourceError

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store

_FORMAT: Final = "nxpipe.import/1"  # of the key inputs
_BACKEND: Final = "neuronx"  # whose programs Neuron devices run
_CHUNK: Final = 1024**2


@dataclass(frozen=True)
class Imported:
    """A published import."""

    published: "Published"
    contract: ServingContract
    files: int
    bytes_in_files: int


def publish_draft(store: "Store", draft: Draft) -> Imported:
    """Store the files of a draft and publish its artifact."""
    stored = {tree.name: _stored_files(store, tree) for tree in draft.trees}
    with _refusal(draft.request.folder):
        contract = _contract(draft, tuple(_file_tree(tree, stored[tree.name]) for tree in draft.trees))
        payload = _payload(store, contract, stored)
        model = ModelRef(id=draft.model_id, revision=None, task=draft.task)
        inputs = {"format": _FORMAT, "model": model.model_dump(), "contract": contract.model_dump()}
        manifest = Manifest(
            model=model,
            target=draft.target,
            backend=_BACKEND,
            key_inputs=store.put_blob(canonical_json(inputs)),
            executables=(),
            weights=(),
            files=(),
            serving=(payload,),
        )
    files = [file for tree in stored.values() for file in tree.values()]
    return Imported(store.publish(manifest), contract, len(files), sum(file.size for file in files))


@contextmanager
def _refusal(folder: Path) -> Iterator[None]:
    """The first fault of a document, such as a path that no store may hold, as one sentence about the folder."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        reason = str(fault["msg"]).removeprefix("Value error, ")
        raise ModelSourceError(
            f"{folder}: cannot be imported: {reason}; change the name, or leave the file out"
        ) from None


def _file_tree(tree: DraftTree, stored: "Mapping[str, _StoredFile]") -> FileTree:
    files = tuple(TreeFile(path=path, sha256=file.sha256, size=file.size) for path, file in stored.items())
    return FileTree(name=tree.name, destination=tree.destination, runtime_writes=tree.runtime_writes, files=files)


def _payload(
    store: "Store", contract: ServingContract, stored: "Mapping[str, Mapping[str, _StoredFile]]"
) -> ServingPayload:
    files = [(f"{tree}/{path}", file) for tree, of_tree in stored.items() for path, file in of_tree.items()]
    return ServingPayload(
        name=contract.name,
        contract=store.put_blob(contract.to_bytes()),
        files=tuple(File(path=path, blob=file.blob) for path, file in files if file.blob),
        shared=tuple(
            SharedFile(path=path, head=file.shared[0], tensors=file.shared[1]) for path, file in files if file.shared
        ),
    )


def publish_own(store: "Store", request: ImportRequest) -> Imported:
    """Publish a fetched artifact of our own with a contract that pins versions. Its programs are those in the store."""
    base = fetched_manifest(request.folder)
    contract = next(own_contract(base, request.pins), None)
    if contract is None:
        raise ModelSourceError(f"{request.folder}: its artifact has no programs; import what it was made from")
    if store.find(base.request_key) is None:
        raise ModelSourceError(
            f"{request.folder}: {store.url} does not hold {base.name}; "
            "copy it with nxpipe store export and nxpipe store import first"
        )
    files = files_of(base)
    for path, blob in files.items():
        if _sha256(request.folder / path) != blob.sha256:
            raise ModelSourceError(f"{request.folder / path}: is missing or changed; run nxpipe store fetch again")
    contract = ServingContract.from_bytes(contract.model_copy(update={"name": request.name or "nxpipe"}).to_bytes())
    payload = ServingPayload(name=contract.name, contract=store.put_blob(contract.to_bytes()), files=(), shared=())
    inputs = {"format": _FORMAT, "artifact": base.digest, "contract": contract.model_dump()}
    update = {"key_inputs": store.put_blob(canonical_json(inputs)), "serving": (payload,)}
    published = store.publish(Manifest.from_bytes(base.model_copy(update=update).to_bytes()))
    return Imported(published, contract, len(files), sum(blob.size for blob in files.values()))


def _contract(draft: Draft, trees: tuple[FileTree, ...]) -> ServingContract:
    return ServingContract(
        name=draft.request.name or draft.request.runtime,
        runtime=cast(Runtime, draft.request.runtime),
        target=draft.target,
        lnc=draft.lnc,
        tp=draft.tp,
        cores=draft.tp,
        pins=dict(draft.pins),
        trees=trees,
        environment=dict(draft.environment),
        argv=draft.argv,
        forbidden=draft.forbidden,
        proves=draft.proves,
        disproves=draft.disproves,
        progress=draft.progress,
    )


@dataclass(frozen=True)
class _StoredFile:
    """A file in the store: a blob, or its header and tensors."""

    sha256: str
    size: int
    blob: Blob | None = None
    shared: tuple[Blob, tuple[Tensor, ...]] | None = None


def _stored_files(store: "Store", tree: DraftTree) -> dict[str, _StoredFile]:
    return {path: _stored(store, content) for path, content in tree.files.items()}


def _stored(store: "Store", content: Content) -> _StoredFile:
    if isinstance(content, bytes):
        blob = store.put_blob(content)
        return _StoredFile(blob.sha256, blob.size, blob=blob)
    try:
        if content.name.endswith(".safetensors") and (shared := _put_shared(store, content)):
            return shared
        with open_regular(content) as file:
            blob = store.put_stream(iter(lambda: file.read(_CHUNK), b""))
    except OSError as failed:
        raise ModelSourceError(f"{content}: cannot be read ({failed.strerror}); correct its mode") from failed
    return _StoredFile(blob.sha256, blob.size, blob=blob)


def _put_shared(store: "Store", path: Path) -> _StoredFile | None:
    """Store a safetensors file by tensor; None for one whose bytes do not follow from its header and tensors."""
    size, entries = safetensors_header(path)
    gapless = all(one.end == following.start for one, following in pairwise(entries))
    if not entries or entries[0].start or not gapless or not all(entry.is_whole for entry in entries):
        return None
    with open_regular(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last view of it
    data = memoryview(mapped)
    elements = [
        Elements(one.name, str(one.dtype), one.shape, data[size + one.start : size + one.end]) for one in entries
    ]
    try:
        tensors = put_weights(store.blobs, elements)
        shared = SharedFile(path="file", head=store.put_blob(data[:size]), tensors=tensors)
    except (ValidationError, InvalidDocument):  # a name that no manifest may hold
        return None
    return _StoredFile(hashlib.sha256(data).hexdigest(), len(data), shared=(shared.head, tensors))


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
