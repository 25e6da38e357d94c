"""Signatures of a store: one object for each manifest and key."""

from typing import Final

from nxpipe.artifact_store.backends.protocol import Backend, Payload
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.fetch.cached_store import sources_of
from nxpipe.artifact_store.layout import is_key, signature_folder
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.envelope import (
    MAX_SIGNATURE_BYTES,
    Envelope,
    Statement,
    sign,
    statement_of,
)
from nxpipe.artifact_store.trust.keys import PublicKey, Signer

_SIGN_AGAIN: Final = "investigate the change, then sign the artifact again with the same key"


class Signatures:
    """The signatures of manifests and evidence in one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, published: Published, signer: Signer, builder: str) -> Statement:
        """Sign a verified manifest."""
        statement = statement_of(published.manifest, self._store.key_inputs(published.manifest), builder)
        envelope = sign(statement, signer)
        # A signer whose public key does not match its private key fails here, not at the rollout.
        envelope.statement(signer.public, published.manifest_digest)
        path, payload = _path(published.manifest_digest, envelope.key_id), Payload.of(envelope.to_bytes())
        # A valid existing signature of this key is kept; an invalid one is replaced.
        if not self._store.backend.create(path, payload) and not self._is_valid(
            signer.public, published.manifest_digest
        ):
            self._store.backend.replace(path, payload)
        return statement

    def by(self, key: PublicKey, manifest_digest: str) -> Statement | None:
        """The verified statement of this key about this manifest; None if there is no signature."""
        path = _path(manifest_digest, key.key_id)

        def verified(backend: Backend) -> Statement | None:
            chunks = backend.read(path)
            if chunks is None:
                return None
            try:
                return Envelope.from_bytes(read_at_most(MAX_SIGNATURE_BYTES, chunks)).statement(key, manifest_digest)
            except InvalidDocument as fault:
                raise Corrupt(f"{backend.url}/{path}", str(fault), _SIGN_AGAIN) from fault

        return sources_of(self._store).first(path, verified)

    def envelope(self, key: PublicKey, manifest_digest: str) -> tuple[str, bytes] | None:
        """The path and bytes of this key's signature, unverified."""
        path = _path(manifest_digest, key.key_id)
        chunks = sources_of(self._store).first(path, lambda backend: backend.read(path))
        return None if chunks is None else (path, read_at_most(MAX_SIGNATURE_BYTES, chunks))

    def well_formed(self, manifest_digest: str, key_id: str) -> bytes | None:
        """The bytes of a signature, if it is an envelope of that key and manifest; the signature is not verified."""
        path = _path(manifest_digest, key_id)
        chunks = self._store.backend.read(path)
        if chunks is None:
            return None
        try:
            data = read_at_most(MAX_SIGNATURE_BYTES, chunks)
            envelope = Envelope.from_bytes(data)
            if envelope.key_id != key_id:
                raise InvalidDocument(f"it is of key {envelope.key_id}")
            envelope.require_subject(manifest_digest)
        except InvalidDocument as fault:
            raise Corrupt(f"{self._store.url}/{path}", str(fault), _SIGN_AGAIN) from fault
        return data

    def _is_valid(self, key: PublicKey, manifest_digest: str) -> bool:
        try:
            return self.by(key, manifest_digest) is not None
        except Corrupt:
            return False

    def key_ids(self, manifest_digest: str) -> list[str]:
        """The key ids of the stored signatures of a manifest, unverified."""
        folder = signature_folder(manifest_digest)
        names = (path.removeprefix(folder) for path in self._store.backend.paths(folder))
        return sorted(filter(is_key, names))


def _path(manifest_digest: str, key_id: str) -> str:
    return f"{signature_folder(manifest_digest)}{key_id}"
