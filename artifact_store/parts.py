"""What was made of one question, so that nobody makes it twice: blobs and facts under the question's key.

An artifact is put together from its parts. Section 18 of docs/store-format.md.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.documents import Blob, Digest, Document, JsonObject, SafePath, Sealed, WriteId
from nxpipe.artifact_store.errors import Conflict, Incomplete, NotFound
from nxpipe.artifact_store.index.leaves import differences
from nxpipe.artifact_store.layout import blob_path, part_path
from nxpipe.artifact_store.store import Store

MAX_PART_BYTES: Final = 1024**2

_NAMED: Final = 3  # differences that a conflict names


class PartFile(Document):
    path: SafePath
    blob: Blob


class Part(Sealed):
    max_bytes: ClassVar[int] = MAX_PART_BYTES

    format: Literal["nxpipe.part/1"] = "nxpipe.part/1"
    key: Digest
    files: tuple[PartFile, ...] = Field(strict=False)
    facts: JsonObject
    write_id: WriteId

    @model_validator(mode="after")
    def _has_one_order(self) -> "Part":
        paths = [file.path for file in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("the paths of its files do not ascend, each once")
        return self

    @property
    def path(self) -> str:
        return part_path(self.key)

    def blobs(self) -> tuple[Blob, ...]:
        """Every distinct one, in the order of first mention."""
        return tuple(dict.fromkeys(file.blob for file in self.files))

    def blob(self, path: str) -> Blob:
        for file in self.files:
            if file.path == path:
                return file.blob
        held = ", ".join(file.path for file in self.files) or "none"
        raise NotFound(f"part {self.key} holds no file {path!r}; its files are: {held}")

    @property
    def result(self) -> str:
        """The digest of what was made, whoever made it."""
        return sha256_hex(canonical_json(self.model_dump(include={"files", "facts"})))


def part_of(store: Store, key: str) -> Part | None:
    """What was made, for whoever is about to use it: its blobs are intact, and are kept from being collected.

    Where one is missing or damaged the answer is None; who then makes the part again repairs it.
    """
    part = store.records.read(Part, part_path(key))
    return part if part and _is_kept(store, part) else None


def keep_part(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> Part:
    """After its blobs are stored. Another result for the same key is a conflict, as it is for an artifact."""
    part = _proved(store, key, files, facts)
    winner = store.records.create_or_read(part)
    if winner.result != part.result:
        raise Conflict(f"part {key}", winner.result, part.result, store.url, _difference(winner, part))
    return winner


def _proved(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> Part:
    """A part to be created, all of whose blobs are there, young and durable."""
    named = tuple(PartFile(path=path, blob=files[path]) for path in sorted(files))
    part = Part(key=key, files=named, facts=facts, write_id=secrets.token_hex(16))
    for blob, fault in store.blobs.settle(part.blobs(), sent_by_us=True):
        raise Incomplete(
            f"cannot keep part {key}: blob {blob.sha256} of {blob.size} bytes {fault} in {store.url}; "
            "put every blob before the part that names it"
        )
    store.backend.make_durable(blob_path(blob) for blob in part.blobs())
    return part


def seen(store: Store, key: str) -> Part | None:
    """What was observed under a key, intact: for what another machine would not find to the bit."""
    return next((part for part in _observations(store, key) if _is_kept(store, part)), None)


def keep_observation(store: Store, key: str, files: Mapping[str, Blob], facts: dict[str, object]) -> Part:
    """After its blobs are stored. What was observed first stands, and another result is no conflict.

    Where a blob of it is lost, no second observation brings that back: it gets the key that follows.
    """
    if (part := seen(store, key)) is not None:
        return part
    for lost in _observations(store, key):
        key = _following(lost.key)
    part = _proved(store, key, files, facts)
    return store.records.create_or_read(part)


def _observations(store: Store, key: str) -> Iterator[Part]:
    while (part := store.records.read(Part, part_path(key))) is not None:
        yield part
        key = _following(key)


def _following(key: str) -> str:
    return sha256_hex(canonical_json({"after": key}))


def _is_kept(store: Store, part: Part) -> bool:
    return all(store.backend.each(store.blobs.is_kept, part.blobs()))


def _difference(before: Part, after: Part) -> str:
    paths = [each.path for each in differences(_named(before), _named(after))]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"


def _named(part: Part) -> dict[str, object]:
    return {"facts": part.facts, "files": {file.path: file.blob.sha256 for file in part.files}}
