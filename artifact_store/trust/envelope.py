"""One key's word for a manifest: a statement in a DSSE envelope, in one spelling, with one signature."""

from typing import Final

from pydantic import Field

from nxpipe.artifact_store.canonical import canonical_json, parse_canonical_json
from nxpipe.artifact_store.documents import Digest, Document, parse_document
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.trust.dsse import pre_authentication_encoding
from nxpipe.artifact_store.trust.keys import PublicKey, Signer, as_base64, from_base64
from nxpipe.artifact_store.trust.statement import Statement

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MAX_SIGNATURE_BYTES: Final = 8 * 1024**2


class BadSignature(InvalidDocument):
    """An envelope that does not prove what it was read for."""


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

    def insist_on_subject(self, manifest_digest: str) -> None:
        """That it claims to speak of this manifest, for those who have not got its key; nothing is proved by that."""
        payload = from_base64(self.payload)
        if self.payload_type != PAYLOAD_TYPE or payload is None:
            raise BadSignature(f"its payload is no {PAYLOAD_TYPE} in base64")
        _insist_on_subject(Statement.from_bytes(payload), manifest_digest)

    def statement(self, key: PublicKey, manifest_digest: str) -> Statement:
        """What this key says of this manifest; nothing is read of a payload that it has not signed."""
        if self.payload_type != PAYLOAD_TYPE:
            raise BadSignature(f"its payload is of type {self.payload_type[:80]!r}, not {PAYLOAD_TYPE!r}")
        if self.key_id != key.key_id:
            raise BadSignature(f"it is signed by key {self.key_id}, not by {key.key_id}")
        payload, signature = from_base64(self.payload), from_base64(self.signatures[0].sig)
        if payload is None or signature is None:
            raise BadSignature("its payload or signature is not in base64")
        if not key.proves(signature, pre_authentication_encoding(PAYLOAD_TYPE, payload)):
            raise BadSignature(f"key {key.key_id} has not signed this payload")
        statement = Statement.from_bytes(payload)
        _insist_on_subject(statement, manifest_digest)
        return statement


def _insist_on_subject(statement: Statement, manifest_digest: str) -> None:
    if statement.manifest_digest != manifest_digest:
        raise BadSignature(f"it speaks of manifest {statement.manifest_digest}, not of {manifest_digest}")


def sign(statement: Statement, signer: Signer) -> Envelope:
    payload = statement.to_bytes()
    signature = signer.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    named = {
        "payload": as_base64(payload),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": signer.public.key_id, "sig": as_base64(signature)}],
    }
    return parse_document(Envelope, named)
