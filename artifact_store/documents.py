"""Document base class: strict fields, canonical JSON, and a seal for documents whose path is not their digest.

The models are strict: a reader that guesses the meaning of a malformed document could be exploited.
"""

from abc import abstractmethod
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Final, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from nxpipe.artifact_store.canonical import MAX_INTEGER, canonical_json, parse_canonical_json, sha256_hex
from nxpipe.artifact_store.errors import InvalidDocument, NotUnderstood

MAX_MODEL_ID_BYTES: Final = 200
MAX_PATH_BYTES: Final = 1024
MAX_PATH_PART_BYTES: Final = 255
MAX_RECORD_BYTES: Final = 16 * 1024

_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


def _safe_path(path: str) -> str:
    """A relative path that stays below the folder it is joined to, on every operating system."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        raise ValueError(f"{path!r} is not a plain relative path")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_PATH_PART_BYTES for part in parts):
        raise ValueError(f"a path of {len(path)} characters is too long")
    return path


def _model_id(text: str) -> str:
    """A safe path, because the id becomes a folder name in the listing."""
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


def _time(text: str) -> str:
    seconds_since_1970(text)
    return text


Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
WriteId = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
Label = Annotated[str, Field(pattern=r"\A[a-z0-9][a-z0-9-]{0,62}\z")]
Name = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_printable)]
# A name from a model's file, unchanged: it may hold control characters, which are escaped on display.
ForeignName = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
SafePath = Annotated[str, AfterValidator(_safe_path)]
ModelId = Annotated[str, AfterValidator(_model_id)]
JsonObject = Annotated[dict[str, object], AfterValidator(_json_object)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Size = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Time = Annotated[str, Field(pattern=r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\z"), AfterValidator(_time)]

T = TypeVar("T", bound="Document")


class Document(BaseModel):
    """Frozen, no unknown fields, no coercion."""

    # Validators are built on first use: a command pays only for the documents that it reads.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Blob(Document):
    """Reference to immutable bytes by digest and size."""

    sha256: Digest
    size: Size

    @classmethod
    def of(cls, data: bytes | memoryview) -> "Blob":
        return cls(sha256=sha256_hex(data), size=len(data))


class Sealed(Document):
    """A document whose path is not the digest of its bytes; it holds a digest of itself, the seal."""

    max_bytes: ClassVar[int] = MAX_RECORD_BYTES

    @property
    @abstractmethod
    def path(self) -> str:
        """The only valid path of this document in a store."""

    def to_bytes(self) -> bytes:
        fields = self.model_dump()
        data = canonical_json(fields | {"seal": sha256_hex(canonical_json(fields))})
        if len(data) > self.max_bytes:
            raise InvalidDocument(
                f"cannot write a {type(self).__name__} of {len(data)} bytes: at most {self.max_bytes} are "
                "allowed; shorten its texts"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        fields = parse_canonical_json(data, limit=cls.max_bytes)
        if not isinstance(fields, dict):
            raise InvalidDocument("it is not a JSON object")
        seal = fields.pop("seal", None)
        if seal != sha256_hex(canonical_json(fields)):
            raise InvalidDocument("its seal does not match its content")
        return parse_document(cls, fields)


def parse_document(kind: type[T], value: object) -> T:
    """The document of a parsed value; NotUnderstood names the first fault. No field gets a default."""
    try:
        document = kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in fault["loc"]) or kind.__name__
        raise NotUnderstood(f"{where}: {fault['msg']}") from None
    for name in kind.model_fields.keys() - document.model_fields_set:
        raise NotUnderstood(f"{name}: Field required")
    return document


def written_now() -> str:
    """The current time of this machine's clock, for people to read."""
    return as_time(datetime.now(UTC).timestamp())


def as_time(seconds: float) -> str:
    """A time in the format of documents."""
    return datetime.fromtimestamp(seconds, UTC).strftime(_TIME)


def seconds_since_1970(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
