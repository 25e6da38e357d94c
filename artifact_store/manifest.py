"""What one artifact is: a manifest that names every blob by digest. Section 4 of docs/store-format.md.

The models are strict: a reader that guesses what a malformed manifest means is a reader that can be steered.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from artifact_store.canonical import MAX_INTEGER, canonical_json, parse_canonical_json
from artifact_store.digest import sha256_hex
from artifact_store.errors import InvalidDocument, NotUnderstood

MAX_MANIFEST_BYTES: Final = 32 * 1024**2
MAX_MODEL_ID_BYTES: Final = 200
MAX_PATH_BYTES: Final = 1024
MAX_PATH_PART_BYTES: Final = 255
MAX_EXECUTABLES: Final = 4096
MAX_WEIGHTS: Final = 200_000
MAX_FILES: Final = 10_000


def _safe_path(path: str) -> str:
    """A relative path that stays below the folder it is joined to, on every operating system."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        raise ValueError(f"{path!r} is not a plain relative path")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_PATH_PART_BYTES for part in parts):
        raise ValueError(f"a path of {len(path)} characters is too long")
    return path


def _model_id(text: str) -> str:
    """The id becomes a folder's name in the listing."""
    if len(text.encode()) > MAX_MODEL_ID_BYTES:
        raise ValueError(f"a model id of {len(text)} characters is too long")
    return _safe_path(text)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} holds control characters")
    return text


def _json_object(value: dict[str, object]) -> dict[str, object]:
    canonical_json(value)
    return value


Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Name = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_printable)]
SafePath = Annotated[str, AfterValidator(_safe_path)]
ModelId = Annotated[str, AfterValidator(_model_id)]
JsonObject = Annotated[dict[str, object], AfterValidator(_json_object)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Size = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


T = TypeVar("T", bound="Document")


class Document(BaseModel):
    """Frozen, no unknown fields, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Blob(Document):
    """Bytes, by their digest."""

    sha256: Digest
    size: Size

    @classmethod
    def of(cls, data: bytes | memoryview) -> "Blob":
        return cls(sha256=sha256_hex(data), size=len(data))


class Tensor(Document):
    """One weight; its blob holds the elements in row-major order, little-endian."""

    name: Name
    dtype: Name
    # JSON has lists only; strictness still holds for the items.
    shape: tuple[Size, ...] = Field(strict=False, max_length=64)
    blob: Blob


class Executable(Document):
    """One compiled program, with the shapes that it is fixed to."""

    name: Name
    phase: Name
    batch: Count
    sequence: Count
    tensor_parallel: Count
    graph_key: Digest
    blob: Blob


class File(Document):
    """A file that travels with the model: tokenizer, configuration, golden outputs."""

    path: SafePath
    blob: Blob


class ModelRef(Document):
    id: ModelId
    revision: Name | None
    task: Name


class Manifest(Document):
    """One artifact. Equal inputs give equal bytes, so nothing here tells when or where it was made."""

    format: Literal["nxpipe.manifest/1"] = "nxpipe.manifest/1"
    model: ModelRef
    target: Name
    backend: Name
    request_key: Digest
    key_inputs: JsonObject
    executables: tuple[Executable, ...] = Field(strict=False, max_length=MAX_EXECUTABLES)
    weights: tuple[Tensor, ...] = Field(strict=False, max_length=MAX_WEIGHTS)
    files: tuple[File, ...] = Field(strict=False, max_length=MAX_FILES)
    report: JsonObject

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        if sha256_hex(canonical_json(self.key_inputs)) != self.request_key:
            raise ValueError("request_key is not the SHA-256 of the canonical JSON of key_inputs")
        _refuse_twins("executable", (executable.name for executable in self.executables))
        _refuse_twins("weight", (tensor.name for tensor in self.weights))
        _refuse_twins("file", (file.path for file in self.files))
        _refuse_files_that_are_folders({file.path for file in self.files})
        _refuse_twins("size of blob", (blob.sha256 for blob in self.blobs()))
        return self

    def blobs(self) -> tuple[Blob, ...]:
        """Every distinct blob, in the order of first mention."""
        owners: tuple[Executable | Tensor | File, ...] = (*self.executables, *self.weights, *self.files)
        return tuple(dict.fromkeys(owner.blob for owner in owners))

    def to_bytes(self) -> bytes:
        data = canonical_json(self.model_dump())
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidDocument(
                f"the manifest of {self.model.id} has {len(data)} bytes, and at most {MAX_MANIFEST_BYTES} are allowed; "
                "split the artifact into fewer tensors or shorter reports"
            )
        return data

    def to_text(self) -> str:
        """The same, for people."""
        return json.dumps(self.model_dump(), ensure_ascii=False, sort_keys=True, indent=2) + "\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        return parse_document(cls, parse_canonical_json(data, limit=MAX_MANIFEST_BYTES))


def parse_document(kind: type[T], value: object) -> T:
    """A parsed value as a document, or the first fault in one sentence. A reader assumes no defaults."""
    try:
        document = kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in fault["loc"]) or kind.__name__
        raise NotUnderstood(f"{where}: {fault['msg']}") from None
    for name in kind.model_fields.keys() - document.model_fields_set:
        raise NotUnderstood(f"{name}: Field required")
    return document


def _refuse_twins(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} appears {count} times")


def _refuse_files_that_are_folders(paths: set[str]) -> None:
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in paths:
                raise ValueError(f"file {path!r} lies below another file of the manifest")
