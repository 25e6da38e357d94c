"""Manifest of an artifact: every blob by digest. Section 4 of docs/reference/store-format.md."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Literal
from unicodedata import normalize

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from nxpipe.artifact_store.canonical import MAX_INTEGER, canonical_json, parse_canonical_json, sha256_hex
from nxpipe.artifact_store.documents import (
    Blob,
    Count,
    Digest,
    Document,
    ForeignName,
    Label,
    ModelId,
    Name,
    SafePath,
    Size,
    parse_document,
)
from nxpipe.artifact_store.errors import InvalidDocument, NotUnderstood
from nxpipe.artifact_store.names import short_name

_EARLIER: Final = ("nxpipe.manifest/1", "nxpipe.manifest/2")  # included evidence, which differs between machines

MAX_MANIFEST_BYTES: Final = 32 * 1024**2
MAX_KEY_INPUTS_BYTES: Final = 4 * 1024**2
MAX_EXECUTABLES: Final = 4096
MAX_WEIGHTS: Final = 200_000
MAX_FILES: Final = 10_000
MAX_OUTPUTS: Final = 10_000  # of one executable
MAX_PAYLOADS: Final = 64

# Bytes of one stored element.
WIDTHS: Final = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "tfloat32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
_RESERVED: Final = "__metadata__"


class Tensor(Document):
    """One weight: its elements in row-major order, little-endian. A small tensor is part of a pack."""

    name: Name
    dtype: Name
    # JSON has lists only; strictness still holds for the items.
    shape: tuple[Size, ...] = Field(strict=False, max_length=64)
    blob: Blob
    pack: Blob | None

    @model_validator(mode="after")
    def _is_consistent(self) -> "Tensor":
        """Checked here, so that no reader maps inconsistent weights into memory."""
        if self.name == _RESERVED:
            raise ValueError(f"no tensor may be called {_RESERVED}: the safetensors format reserves that name")
        width = WIDTHS.get(self.dtype)
        if width is None:
            raise ValueError(f"tensor {self.name!r} is of the unknown type {self.dtype!r}")
        extent = width * math.prod(length or 1 for length in self.shape)  # strides of an empty tensor must fit too
        size = 0 if 0 in self.shape else extent
        if extent > MAX_INTEGER:
            raise ValueError(f"tensor {self.name!r} of {list(self.shape)} is larger than {MAX_INTEGER} bytes")
        if size != self.blob.size:
            raise ValueError(
                f"tensor {self.name!r} of {self.dtype} {list(self.shape)} has {size} bytes, "
                f"and its blob has {self.blob.size}"
            )
        return self

    @property
    def stored(self) -> Blob:
        """The object that holds the tensor: its pack or its own blob."""
        return self.pack or self.blob


class DeviceProgram(Document):
    """A program for Neuron devices: the NEFF, the HloModuleProto that it was compiled from, and its interface."""

    neff: Blob
    module: Blob
    interface: Blob


class Executable(Document):
    """One compiled program with its fixed shapes. `blob` is the emulator's program, `device` that of Neuron devices,
    from the same graph. Documents without a device program do not have the field, as before it existed."""

    name: Name
    phase: Name
    batch: Count
    sequence: Count
    tensor_parallel: Count
    graph_key: Digest
    outputs: tuple[ForeignName, ...] = Field(strict=False, max_length=MAX_OUTPUTS)
    blob: Blob
    device: DeviceProgram | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return fields if self.device else {name: value for name, value in fields.items() if name != "device"}

    def blobs(self) -> tuple[Blob, ...]:
        device = self.device
        return (self.blob, device.neff, device.module, device.interface) if device else (self.blob,)


class File(Document):
    """A file of the model: configuration, graphs, tables."""

    path: SafePath
    blob: Blob


class SharedFile(Document):
    """A safetensors file of a payload: its header and its tensors in the file's order, which are stored as weights
    are, so that artifacts share them."""

    path: SafePath
    head: Blob
    tensors: tuple[Tensor, ...] = Field(strict=False, min_length=1, max_length=MAX_WEIGHTS)


class ServingPayload(Document):
    """Files for a serving runtime, byte for byte, and the contract under which it serves them."""

    name: Label
    contract: Blob
    files: tuple[File, ...] = Field(strict=False, max_length=MAX_FILES)
    shared: tuple[SharedFile, ...] = Field(strict=False, max_length=MAX_FILES)

    @model_validator(mode="after")
    def _is_consistent(self) -> "ServingPayload":
        paths = [*(file.path for file in self.files), *(file.path for file in self.shared)]
        _refuse_duplicates("file", paths)
        _refuse_equivalent_names("files", paths)
        _refuse_nested_files({_folded(path) for path in paths})
        return self

    def tensors(self) -> Iterable[Tensor]:
        return (tensor for file in self.shared for tensor in file.tensors)

    def blobs(self) -> tuple[Blob, ...]:
        heads = (file.head for file in self.shared)
        return (self.contract, *(file.blob for file in self.files), *heads, *(one.stored for one in self.tensors()))


class ModelRef(Document):
    id: ModelId
    revision: Name | None
    task: Name


class Manifest(Document):
    """One artifact. Equal inputs give equal bytes, so it holds no time, host or processor of the build.
    Results of its verification are evidence, in documents of their own."""

    format: Literal["nxpipe.manifest/3"] = "nxpipe.manifest/3"
    model: ModelRef
    target: Name
    backend: Name
    key_inputs: Blob
    executables: tuple[Executable, ...] = Field(strict=False, max_length=MAX_EXECUTABLES)
    weights: tuple[Tensor, ...] = Field(strict=False, max_length=MAX_WEIGHTS)
    files: tuple[File, ...] = Field(strict=False, max_length=MAX_FILES)
    serving: tuple[ServingPayload, ...] = Field(default=(), strict=False, max_length=MAX_PAYLOADS)

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return fields if self.serving else {name: value for name, value in fields.items() if name != "serving"}

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        if self.key_inputs.size > MAX_KEY_INPUTS_BYTES:
            raise ValueError(f"key inputs of {self.key_inputs.size} bytes are beyond {MAX_KEY_INPUTS_BYTES}")
        _refuse_duplicates("executable", (executable.name for executable in self.executables))
        _refuse_duplicates("weight", (tensor.name for tensor in self.weights))
        _refuse_duplicates("file", (file.path for file in self.files))
        _refuse_equivalent_names("executables", [executable.name for executable in self.executables])
        _refuse_equivalent_names("files", [file.path for file in self.files])
        _refuse_nested_files({_folded(file.path) for file in self.files})
        _refuse_duplicates("serving payload", (payload.name for payload in self.serving))
        every = {*self.blobs(), *(tensor.blob for tensor in self.tensors())}
        _refuse_duplicates("size of blob", (blob.sha256 for blob in every))
        return self

    @property
    def runs_on_devices(self) -> bool:
        """True if each program can be run by a Neuron device."""
        return bool(self.executables) and all(executable.device for executable in self.executables)

    @property
    def request_key(self) -> str:
        """The digest of the key inputs."""
        return self.key_inputs.sha256

    @property
    def name(self) -> str:
        return short_name(self.model.id, self.request_key)

    def tensors(self) -> Iterable[Tensor]:
        """The weights, and the tensors of the files of payloads."""
        yield from self.weights
        for payload in self.serving:
            yield from payload.tensors()

    def blobs(self) -> tuple[Blob, ...]:
        """Every distinct blob, in order of first mention."""
        named = (
            self.key_inputs,
            *(blob for executable in self.executables for blob in executable.blobs()),
            *(tensor.stored for tensor in self.weights),
            *(file.blob for file in self.files),
            *(blob for payload in self.serving for blob in payload.blobs()),
        )
        return tuple(dict.fromkeys(named))

    def to_bytes(self) -> bytes:
        data = canonical_json(self.model_dump())
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidDocument(
                f"the manifest of {self.model.id} has {len(data)} bytes, and at most {MAX_MANIFEST_BYTES} are allowed; "
                "split the artifact into fewer tensors"
            )
        return data

    @property
    def digest(self) -> str:
        return sha256_hex(self.to_bytes())

    def to_text(self) -> str:
        """Indented JSON, for people."""
        return json.dumps(self.model_dump(), ensure_ascii=False, sort_keys=True, indent=2) + "\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        fields = parse_canonical_json(data, limit=MAX_MANIFEST_BYTES)
        if isinstance(fields, dict) and fields.get("format") in _EARLIER:
            raise NotUnderstood(f"it is a {fields['format']}, published by an earlier nxpipe; build it again")
        if isinstance(fields, dict):
            if fields.get("serving") == []:
                raise NotUnderstood("serving: a manifest without payloads does not have the field")
            fields.setdefault("serving", [])
        return parse_document(cls, fields)


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} appears {count} times")


def _refuse_equivalent_names(what: str, names: Iterable[str]) -> None:
    """On some file systems names that differ in case or Unicode form are one file; a fetch would overwrite it."""
    originals: dict[str, str] = {}
    for name in names:
        other = originals.setdefault(_folded(name), name)
        if other != name:
            raise ValueError(
                f"{what} {other!r} and {name!r} are the same name on a file system that ignores case or Unicode form"
            )


def _folded(name: str) -> str:
    """Unicode's canonical caseless matching."""
    return normalize("NFD", normalize("NFD", name).casefold())


def _refuse_nested_files(paths: set[str]) -> None:
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in paths:
                raise ValueError(f"file {path!r} lies below another file of the manifest")
