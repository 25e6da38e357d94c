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

_SIGN_AGAIN: Final = "find out who changed it, then have the same key sign the artifact again"


class Signatures:
    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, published: Published, signer: Signer, builder: str) -> Statement:
        """Sign a manifest that has just been read and proved."""
        statement = statement_of(published.manifest, self._store.key_inputs(published.manifest), builder)
        envelope = sign(statement, signer)
        # A key that says one thing and signs with another is found out here, not on the day of the rollout.
        envelope.statement(signer.public, published.manifest_digest)
        path, payload = _path(published.manifest_digest, envelope.key_id), Payload.of(envelope.to_bytes())
        # What a key has signed stands: another word of it is needed only where the first one cannot be believed.
        if not self._store.backend.create(path, payload) and not self._stands(signer.public, published.manifest_digest):
            self._store.backend.replace(path, payload)
        return statement

    def by(self, key: PublicKey, manifest_digest: str) -> Statement | None:
        """What this key has signed of this manifest, proved; None when it has signed nothing."""
        path = _path(manifest_digest, key.key_id)

        def proved(place: Backend) -> Statement | None:
            chunks = place.read(path)
            if chunks is None:
                return None
            try:
                return Envelope.from_bytes(read_at_most(MAX_SIGNATURE_BYTES, chunks)).statement(key, manifest_digest)
            except InvalidDocument as fault:
                raise Corrupt(f"{place.url}/{path}", str(fault), _SIGN_AGAIN) from fault

        return sources_of(self._store).first(path, proved)

    def envelope(self, key: PublicKey, manifest_digest: str) -> tuple[str, bytes] | None:
        """The path and the bytes of what this key has signed, unproved."""
        path = _path(manifest_digest, key.key_id)
        read = sources_of(self._store).first(path, lambda place: place.read(path))
        return None if read is None else (path, read_at_most(MAX_SIGNATURE_BYTES, read))

    def well_formed(self, manifest_digest: str, key_id: str) -> bytes | None:
        """What lies in a key's place: an envelope of that key about that manifest. Nothing is proved by it."""
        path = _path(manifest_digest, key_id)
        chunks = self._store.backend.read(path)
        if chunks is None:
            return None
        try:
            data = read_at_most(MAX_SIGNATURE_BYTES, chunks)
            envelope = Envelope.from_bytes(data)
            if envelope.key_id != key_id:
                raise InvalidDocument(f"it is one of key {envelope.key_id}")
            envelope.insist_on_subject(manifest_digest)
        except InvalidDocument as fault:
            raise Corrupt(f"{self._store.url}/{path}", str(fault), _SIGN_AGAIN) from fault
        return data

    def _stands(self, key: PublicKey, manifest_digest: str) -> bool:
        try:
            return self.by(key, manifest_digest) is not None
        except Corrupt:
            return False

    def key_ids(self, manifest_digest: str) -> list[str]:
        """The keys that claim to have signed a manifest; nothing is proved of them."""
        folder = signature_folder(manifest_digest)
        names = (path.removeprefix(folder) for path in self._store.backend.paths(folder))
        return sorted(filter(is_key, names))


def _path(manifest_digest: str, key_id: str) -> str:
    return f"{signature_folder(manifest_digest)}{key_id}"
