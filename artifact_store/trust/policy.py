"""Signing policy: the keys that may sign artifacts, evidence and generations of each channel.

The signature of a manifest does not cover evidence, so the signer of an artifact also signs each evidence document by
its digest.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.channel.change import ArtifactCheck, EvidenceVerifier, Sign
from nxpipe.artifact_store.channel.generation import Generation, Served, Signature
from nxpipe.artifact_store.documents import seconds_since_1970
from nxpipe.artifact_store.errors import Corrupt, StoreUnavailable
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.artifact_store.fetch.cached_store import sources_of
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.envelope import (
    Resource,
    Sha256,
    sign,
    statement_of,
)
from nxpipe.artifact_store.trust.keys import PublicKey, Signer, as_base64, from_base64
from nxpipe.artifact_store.trust.signatures import Signatures

# The time when a store stored a generation, in seconds since 1970 by its own clock.
StoredAt = Callable[[Generation], float]
_UNDER_WAY: Final = 60.0  # seconds between the signed date and the write to the store


def unknown_time(_: Generation) -> float:
    """0, for callers that do not know when the store stored a generation: no key counts as expired then."""
    return 0.0


Duty: TypeAlias = Literal["artifacts", "channels"]


@dataclass(frozen=True)
class TrustedKey:
    """A trusted key with a display name. `channels` None: all; `expires` None: never; `signs` None: both artifacts and
    the generations of channels.
    """

    name: str
    key: PublicKey
    channels: frozenset[str] | None = None
    expires: float | None = None  # seconds since 1970
    signs: Duty | None = None

    def may_sign(self, channel: str, what: Duty) -> bool:
        return (self.channels is None or channel in self.channels) and self.signs in (None, what)

    def counts(self, channel: str, at: float, what: Duty) -> bool:
        return self.may_sign(channel, what) and (self.expires is None or at < self.expires)

    def had_not_expired(self, generation: Generation, taken: StoredAt) -> bool:
        """True if the key was valid when the store stored the generation, by the store's clock."""
        return self.expires is None or taken(generation) - _UNDER_WAY < self.expires


@dataclass(frozen=True)
class Policy:
    """The channels that require signatures, the trusted keys, and the number of keys that must sign an artifact."""

    trusted: tuple[TrustedKey, ...] = ()
    required: frozenset[str] = frozenset()
    threshold: int = 1

    def trusts(self, key: PublicKey, channel: str, at: float) -> bool:
        return key in {trusted.key for trusted in self._valid_keys(channel, at, "channels")}

    def signers(self, store: Store, manifest_digest: str, channel: str, now: float) -> list[str]:
        """The names of the trusted keys with a valid signature of a manifest.

        A damaged or unreadable signature is an error only if the valid ones do not reach the threshold: a user who can
        add objects must not be able to block an artifact.
        """
        valid: list[str] = []
        faults: list[Corrupt | StoreUnavailable] = []
        for trusted in self._valid_keys(channel, now, "artifacts"):
            try:
                if Signatures(store).by(trusted.key, manifest_digest) is not None:
                    valid.append(trusted.name)
            except (Corrupt, StoreUnavailable) as error:
                faults.append(error)
        if faults and len(valid) < self.threshold:
            raise faults[0]
        return valid

    def artifact_check(self, store: Store, channel: str) -> ArtifactCheck | None:
        """The signature check of artifacts for a channel; None if the channel requires no signatures."""
        if channel not in self.required:
            return None

        def check(served: Served) -> str | None:
            names = self.signers(store, served.manifest.sha256, channel, clock_of(store))
            if len(names) >= self.threshold:
                return None
            if names:
                return (
                    f"channel {channel} requires {self.threshold} signatures, and {served.name} is signed only by "
                    f"{', '.join(names)}; sign it with another trusted key"
                )
            return (
                f"channel {channel} requires signed artifacts, and no key that it trusts has signed {served.name}; "
                f"sign it with: nxpipe store sign {served.name}"
            )

        return check

    def authors(self, generation: Generation, taken: StoredAt = unknown_time) -> list[str]:
        """The names of the trusted keys that have signed a generation while they were valid.

        A key must be valid at the date of the generation, and an expiring key also when the store stored it: the chain
        bounds the first date from below, and only the store determines the second.
        """
        message = generation.signed_bytes()
        by_key = {signature.key_id: from_base64(signature.signature) for signature in generation.signatures}
        authors = []
        for trusted in self._valid_keys(generation.channel, seconds_since_1970(generation.at), "channels"):
            signature = by_key.get(trusted.key.key_id)
            if signature and trusted.key.proves(signature, message) and trusted.had_not_expired(generation, taken):
                authors.append(trusted.name)
        return authors

    def fault(self, generation: Generation, taken: StoredAt = unknown_time) -> str | None:
        """The reason to refuse a generation: its channel requires a signature, and it has no valid one; or None."""
        if generation.channel not in self.required or self.authors(generation, taken):
            return None
        if not generation.signatures:
            return "is not signed"
        known = {trusted.key.key_id: trusted for trusted in self.trusted}
        names = [known[signature.key_id].name for signature in generation.signatures if signature.key_id in known]
        if not names:
            return "is signed by no key of the policy"
        return f"has no valid signature: that of {', '.join(names)} is wrong, expired, or not for this channel"

    def envelopes(self, store: Store, manifest_digest: str, channel: str) -> Iterator[tuple[str, bytes]]:
        """Paths and bytes of the signatures of a manifest by the channel's keys, as stored."""
        for trusted in self.trusted:
            if trusted.may_sign(channel, "artifacts"):
                envelope = Signatures(store).envelope(trusted.key, manifest_digest)
                if envelope is not None:
                    yield envelope

    def _valid_keys(self, channel: str, at: float, what: Duty) -> list[TrustedKey]:
        """The valid keys, each once: a key with two names is one signer."""
        by_id = {trusted.key.key_id: trusted for trusted in self.trusted if trusted.counts(channel, at, what)}
        return list(by_id.values())


def clock_of(store: Store) -> float:
    """The clock of the first available source of a store."""
    return sources_of(store).first("the clock", lambda place: place.now()) or 0.0


def signing_with(signer: Signer) -> Sign:
    """A function that signs a generation with a key."""
    return lambda message: Signature(key_id=signer.public.key_id, signature=as_base64(signer.sign(message)))


def sign_evidence(
    store: Store,
    published: Published,
    signer: Signer,
    builder: str,
    evidence: Sequence[Evidence] | None = None,
    *,
    omitted: Collection[str] = (),
) -> int:
    """Sign these documents of an artifact, by default all, that this key has not signed; return their number.
    `omitted`: kinds that the caller does not vouch for."""
    if evidence is None:
        evidence = _vouched(store, published, omitted)
    unsigned = [document for document in evidence if not _has_signed(store, signer, document.digest)]
    if not unsigned:
        return 0
    statement = statement_of(published.manifest, store.key_inputs(published.manifest), builder)
    for document in unsigned:
        subject = Resource(name=f"evidence of {published.model_id}", digest=Sha256(sha256=document.digest))
        envelope = sign(statement.model_copy(update={"subject": (subject,)}), signer)
        envelope.statement(signer.public, document.digest)
        store.backend.create(signature_folder(document.digest) + envelope.key_id, Payload.of(envelope.to_bytes()))
    return len(unsigned)


def has_signed_evidence(store: Store, published: Published, signer: Signer, *, omitted: Collection[str] = ()) -> bool:
    """True if this key has signed all evidence of an artifact, but for the omitted kinds."""
    return all(_has_signed(store, signer, document.digest) for document in _vouched(store, published, omitted))


def _vouched(store: Store, published: Published, omitted: Collection[str]) -> list[Evidence]:
    return [document for document in store.evidence(published.manifest_digest) if document.kind not in omitted]


def evidence_verifier(policy: Policy, store: Store, channel: str) -> EvidenceVerifier | None:
    """The signature check of evidence for a channel; None if the channel requires no signatures."""
    if channel not in policy.required:
        return None
    return lambda document: (
        len(policy.signers(store, document.digest, channel, store.backend.now())) >= policy.threshold
    )


def _has_signed(store: Store, signer: Signer, digest: str) -> bool:
    return Signatures(store).by(signer.public, digest) is not None
