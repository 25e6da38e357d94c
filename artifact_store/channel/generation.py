"""Generation: one entry of a channel's log, the complete state of the channel from that entry on."""

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from nxpipe.artifact_store.canonical import canonical_json, pre_authentication_encoding, sha256_hex
from nxpipe.artifact_store.documents import (
    Blob,
    Count,
    Digest,
    Document,
    Label,
    ModelId,
    Name,
    Sealed,
    Text,
    Time,
    WriteId,
)
from nxpipe.artifact_store.layout import generation_path, head_path
from nxpipe.artifact_store.names import short_name
from nxpipe.artifact_store.records import Published

MAX_GENERATION_BYTES: Final = 1024**2


MAX_SERVED: Final = 1000


PAYLOAD_TYPE: Final = "application/vnd.nxpipe.generation+json"


class Served(Document):
    """The artifact that a channel serves for one model on one target.

    `without`: the kinds of evidence that it lacked when it was promoted, and a waiver allowed. Without such kinds the
    document does not have the field.
    """

    model_id: ModelId
    target: Name
    request_key: Digest
    manifest: Blob
    without: tuple[Label, ...] = Field(default=(), strict=False, min_length=1, max_length=16)

    @classmethod
    def of(cls, published: Published, without: Collection[str] = ()) -> "Served":
        record = published.record
        return cls(
            model_id=record.model_id,
            target=record.target,
            request_key=record.request_key,
            manifest=record.manifest,
            **({"without": tuple(sorted(without))} if without else {}),
        )

    @field_validator("without")
    @classmethod
    def _is_sorted(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        if list(kinds) != sorted(set(kinds)):
            raise ValueError("its kinds of evidence are not sorted, or two are the same")
        return kinds

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return fields if self.without else {name: value for name, value in fields.items() if name != "without"}

    @property
    def slot(self) -> tuple[str, str]:
        return self.model_id, self.target

    @property
    def name(self) -> str:
        return short_name(self.model_id, self.request_key)


class Signature(Document):
    """One key's signature of a document."""

    key_id: Digest
    signature: str = Field(pattern=r"\A[A-Za-z0-9+/]{1,2048}={0,2}\z")  # base64


class Generation(Sealed):
    """One entry of a channel's log."""

    max_bytes: ClassVar[int] = MAX_GENERATION_BYTES

    format: Literal["nxpipe.generation/1"] = "nxpipe.generation/1"
    channel: Label
    generation: Count
    previous: Digest | None
    action: Literal["promote", "rollback"]
    artifacts: tuple[Served, ...] = Field(strict=False, max_length=MAX_SERVED)
    restores: Count | None
    actor: Name
    reason: Text
    at: Time
    write_id: WriteId
    signatures: tuple[Signature, ...] = Field(strict=False, max_length=16)

    @model_validator(mode="after")
    def _is_consistent(self) -> "Generation":
        slots = [served.slot for served in self.artifacts]
        if slots != sorted(set(slots)):
            raise ValueError("its artifacts are not sorted, or two have the same model and target")
        if (self.previous is None) != (self.generation == 1):
            raise ValueError("only the first generation has no predecessor")
        if (self.restores is None) != (self.action == "promote") or (self.restores or 0) >= self.generation:
            raise ValueError("only a rollback restores a generation, which must be an earlier one")
        return self

    @property
    def path(self) -> str:
        return generation_path(self.channel, self.generation)

    @property
    def digest(self) -> str:
        """The digest that the next generation records as `previous`."""
        return sha256_hex(self.to_bytes())

    @property
    def origin(self) -> int:
        """The generation that first had this state; a rollback looks for a state before it."""
        return self.restores or self.generation

    def signed_bytes(self) -> bytes:
        """The bytes that a signature of this generation covers."""
        return pre_authentication_encoding(PAYLOAD_TYPE, canonical_json(self.model_dump(exclude={"signatures"})))


class Head(Sealed):
    """A hint at the newest generation; later ones may exist."""

    format: Literal["nxpipe.head/1"] = "nxpipe.head/1"
    channel: Label
    generation: Count

    @property
    def path(self) -> str:
        return head_path(self.channel)


def merged(state: Iterable[Served], news: Iterable[Served]) -> tuple[Served, ...]:
    """The state after each new artifact replaces the artifact of the same model and target."""
    slots = {served.slot: served for served in (*state, *news)}
    return tuple(slots[slot] for slot in sorted(slots))
