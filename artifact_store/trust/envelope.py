"""Signature envelopes: an in-toto statement with SLSA provenance in a DSSE envelope, one signature each.

A statement holds no time: equal artifacts get equal statements, independent of signer and date.
"""

from typing import Final, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from nxpipe.artifact_store.canonical import (
    canonical_json,
    parse_canonical_json,
    pre_authentication_encoding,
    sha256_hex,
)
from nxpipe.artifact_store.documents import Digest, Document, JsonObject, Name, parse_document
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.trust.keys import PublicKey, Signer, as_base64, from_base64

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PROVENANCE: Final = "https://slsa.dev/provenance/v1"
BUILD: Final = "nxpipe:build/1"
MAX_STATEMENT_BYTES: Final = 6 * 1024**2  # in base64 in an envelope, this is below the limit of a signature

# The key inputs that come from the builder; all others come from the request.
_INTERNAL: Final = ("compiler", "libraries")


class _Part(Document):
    model_config = ConfigDict(alias_generator=to_camel)


class Sha256(_Part):
    sha256: Digest


class Resource(_Part):
    name: Name
    digest: Sha256


class BuildDefinition(_Part):
    build_type: Literal["nxpipe:build/1"]
    external_parameters: JsonObject
    internal_parameters: JsonObject
    resolved_dependencies: tuple[Resource, ...] = Field(strict=False, max_length=10_000)


class Builder(_Part):
    id: Name


class RunDetails(_Part):
    builder: Builder


class Provenance(_Part):
    build_definition: BuildDefinition
    run_details: RunDetails


class Statement(_Part):
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Resource, ...] = Field(strict=False, min_length=1, max_length=1)
    predicate_type: Literal["https://slsa.dev/provenance/v1"]
    predicate: Provenance

    @property
    def manifest_digest(self) -> str:
        return self.subject[0].digest.sha256

    @property
    def builder(self) -> str:
        return self.predicate.run_details.builder.id

    def to_json(self) -> dict[str, object]:
        return self.model_dump(by_alias=True)

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Statement":
        return parse_document(cls, parse_canonical_json(data, limit=MAX_STATEMENT_BYTES))


def statement_of(manifest: Manifest, key_inputs: dict[str, object], builder: str) -> Statement:
    """The in-toto statement with the provenance of an artifact."""
    fields = {
        "_type": STATEMENT,
        "subject": [_resource(manifest.model.id, sha256_hex(manifest.to_bytes()))],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {name: key_inputs[name] for name in key_inputs if name not in _INTERNAL},
                "internalParameters": {name: key_inputs[name] for name in key_inputs if name in _INTERNAL},
                "resolvedDependencies": _dependencies(manifest, key_inputs),
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }
    return parse_document(Statement, fields)


def _dependencies(manifest: Manifest, key_inputs: dict[str, object]) -> list[object]:
    """The inputs with a digest: the key inputs, the compiler's source, weight files."""
    digests = {"key inputs": manifest.request_key}
    match key_inputs.get("compiler"):
        case {"source": str(digest)}:
            digests["compiler"] = digest
    match key_inputs.get("weights"):
        case {"files": dict(files)}:
            digests |= {f"weights/{name}": digest for name, digest in files.items()}
    return [_resource(name, digest) for name, digest in digests.items()]


def _resource(name: str, digest: str) -> dict[str, object]:
    return {"name": name, "digest": {"sha256": digest}}


PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MAX_SIGNATURE_BYTES: Final = 8 * 1024**2


class BadSignature(InvalidDocument):
    """An envelope that is not a valid signature of the expected document by the expected key."""


class EnvelopeSignature(Document):
    keyid: Digest
    sig: str


class Envelope(Document):
    payload: str
    payload_type: str = Field(alias="payloadType")
    signatures: tuple[EnvelopeSignature, ...] = Field(strict=False, min_length=1, max_length=1)

    @property
    def key_id(self) -> str:
        return self.signatures[0].keyid

    def to_bytes(self) -> bytes:
        return canonical_json(self.model_dump(by_alias=True))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Envelope":
        return parse_document(cls, parse_canonical_json(data, limit=MAX_SIGNATURE_BYTES))

    def require_subject(self, manifest_digest: str) -> None:
        """Check that the unverified payload names this manifest, without the key."""
        payload = from_base64(self.payload)
        if self.payload_type != PAYLOAD_TYPE or payload is None:
            raise BadSignature(f"its payload is not {PAYLOAD_TYPE} in base64")
        _require_subject(Statement.from_bytes(payload), manifest_digest)

    def statement(self, key: PublicKey, manifest_digest: str) -> Statement:
        """The statement that this key has signed for this manifest; an unsigned payload is never parsed."""
        if self.payload_type != PAYLOAD_TYPE:
            raise BadSignature(f"its payload has the type {self.payload_type[:80]!r}, not {PAYLOAD_TYPE!r}")
        if self.key_id != key.key_id:
            raise BadSignature(f"it is signed by key {self.key_id}, not by {key.key_id}")
        payload, signature = from_base64(self.payload), from_base64(self.signatures[0].sig)
        if payload is None or signature is None:
            raise BadSignature("its payload or signature is not in base64")
        if not key.proves(signature, pre_authentication_encoding(PAYLOAD_TYPE, payload)):
            raise BadSignature(f"key {key.key_id} has not signed this payload")
        statement = Statement.from_bytes(payload)
        _require_subject(statement, manifest_digest)
        return statement


def _require_subject(statement: Statement, manifest_digest: str) -> None:
    if statement.manifest_digest != manifest_digest:
        raise BadSignature(f"it is a signature of manifest {statement.manifest_digest}, not of {manifest_digest}")


def sign(statement: Statement, signer: Signer) -> Envelope:
    payload = statement.to_bytes()
    signature = signer.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    fields = {
        "payload": as_base64(payload),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": signer.public.key_id, "sig": as_base64(signature)}],
    }
    return parse_document(Envelope, fields)
